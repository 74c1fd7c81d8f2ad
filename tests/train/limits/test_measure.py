"""Which part of a run is its limit, measured on runs of which it is known: far apart, so that no time is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.train.limits.measure import MeasureConfig, measure
from lmms_stream.train.limits.verdict import verdict_of
from lmms_stream.train.run.distributed import end_distributed

from ...conftest import run_cli, write_samples
from ...mds.reading import upload
from ...proxy import FaultProxy, Rule
from ..runs import MODEL, trainer_of, write_run

MEASURED = MeasureConfig(steps=2, warmup_steps=1, seconds=30)


@pytest.fixture(autouse=True)
def _group_ends() -> Iterator[None]:
    yield
    end_distributed()


def write_run_of(folder: Path, dataset: str, *, hidden_size: int, **train: Any) -> Path:
    """A run on a dataset of write_tokens, with a model of this width."""
    path = write_run(folder / "run.yaml", dataset, max_steps=3, global_batch=4, save_steps=1, export=True, **train)
    settings = yaml.safe_load(path.read_text())
    settings["model"]["config"] = MODEL | {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    settings["dataset"] |= {"local": str(folder / "cache"), "packing_length": 512}
    path.write_text(yaml.safe_dump(settings))
    return path


def write_data(folder: Path) -> None:
    lengths = np.random.default_rng(0).integers(20, 60, 1200).tolist()
    samples = [
        (np.full(length, number % 500, np.int32), np.array([[length // 2, length]], np.int32))
        for number, length in enumerate(lengths)
    ]
    write_samples(folder, samples, shard_bytes=1 << 13)


def test_a_run_whose_model_takes_long_is_not_limited_by_data_and_writes_nothing(tmp_path: Path) -> None:
    """Measured on more steps than the run has, in one process, with workers of its own; twice for the same."""
    write_data(tmp_path / "data")
    run = write_run_of(tmp_path, str(tmp_path / "data"), hidden_size=512, num_workers=1)
    lines: list[str] = []
    rates = measure(trainer_of(run), MEASURED, lines.append)
    verdict = verdict_of(rates)
    assert verdict.limit == "model", rates
    assert verdict.sentence.startswith("data is not the limit: the loader alone makes ")
    assert rates.loader.num_workers == 1
    assert rates.more_workers is None
    assert lines[0] == "the loader alone, 1 workers a rank: 3 rounds of 2 steps, at most 30 s"
    assert not (tmp_path / "default").exists()


def test_a_run_that_reads_from_a_slow_store_is_limited_by_data(
    tmp_path: Path, s3_folder: str, proxy: FaultProxy
) -> None:
    """By the command, as users type it. Each shard takes a second to come, and workers are not what is missing."""
    write_data(tmp_path / "data")
    upload(tmp_path / "data", s3_folder)
    proxy.set_rules(Rule(path=r"shard\.", delay_s=1.0))
    run = write_run_of(tmp_path, s3_folder, hidden_size=16, num_workers=1)
    done = run_cli("profile", str(run), "--steps", "2", "--warmup-steps", "1", "--seconds", "20", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"]["limit"] == "data", found
    assert found["verdict"]["sentence"].startswith("data is the limit: the loader alone makes 0.")
    assert found["loader"]["cache_misses"] > 0
    assert found["more_workers"]["num_workers"] == 2
    assert not (tmp_path / "default").exists()
