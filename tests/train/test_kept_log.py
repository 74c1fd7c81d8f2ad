"""What of a run's log lies beside its checkpoints, and comes back where the log was lost."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import DataError, StorageError
from lmms_stream.storage.local import LocalStorage
from lmms_stream.train.report.run_log import KeptLog, part_name, restore_log
from lmms_stream.train.report.train_log import (
    DIGESTS_NAME,
    RecordFile,
    StepDigests,
    digest_of,
    digest_words,
    history,
    known_digest,
    read_digests,
    read_log,
)


def record(step: int, loss: float = 0.5) -> dict[str, Any]:
    return {"step": step, "loss": loss, "num_steps": 1}


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    log = RecordFile(path)
    for each in records:
        log.write(each)
    log.close()


def keep(storage: LocalStorage, *, after: int, steps: Iterable[int], save_at: int, loss: float = 0.5) -> None:
    """What a run that began after a step keeps: records of some steps, with the checkpoint of the last."""
    kept = KeptLog()
    kept.begin(after)
    for step in steps:
        kept.add(record(step, loss))
    for key, data in kept.part(save_at).items():
        storage.write(key, data)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """Of a run that saved after steps 2, 4 and 6, with an evaluation at step 4."""
    found, kept = LocalStorage(tmp_path / "store"), KeptLog()
    for step in range(1, 7):
        kept.add(record(step))
        if step == 4:
            kept.add({"step": 4, "eval_loss": 0.25})
        if step % 2 == 0:
            for key, data in kept.part(step).items():
                found.write(key, data)
    return found


def test_an_evaluation_after_its_checkpoint_is_kept_next_to_it(tmp_path: Path) -> None:
    storage, kept = LocalStorage(tmp_path / "store"), KeptLog()
    for key, each in (("step-00000002", record(2)), ("step-00000002-evaluation", {"step": 2, "eval_loss": 0.25})):
        kept.add(each)
        (part,) = kept.part(2).items()
        assert part[0] == f"log/{key}.jsonl"
        storage.write(*part)
    assert restore_log(storage, 2, tmp_path / "train_log.jsonl") == 2
    assert restore_log(storage, 2, tmp_path / "train_log.jsonl") == 0


IDS = [("a", np.arange(40) * 3), ("b", np.array([5])), ("a", np.array([7, 7])), ("", np.arange(0))]


def words(packs: list[tuple[str, Any]]) -> list[float]:
    batches: Any = [SimpleNamespace(source=source, sample_ids=torch.from_numpy(ids)) for source, ids in packs]
    return digest_words(batches)


def test_a_digest_is_that_of_the_samples_in_any_ranks_and_order(tmp_path: Path) -> None:
    with closing(StepDigests(tmp_path, step=0)) as digests:
        for ranks in ([IDS], [IDS[:2], IDS[2:]], [[each] for each in reversed(IDS)], [[], [*IDS, ("a", np.arange(0))]]):
            digests.write([sum(each) for each in zip(*map(words, ranks), strict=True)])
        digests.write(words([]))
        digests.write(words([("b", IDS[0][1]), *IDS[1:]]))
    same, *others = read_digests(tmp_path)
    assert others[:3] == [same] * 3
    assert same == known_digest(digest_of("a", np.array([*range(0, 120, 3), 7, 7])) + digest_of("b", np.array([5])))
    assert others[3] == 1  # not 0: a step without samples has a digest
    assert others[4] not in (0, 1, same)


def test_digests_are_cut_at_a_resume_and_restored_from_the_copy_next_to_the_checkpoints(tmp_path: Path) -> None:
    storage, here, there = LocalStorage(tmp_path / "store"), tmp_path / "here", tmp_path / "there"

    def add(folder: Path, step: int, *digests: int, kept_at: str | None = storage.url) -> dict[str, bytes]:
        with closing(StepDigests(folder, step=step, kept_at=kept_at)) as file:
            for digest in digests:
                file.write([float(digest), 0, 0, 0])
            return file.part()

    for key, data in add(here, 0, 1, 2, 3, 4).items():
        storage.write(key, data)
    add(here, 4, 5, 6)
    assert read_digests(here) == [1, 2, 3, 4, 5, 6]
    add(here, 5)
    assert read_digests(here) == [1, 2, 3, 4, 5]
    add(there, 2, 9)
    assert read_digests(there) == [1, 2, 9]
    add(tmp_path / "later", 5, 7)
    assert read_digests(tmp_path / "later") == [1, 2, 3, 4, 0, 7]  # 0: not recorded
    add(here, 5, 8, 8)  # another node did steps from 2 on again
    for key, data in add(there, 2, 9, 10, 11).items():
        storage.write(key, data)
    add(here, 5)
    assert read_digests(here) == [1, 2, 9, 10, 11]
    assert add(tmp_path / "alone", 1, kept_at=None) == {}
    assert read_digests(tmp_path / "alone") == [0]
    assert read_digests(tmp_path / "none") == []
    for folder, kept_at in ((tmp_path / "torn", None), (tmp_path / "torn_copy", storage.url)):
        whole = (here / DIGESTS_NAME).read_bytes()
        folder.mkdir()
        (folder / DIGESTS_NAME).write_bytes(whole[:29])
        storage.write(f"log/{DIGESTS_NAME}", whole[:29])
        add(folder, 5, 7, kept_at=kept_at)
        assert read_digests(folder) == [1, 2, 9, 0, 0, 7]  # not 5 bytes of a digest


def test_a_digest_that_the_disk_takes_in_part_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / DIGESTS_NAME
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, hard))  # the second digest has room for 4 bytes
    try:
        with closing(StepDigests(tmp_path, step=0)) as digests:
            digests.write([1.0, 0, 0, 0])
            with pytest.raises(StorageError, match=DIGESTS_NAME):
                digests.write([2.0, 0, 0, 0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert file.stat().st_size == 12
    with closing(StepDigests(tmp_path, step=1)) as digests:
        digests.write([2.0, 0, 0, 0])
    assert read_digests(tmp_path) == [1, 2]


EVERYTHING = [*map(record, range(1, 5)), {"step": 4, "eval_loss": 0.25}, record(5), record(6)]


@pytest.mark.parametrize("known", range(7))
def test_what_a_log_lacks_is_added_and_nothing_else(storage: LocalStorage, tmp_path: Path, known: int) -> None:
    path = tmp_path / "train_log.jsonl"
    before = [each for each in EVERYTHING if each["step"] <= known]
    write(path, before)
    assert restore_log(storage, 6, path) == len(EVERYTHING) - len(before)
    assert read_log(path) == EVERYTHING
    assert restore_log(storage, 6, path) == 0


def test_a_log_with_a_gap_and_steps_that_do_not_count_becomes_that_of_the_run(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """As of a node that was away while the others went on from a checkpoint."""
    path = tmp_path / "train_log.jsonl"
    write(path, [record(1), record(2), record(3, 0.75), record(8, 0.75)])
    assert restore_log(storage, 6, path) > 0
    found = history(read_log(path))
    assert [each["step"] for each in found.steps] == [1, 2, 3, 4, 5, 6]
    assert {each["loss"] for each in found.steps} == {0.5}
    assert found.evaluations == [{"step": 4, "eval_loss": 0.25}]


def test_of_a_checkpoint_that_was_saved_again_the_later_records_count(storage: LocalStorage, tmp_path: Path) -> None:
    """A run that began again after step 2, as its checkpoints of steps 4 and 6 were damaged."""
    keep(storage, after=2, steps=range(3, 7), save_at=6, loss=0.25)
    path = tmp_path / "train_log.jsonl"
    assert restore_log(storage, 6, path) == 6
    assert [each["loss"] for each in read_log(path)] == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


def test_records_of_a_run_that_kept_none_before_are_taken_as_far_as_they_go(
    storage: LocalStorage, tmp_path: Path
) -> None:
    storage.delete(part_name(2))
    path = tmp_path / "train_log.jsonl"
    assert restore_log(storage, 6, path) == 5
    assert restore_log(storage, 1, path) == 0


@pytest.mark.parametrize("known", [0, 1, 3])
def test_checkpoints_with_no_record_or_an_evaluation_alone_do_not_end_the_search(tmp_path: Path, known: int) -> None:
    """As of a run that saves more often than it logs."""
    storage, kept = LocalStorage(tmp_path / "store"), KeptLog()
    records = {10: record(10), 15: {"step": 15, "eval_loss": 0.25}, 20: record(20)}
    for step in range(5, 35, 5):
        if step in records:
            kept.add(records[step])
        for key, data in kept.part(step).items():
            storage.write(key, data)
    path = tmp_path / "train_log.jsonl"
    write(path, [*records.values()][:known])
    assert restore_log(storage, 30, path) == 3 - known
    assert read_log(path) == [*records.values()]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"", "has no start of the log"),
        (b"{}", "has no start of the log"),
        (b'{"after_step": 6}', "begins after step 6, which is not before step 6"),
    ],
)
def test_a_part_without_its_beginning_is_named(storage: LocalStorage, tmp_path: Path, head: bytes, reason: str) -> None:
    storage.write(part_name(6), head and head + b"\n" + json.dumps(record(6)).encode() + b"\n")
    with pytest.raises(DataError, match=f"log/step-00000006.jsonl:? .*{reason}.*: remove it"):
        restore_log(storage, 6, tmp_path / "train_log.jsonl")
