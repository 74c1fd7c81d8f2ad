"""A run by real torchrun whose settings change at each resume, after kills: its ledger against its own log."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words, write_tokens
from tests.rounds import in_long_rounds
from tests.train.runs import MODEL, train_settings

from .runs import last_step
from .torchrun import family, kill, start, train_command

JOB_S = 300.0
SIZES = {"a": 90, "b": 60, "c": 40}
STRETCHES: list[tuple[int, str, dict[str, Any]]] = [  # ranks, sources, settings
    (2, "ab", {"weights": {"a": 2, "b": 1}, "global_batch": 4}),
    (1, "ab", {"weights": {"a": 1, "b": 1}, "global_batch": 4}),
    (4, "abc", {"weights": {0: {"a": 1, "b": 1, "c": 2}, 8: {"b": 1, "c": 1}}, "global_batch": 4}),
    (2, "bc", {"weights": {"b": 1, "c": 3}, "max_epochs": {"c": 2}, "global_batch": 4}),
    (1, "abc", {"weights": {"a": 3, "b": 1, "c": 1}, "max_epochs": {"c": 9}, "global_batch": 2}),
    (4, "a", {"global_batch": 8}),  # no weights: once an epoch
]


def write_config(path: Path, sources: str, settings: dict[str, Any], *, max_steps: int) -> Path:
    dataset = {"processor": {"type": "tokens"}, "packing_length": {0: 256, 6: 150, 17: 400}}
    datasets = {name: {"remote": str(path.parent / name), **dataset} for name in sources}
    train = train_settings(path, global_batch=4) | settings | {"max_steps": max_steps, "save_steps": 1}
    path.write_text(yaml.safe_dump({"datasets": datasets, "model": {"config": MODEL}, "train": train}))
    return path


def train_and_kill(config: Path, output: Path, *, nproc: int) -> None:
    """SIGKILL to torchrun and all its ranks, once some steps were done and a checkpoint of one of them is there."""
    known = last_step(output)
    with start(train_command(config, output, nproc=nproc)) as process:
        deadline = time.monotonic() + JOB_S
        while last_step(output) < known + 4 or int(checkpoints(output / "checkpoints")[-1].name[5:]) <= known:
            if process.poll() is not None:
                said, _ = process.communicate()
                raise AssertionError(last_words(said))
            assert time.monotonic() < deadline, f"not within {JOB_S:.0f} s"
            time.sleep(0.01)
        kill(family(process))


def named(sample_ids: list[Any]) -> list[str]:
    """Samples as SOURCE:ID; the log of the last stretch, which has one source, gives their numbers alone."""
    return [text if isinstance(text, str) else f"{STRETCHES[-1][1]}:{text}" for text in sample_ids]


@in_long_rounds
def test_totals_over_five_changes_kills_and_three_world_sizes_are_those_of_the_log(tmp_path: Path) -> None:
    for name, num_samples in SIZES.items():
        write_tokens(tmp_path / name, num_samples=num_samples)
    output = tmp_path / "run"
    for nproc, sources, settings in STRETCHES[:-1]:
        config = write_config(tmp_path / "run.yaml", sources, settings, max_steps=1000)
        train_and_kill(config, output, nproc=nproc)
    nproc, sources, settings = STRETCHES[-1]
    last = last_step(output) + 5
    config = write_config(tmp_path / "run.yaml", sources, settings, max_steps=last)
    with start(train_command(config, output, nproc=nproc)) as process:
        said, _ = process.communicate(timeout=JOB_S)
    assert process.returncode == 0, last_words(said)

    logged = {record["step"]: named(record["sample_ids"]) for record in read_log(output)}  # the later of two records
    assert sorted(logged) == list(range(1, last + 1))
    ledger = Ledger(output)
    assert [each.world.world_size for each in ledger.plans.stretches] == [nproc for nproc, _, _ in STRETCHES]
    for stop in (*(each.cursor.step for each in ledger.plans.stretches[1:]), last):
        amounts = ledger.amounts(stop)
        read = Counter(text for step in range(1, stop + 1) for text in logged[step])
        for name, found in amounts.items():
            lengths = np.load(next((tmp_path / name / "_lmms/lengths").glob("*.npy")))
            of_source = {int(text.split(":")[1]): count for text, count in read.items() if text.startswith(f"{name}:")}
            assert found.num_samples == sum(of_source.values())
            assert found.num_tokens == sum(int(lengths[each]) * count for each, count in of_source.items())
            assert found.num_seen == len(of_source)
            assert found.num_unseen == SIZES[name] - len(of_source)
    assert set(amounts) == set(SIZES)
    assert last == ledger.stop
    tokens = [record["tokens_seen"] for record in read_log(output)]
    assert tokens[-1] == sum(each.num_tokens for each in amounts.values())
