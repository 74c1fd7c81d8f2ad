"""Which rank the others wait for, by what each told of itself, and where NCCL's collectives would be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lmms_stream.train.report.standstill import RankState, verdict_of
from lmms_stream.train.run import distributed
from lmms_stream.train.run.distributed import flight_recorder_files, record_collectives

WAITS = RankState(12, "running backward in step 3", 16.0, is_in_collective=True, beat=9)
EARLY = [WAITS._replace(beat=2)] * 4
AT = "read (/code/labels.py:20)"


def test_a_rank_that_has_begun_fewer_phases_is_behind() -> None:
    late = WAITS._replace(number=10, said="waiting for data in step 3", is_in_collective=False, at=AT)
    found = verdict_of([late, WAITS, WAITS, WAITS], EARLY, rank=2)
    assert found.sentence == f"rank 0 did not come: it has been waiting for data in step 3 for 16 s, in {AT}"
    assert found.first_to_tell == 1


def test_of_ranks_in_one_phase_the_one_that_waits_in_no_collective_is_behind() -> None:
    computes = WAITS._replace(is_in_collective=False, at=AT)
    found = verdict_of([WAITS, WAITS, WAITS, computes], EARLY, rank=0)
    assert found.sentence == f"rank 3 did not come: it has been running backward in step 3 for 16 s, in {AT}"


def test_a_rank_that_tells_nothing_any_more_does_not_answer() -> None:
    found = verdict_of([WAITS, WAITS._replace(number=11, beat=2), WAITS, WAITS], EARLY, rank=0)
    assert found.sentence.startswith("rank 1 does not answer (it was stopped, is dead, or C code keeps Python's lock);")
    assert found.sentence.endswith("when it was last heard of, it was running backward in step 3")


def test_where_all_ranks_wait_alike_none_is_blamed() -> None:
    said = "all ranks wait alike, and which of them the others wait for is in their stacks"
    assert verdict_of([WAITS] * 4, EARLY, rank=1) == (said, 0)
    assert verdict_of([WAITS._replace(is_in_collective=False)] * 4, EARLY, rank=1).sentence == said
    assert verdict_of([None] * 4, [None] * 4, rank=1).first_to_tell == 1  # the store does not answer


def test_many_ranks_are_named_in_part() -> None:
    late = WAITS._replace(number=10, is_in_collective=False)
    assert verdict_of([*[late] * 10, WAITS], [], rank=10).sentence.endswith(" (and 2 ranks more)")


def test_collectives_of_nccl_are_recorded_unless_the_user_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "10"})
    monkeypatch.setattr(distributed, "_begins", [])
    assert flight_recorder_files() == ""
    record_collectives(tmp_path)
    assert os.environ == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "10",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl-rank-"),
    }
    assert flight_recorder_files() == (
        f"; NCCL's collectives of each rank N will be in {tmp_path}/nccl-rank-N, which torchfrtrace reads"
    )
    assert not [*tmp_path.iterdir()]
