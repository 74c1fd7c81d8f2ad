from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, StorageError, TrainingError
from lmms_stream.loader.drop_list import append_left_out, read_left_out
from lmms_stream.plan.left_out import LeftOut, LeftOutSample
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed

from ..conftest import write_samples, write_tokens
from .runs import trainer_of, write_small_run

BAD_IDS = (11, 42, 77)
QUICK: dict[str, Any] = {"save_steps": "no"}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    end_distributed()


def run(path: Path, output: str, *overrides: str) -> Any:
    """A finished run."""
    trainer = trainer_of(path, f"train.output_dir={path.parent / output}", *overrides)
    trainer.train()
    end_distributed()
    return trainer


def losses(output: Path) -> dict[int, tuple[float, list[int]]]:
    return {each["step"]: (each["loss"], each["sample_ids"]) for each in read_log(output)}


def test_a_run_with_dropped_samples_keeps_its_steps_and_resumes(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=300)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=2, lr_scheduler_type="constant")
    (tmp_path / "drop").write_text("".join(f"data:{each}\n" for each in range(100)))
    drop = f"train.bad_samples.drop={tmp_path / 'drop'}"
    run(path, "plain")
    run(path, "whole", drop)
    run(path, "parts", drop, "train.max_steps=1")
    (tmp_path / "parts" / "left_out.jsonl").unlink()
    resumed = run(path, "parts")  # what a checkpoint leaves out stays left out
    plain, whole, parts = (losses(tmp_path / name) for name in ("plain", "whole", "parts"))
    assert whole == parts
    assert {step: ids for step, (_, ids) in whole.items()} == {step: ids for step, (_, ids) in plain.items()}
    assert whole[1][0] != plain[1][0]
    left_out = LeftOut.load(resumed.counts.left_out)
    assert left_out.of_source("data").at_step(0).tolist() == list(range(100))
    lines = [json.loads(line) for line in (tmp_path / "parts" / "left_out.jsonl").read_text().splitlines()]
    assert {line.pop("dataset") for line in lines} == {*resumed.loader.identities.values()}
    assert LeftOut.load(lines).samples == left_out.samples


def write_bad(folder: Path, *, num_samples: int = 100) -> None:
    """A dataset whose samples of BAD_IDS have a token more than its lengths index says."""
    spans, measured = np.array([[5, 20]], np.int32), folder.with_name(f"{folder.name}-measured")
    samples = [(np.full(20 + number % 30, number, np.int32), spans) for number in range(num_samples)]
    write_samples(measured, samples, shard_bytes=1 << 20)
    for number in BAD_IDS:
        samples[number] = (np.full(21 + number % 30, number, np.int32), spans)
    write_samples(folder, samples, shard_bytes=1 << 20, with_index=False)
    shutil.copytree(measured / "_lmms", folder / "_lmms")


def test_bad_samples_are_told_listed_and_as_if_they_were_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_bad(tmp_path / "data")
    path = write_small_run(
        tmp_path / "run.yaml", tmp_path / "data", max_steps=3, global_batch=8, bad_samples={"quarantine": 100}, **QUICK
    )
    trainer = trainer_of(path)
    with caplog.at_level(logging.WARNING, "lmms_stream"):
        trainer.train()
    end_distributed()
    left_out = LeftOut.load(trainer.counts.left_out)
    assert {each.sample_id for each in left_out.samples} == {*BAD_IDS}
    assert sum("is left out from step" in record.message for record in caplog.records) == len(BAD_IDS)
    listed = read_left_out(tmp_path / "default" / "left_out", trainer.loader.identities)
    assert listed.left_out.samples == left_out.samples
    run(path, "dropped", f"train.bad_samples.drop={tmp_path / 'default' / 'left_out.jsonl'}")
    assert losses(tmp_path / "dropped") == losses(tmp_path / "default")
    with pytest.raises(TrainingError, match=r"quarantine is 2: correct the data .*data:11: .*lengths index"):
        run(path, "few", "train.bad_samples.quarantine=2")


def test_an_output_folder_that_is_used_again_leaves_out_what_is_bad_in_its_own_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was killed before its first checkpoint leaves the lists of its workers alone."""
    write_bad(tmp_path / "data")
    write_bad(tmp_path / "other", num_samples=90)
    settings = {"max_steps": 1, "bad_samples": {"quarantine": 100}, **QUICK}
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", **settings)
    loader = trainer_of(path).loader
    end_distributed()
    folder = tmp_path / "default" / "left_out"
    first, second = (LeftOutSample("data", number, "damaged", 4, "quarantined") for number in (1, 2))
    append_left_out(folder, first, dataset=loader.identities["data"], rank=0, worker=1)
    append_left_out(folder, second, dataset=loader.identities["data"], rank=3, worker=0)
    with caplog.at_level(logging.WARNING, "lmms_stream"):
        trainer = run(path, "default")
        assert not [each for each in caplog.messages if "other datasets" in each]
        assert {1, 2} <= {each.sample_id for each in LeftOut.load(trainer.counts.left_out).samples}
        path = write_small_run(tmp_path / "other.yaml", tmp_path / "other", **settings)
        shutil.copytree(folder, tmp_path / "again" / "left_out")
        trainer = run(path, "again")
    (told,) = [each for each in caplog.messages if "other datasets" in each]
    assert "samples of other datasets than those that are read, which are not left out (data:" in told
    assert not {1, 2} & {each.sample_id for each in LeftOut.load(trainer.counts.left_out).samples}


def test_a_line_that_the_disk_takes_in_part_is_an_error_and_the_next_line_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = LeftOutSample("data", 5, "damaged", 4, "quarantined")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot be appended to \(the line was written in part\): make room"):
            append_left_out(tmp_path, sample, dataset="one", rank=0, worker=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    append_left_out(tmp_path, sample, dataset="one", rank=0, worker=0)
    assert synced == [(tmp_path / "rank-0-worker-0.jsonl").stat().st_ino]
    (line,) = (tmp_path / "rank-0-worker-0.jsonl").read_text().splitlines()
    assert json.loads(line)["sample_id"] == 5


def test_settings_of_left_out_samples_are_checked(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=50)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1)
    for setting, message in (
        ("bad_samples.quarantine=-1", "train.bad_samples.quarantine must be 0 or more, got -1"),
        ("bad_samples.drop={x: -1}", "from_step of the drop list x must be 0 or more, got -1"),
        ("bad_samples.timeout_s=0", "train.bad_samples.timeout_s must be above 0, and at most .* got 0"),
        (f"bad_samples.drop={tmp_path / 'nothing'}", "the drop list .*nothing cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_of(path, f"train.{setting}")
