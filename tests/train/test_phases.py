"""The phases of a run's steps, as its traces name them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from ..conftest import write_tokens
from .runs import trainer_of, write_run


def test_a_trace_names_the_phases_of_each_step(tmp_path: Path) -> None:
    """Of three steps, each of two forward passes; a checkpoint is saved after the second."""
    write_tokens(tmp_path / "data", num_samples=200)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4, save_steps=3, profile_steps=[1, 4])
    trainer = trainer_of(run, "train.global_batch=2", "train.async_save=false")
    trainer.train()
    (path,) = (tmp_path / "default" / "profile").iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    told = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    named = {"data": 6, "counts": 3, "forward": 6, "backward": 6, "grad_norm": 3, "optimizer": 3, "save": 1}
    assert {name: told[name] for name in named} == named
    assert trainer.phases.now.name == "between"
    assert trainer.phases.step == 4
