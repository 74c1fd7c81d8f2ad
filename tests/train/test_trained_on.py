"""A run in which nothing is trained on updates nothing, and ends with an error that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lmms_stream.errors import TrainingError
from lmms_stream.train.run import counts
from lmms_stream.train.run.counts import MOST_STEPS, TrainedOn
from lmms_stream.train.run.distributed import end_distributed

from ..conftest import write_samples
from .runs import trainer_of, write_run

FIRST_ALONE = np.array([[0, 1]], np.int32)  # no token before it predicts it, so nothing is trained on


def write(folder: Path, spans: np.ndarray, *, num_samples: int = 160) -> Path:
    write_samples(folder, [(np.full(60, number, np.int32), spans) for number in range(num_samples)])
    return folder


def test_a_run_in_which_nothing_is_trained_on_updates_nothing_and_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.yaml", write(tmp_path / "data", FIRST_ALONE), max_steps=3, weight_decay=0.5)
    trainer = trainer_of(path)
    try:
        before = [each.detach().clone() for each in trainer.model.parameters()]
        with pytest.raises(
            TrainingError, match="none of the 3 steps of the run had a token to train on, and no weights were"
        ):
            trainer.train()
        assert all(map(torch.equal, before, trainer.model.parameters()))
    finally:
        end_distributed()


def test_a_source_in_which_nothing_is_trained_on_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "MOST_STEPS", 4)
    path = write_run(tmp_path / "run.yaml", write(tmp_path / "good", np.array([[9, 60]], np.int32)), max_steps=9)
    settings = yaml.safe_load(path.read_text())
    good = settings.pop("dataset")
    settings["datasets"] = {"good": good, "bad": good | {"remote": str(write(tmp_path / "bad", FIRST_ALONE))}}
    path.write_text(yaml.safe_dump(settings))
    trainer = trainer_of(path)
    try:
        with pytest.raises(
            TrainingError, match="nothing of source bad is trained on in 4 steps with packs of it, up to"
        ):
            trainer.train()
    finally:
        end_distributed()


def test_steps_in_a_row_without_anything_to_train_on_are_counted() -> None:
    counts = TrainedOn(["a", "b"])
    for step in range(1, MOST_STEPS):
        assert not counts.take(0.0, [(1, 0.0), (0, 0.0)], step=step)
    assert counts.take(3.0, [(1, 3.0), (1, 0.0)], step=MOST_STEPS)
    counts.end()
    for step in range(1, MOST_STEPS):
        counts.take(0.0, [(0, 0.0), (0, 0.0)], step=step)
    with pytest.raises(TrainingError, match=f"nothing is trained on in the {MOST_STEPS} steps up to step 200: .* a, b"):
        counts.take(0.0, [(0, 0.0), (0, 0.0)], step=200)
