from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import ConfigError, TrainingError
from lmms_stream.loader.left_out_list import read_left_out
from lmms_stream.plan.left_out import LeftOut
from lmms_stream.processors.base import SegmentError
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed

from ..conftest import write_tokens
from .runs import trainer_of, write_run

BAD_IDS = (11, 42, 77)


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
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4, lr_scheduler_type="constant")
    (tmp_path / "drop").write_text("".join(f"data:{each}\n" for each in range(100)))
    drop = f"train.drop={tmp_path / 'drop'}"
    run(path, "plain")
    run(path, "whole", drop)
    run(path, "parts", drop, "train.max_steps=2")
    resumed = run(path, "parts")  # what a checkpoint leaves out stays left out
    plain, whole, parts = (losses(tmp_path / name) for name in ("plain", "whole", "parts"))
    assert whole == parts
    assert {step: ids for step, (_, ids) in whole.items()} == {step: ids for step, (_, ids) in plain.items()}
    assert whole[1][0] != plain[1][0]
    left_out = LeftOut.load(resumed.counts.left_out)
    assert left_out.of_source("data").at_step(0).tolist() == list(range(100))
    lines = (tmp_path / "parts" / "left_out.jsonl").read_text().splitlines()
    assert LeftOut.load([json.loads(line) for line in lines]).samples == left_out.samples


def test_bad_samples_are_told_listed_and_as_if_they_were_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokens(tmp_path / "data", num_samples=100)
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4, on_bad_sample="quarantine")
    trainer = trainer_of(path)
    damage(trainer)
    with caplog.at_level(logging.WARNING, "lmms_stream"):
        trainer.train()
    end_distributed()
    left_out = LeftOut.load(trainer.counts.left_out)
    assert {each.sample_id for each in left_out.samples} == {*BAD_IDS}
    assert sum("is left out from step" in record.message for record in caplog.records) == len(BAD_IDS)
    assert read_left_out(tmp_path / "default" / "left_out").samples == left_out.samples
    run(path, "dropped", f"train.drop={tmp_path / 'default' / 'left_out.jsonl'}")
    assert losses(tmp_path / "dropped") == losses(tmp_path / "default")

    few = trainer_of(path, "train.max_bad_samples=2", f"train.output_dir={tmp_path / 'few'}")
    damage(few)
    with pytest.raises(TrainingError, match=r"max_bad_samples is 2: correct the data .*data:11: .*damaged"):
        few.train()


def damage(trainer: Any) -> None:
    """Have samples of BAD_IDS fail in the processor."""
    fillers = trainer.loader._worker.batches._fillers
    good = fillers["data"]

    class Failing(TokensProcessor):
        def fill_packs(self, columns: Any, addresses: Any, segments: Any, rows: Any) -> Any:
            for segment, sample_id in enumerate(segments.sample_ids.tolist()):
                if sample_id in BAD_IDS:
                    raise SegmentError("it is damaged", segment=segment)
            return good.fill_packs(columns, addresses, segments, rows)

    fillers["data"] = Failing()


def test_settings_of_left_out_samples_are_checked(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=50)
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1)
    for setting, message in (
        ("on_bad_sample=skip", "on_bad_sample"),
        ("max_bad_samples=-1", "train.max_bad_samples must be 0 or more, got -1"),
        ("sample_timeout_s=0", "train.sample_timeout_s must be above 0, got 0"),
        (f"drop={tmp_path / 'nothing'}", "the drop list .*nothing cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_of(path, f"train.{setting}")
