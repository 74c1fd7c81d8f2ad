"""Which part of a run is its limit, measured on runs of which it is known: far apart, so that no time is asserted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.loader.collate import collate
from lmms_stream.tools.profile.measure import MeasureConfig, measure
from lmms_stream.tools.profile.rates import verdict_of
from lmms_stream.train.run.distributed import end_distributed
from lmms_stream.types import Batch

from ...conftest import run_cli, write_samples
from ...rounds import in_long_rounds
from ..runs import trainer_of, write_run

MEASURED = MeasureConfig(steps=1, warmup_steps=1, seconds=30)
PACK_S = 0.4  # that a worker waits for each pack


@pytest.fixture(autouse=True)
def _group_ends() -> Iterator[None]:
    yield
    end_distributed()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model on packs of 256 tokens, which would save and export."""
    folder = tmp_path_factory.mktemp("limits")
    lengths = np.random.default_rng(0).integers(20, 60, 4000).tolist()
    samples = [
        (np.full(length, number % 500, np.int32), np.array([[length // 2, length]], np.int32))
        for number, length in enumerate(lengths)
    ]
    write_samples(folder / "data", samples)
    return write_run(folder / "run.yaml", folder / "data", max_steps=3, save_steps=1, export=True, num_workers=1)


def collate_slowly(*args: Any, **options: Any) -> Batch:
    """What collate gives, later: as where a processor or a store is slow."""
    threading.Event().wait(PACK_S)
    return collate(*args, **options)


@in_long_rounds
def test_a_run_whose_model_takes_long_is_not_limited_by_data(config: Path, tmp_path: Path) -> None:
    """By the command, as users type it; on more steps than the run has. Nothing is written."""
    output = tmp_path / "out"
    said = ["profile", str(config), f"train.output_dir={output}", "--steps", "2", "--warmup-steps", "1", "--json"]
    done = run_cli(*said)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"]["limit"] == "model", found
    assert found["verdict"]["sentence"].startswith("data is not the limit: the loader alone makes ")
    assert found["loader"]["num_workers"] == 1
    assert found["more_workers"] is None
    assert "the loader alone, 1 workers a rank: 3 rounds of 4 steps, at most 60 s" in done.stderr
    assert not output.exists()
    assert not (config.parent / "default").exists()


def test_a_run_that_waits_for_data_is_limited_by_it_and_more_workers_are_tried(config: Path, tmp_path: Path) -> None:
    """In one process, in which a loader worker takes far longer for a pack than the model does for a step."""
    output = tmp_path / "out"
    trainer = trainer_of(config, f"train.output_dir={output}", "train.global_batch=1", data_collator=collate_slowly)
    lines: list[str] = []
    rates = measure(trainer, MEASURED, lines.append)
    verdict = verdict_of(rates)
    assert verdict.limit == "data", rates
    assert verdict.sentence.startswith("data is the limit: the loader alone makes 0.")
    assert rates.more_workers is not None
    assert rates.more_workers.num_workers == 2
    assert rates.both.wait_share.mean > rates.model.wait_share.mean == 0
    assert lines[-1] == "the loader alone, 2 workers a rank: 3 rounds of 2 steps, at most 30 s"
    assert not output.exists()
