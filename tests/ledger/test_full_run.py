"""The ledger of a real run against all that the run logged: each step, and more than a thousand samples."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.report.train_log import read_log

from tests.conftest import write_samples
from tests.jobs.runs import train
from tests.rounds import in_long_rounds
from tests.train.runs import MODEL, VOCABULARY, train_settings

SIZES = {"a": (700, 60), "b": (500, 600)}  # samples, and tokens of the longest: those of `b` are split over packs
LEFT_OUT = {"a": range(0, 700, 20), "b": range(7, 500, 25)}
DROPPED_FROM = 70
DROPS = {"drop": {"x": DROPPED_FROM}}
STRETCHES: list[tuple[int, int, dict[str, Any]]] = [  # ranks, the step that it ends before, settings
    (1, 30, {"weights": {"a": 2, "b": 1}}),
    (2, 60, {"weights": {0: {"a": 1, "b": 1}, 40: {"a": 1, "b": 3}}}),
    (3, 90, {"weights": {0: {"a": 1, "b": 1}, 75: {"b": 1}}, "bad_samples": DROPS}),
    (4, 144, {"weights": {"a": 1, "b": 1}, "global_batch": 16, "skip_steps": [[100, 103]]}),
]  # fmt: skip


def write_dataset(folder: Path, num_samples: int, longest: int) -> None:
    lengths = np.random.default_rng(longest).integers(20, longest, num_samples).tolist()
    write_samples(
        folder,
        [
            (np.full(length, number % VOCABULARY, np.int32), np.array([[length // 2, length]], np.int32))
            for number, length in enumerate(lengths)
        ],
    )


def write_config(folder: Path, settings: dict[str, Any], *, max_steps: int) -> Path:
    packed = {"processor": {"type": "tokens"}, "packing_length": 256, "overlong": "split"}
    datasets = {name: {"remote": str(folder / name), **packed} for name in SIZES}
    train = train_settings(folder / "x", global_batch=12) | settings | {"max_steps": max_steps, "save_steps": 30}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"datasets": datasets, "model": {"config": MODEL}, "train": train}))
    return path


@in_long_rounds
@pytest.mark.timeout(1800)
def test_a_run_on_one_to_four_ranks_resumed_elsewhere_is_told_as_it_logged_itself(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for name, (num_samples, longest) in SIZES.items():
        write_dataset(here / name, num_samples, longest)
    logged: dict[int, Counter[tuple[str, int]]] = {}
    num_skipped = 0
    for number, (nproc, stop, settings) in enumerate(STRETCHES):
        folder = here if number < 2 else there
        if number == 2:  # datasets and run are moved, and their old places are gone
            shutil.copytree(here, there)
            shutil.rmtree(here)
        if bad := settings.get("bad_samples"):
            lines = [f"{source}:{sample_id}\n" for source, ids in LEFT_OUT.items() for sample_id in ids]
            (folder / "drop.txt").write_text("".join(lines))
            drop = {str(folder / "drop.txt"): step for step in bad["drop"].values()}
            settings = settings | {"bad_samples": {"drop": drop}}
        num_skipped += sum(end - first for first, end in settings.get("skip_steps", []))
        train(write_config(folder, settings, max_steps=stop - num_skipped), folder / "run", nproc=nproc)
    records = {record["step"]: record["sample_ids"] for record in read_log(there / "run")}
    trained = [number for number in range(STRETCHES[-1][1]) if number not in (100, 101, 102)]
    for number, step in zip(trained, sorted(records), strict=True):
        ids = (text.split(":") for text in records[step])
        logged[number] = Counter((source, int(sample_id)) for source, sample_id in ids)

    ledger = Ledger(there / "run", urls={name: str(there / name) for name in SIZES})
    assert [each.world.world_size for each in ledger.plans.stretches] == [1, 2, 3, 4]
    assert ledger.stop == STRETCHES[-1][1]
    steps_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number in range(ledger.stop):
        entry = ledger.step(number)
        found = Counter((pack.source, each) for pack in entry.packs for each in pack.sample_ids.tolist())
        assert entry.is_skipped == (number not in logged)
        if not entry.is_skipped:
            assert found == logged[number]
            for sample in found.elements():
                steps_of[sample].append(number)

    num_samples = num_padding = num_in_pieces = most_epochs = 0
    for source, (count, _) in SIZES.items():
        for sample_id in range(count):
            sample, entries = (source, sample_id), ledger.sample(source, sample_id, stop=ledger.stop)
            read = {entry.step for entry in entries if ledger.when(entry, sample) == "trained"}
            padding = {entry.step for entry in entries if ledger.when(entry, sample) == "dropped"}
            steps = [entry.step for entry in entries if entry.step is not None and not entry.is_skipped]
            assert sorted(steps) == steps_of[sample]
            is_listed = sample_id in LEFT_OUT[source]
            assert padding == {step for step in steps if is_listed and step >= DROPPED_FROM}
            assert read == set(steps) - padding
            num_samples += 1
            num_padding += bool(padding)
            num_in_pieces += any(entry.piece for entry in entries)
            most_epochs = max(most_epochs, len({entry.epoch for entry in entries if entry.step is not None}))
    assert num_samples == 1200
    assert num_padding > 30
    assert num_in_pieces > 100
    assert most_epochs >= 3
    amounts = ledger.amounts()
    for source, found_amounts in amounts.items():
        assert found_amounts.num_dropped == len(LEFT_OUT[source])
    assert sum(each.num_tokens for each in amounts.values()) == read_log(there / "run")[-1]["tokens_seen"]
