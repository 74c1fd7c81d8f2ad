"""The plan and the ledger of a run's file whose packs hold samples of several datasets: each dataset by its name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.cli.main import main
from lmms_stream.errors import ConfigError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.tools.ledger.opening import open_run
from lmms_stream.tools.ledger.run import Ledger

from ..conftest import write_tokens

SIZES = {"small": 20, "middle": 90, "large": 240}
TRAIN = {"global_batch": 4, "max_steps": 40, "mixing": "samples", "weights": {"small": 1, "middle": 1, "large": 1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("streams"))


def write_run(folder: Path, **train: Any) -> Path:
    datasets = {}
    for name, num_samples in SIZES.items():
        if not (folder / name).exists():
            write_tokens(folder / name, num_samples=num_samples)
        datasets[name] = {"remote": str(folder / name), "processor": {"type": "tokens"}, "packing_length": 256}
    settings = TRAIN | {"output_dir": str(folder / "run")} | train
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"datasets": datasets, "model": {"config": {}}, "train": settings}, sort_keys=False))
    return path


def test_the_ledger_of_a_runs_file_counts_and_names_samples_by_dataset(run: Path) -> None:
    ledger, read, tokens = Ledger(run), Counter[str](), Counter[str]()
    for number in range(18):
        for pack in ledger.step(number).packs:
            for sample_id, length in zip(pack.sample_ids.tolist(), pack.lengths.tolist(), strict=True):
                name, within = ledger.named("data", sample_id)
                assert ledger.located(name, within) == ("data", sample_id)
                read[f"{name}:{within}"] += 1
                tokens[name] += length
    amounts = ledger.amounts(18)
    assert [*amounts] == [*ledger.urls] == [*SIZES]
    for name, found in amounts.items():
        counts = [count for text, count in read.items() if text.startswith(f"{name}:")]
        assert (found.num_samples, found.num_tokens, found.num_seen) == (sum(counts), tokens[name], len(counts))
        assert found.num_seen + found.num_unseen == SIZES[name]
    entries = ledger.sample(*ledger.located("small", 3), stop=18)
    assert sum(entry.step is not None for entry in entries) == read["small:3"] > 3


def test_the_commands_show_each_dataset(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    streams = planned["streams"]
    assert [each["stream"] for each in streams] == [*SIZES]
    assert sum(each["num_samples"] for each in streams) == sum(SIZES.values())
    assert [each["token_share"] for each in streams] == pytest.approx([1 / 3] * 3, abs=0.01)
    assert main(["ledger", str(run), "--sample", "middle:5"]) == 0
    assert "sample 25 of data, middle:5" in capsys.readouterr().out
    assert main(["simulate", str(run), "--nodes", "1", "--gpus", "1", "--json"]) == 0
    simulation = json.loads(capsys.readouterr().out)["simulation"]
    assert (simulation["num_samples"], simulation["num_steps"]) == (sum(SIZES.values()), planned["steps"]["num_steps"])


def test_a_runs_file_and_a_loader_have_the_same_packs(run: Path) -> None:
    planned = open_run(run)
    loader = PackedLoader(planned.built, mixing="samples", weights=TRAIN["weights"], global_batch=4)  # type: ignore[arg-type]
    assert loader.mixture.plans["data"].fingerprint == planned.mixture.plans["data"].fingerprint


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"weights": {0: {"small": 1}, 9: {"large": 1}}}, "weights is a schedule: name a single weight"),
        ({"max_epochs": {"small": 2}}, "max_epochs ends single datasets: leave it out"),
    ],
)
def test_what_does_not_go_with_samples_is_refused_in_the_file(tmp_path: Path, train: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_run(write_run(tmp_path, **train))


def test_a_single_dataset_has_nothing_to_mix(run: Path) -> None:
    data = yaml.safe_load(run.read_text())
    data["dataset"] = data.pop("datasets")["small"]
    path = run.with_name("one.yaml")
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match="which mixes several datasets: name them in datasets"):
        open_run(path)
