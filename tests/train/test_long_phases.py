"""Long phases of a run: they hear a stop signal, show progress, and lose no finished steps.

The signal comes from inside the phase: no test waits for a time.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.plugins.tasks.dpo import DPO
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.loop import StoppedError
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.tasks.reference import FrozenWeights, StoredLogProbs
from lmms_stream.types import Batch
from transformers import TrainerCallback

from ..conftest import write_tokens
from ..rounds import rounds
from .answers import dataset_of, pairs, write_answers
from .answers import trainer_of as answers_trainer
from .runs import trainer_of, write_small_run


class Interrupted(FSDP2SFTTrainer):
    """Does something in the third pack of evaluations."""

    def __init__(self, *args: Any, **options: Any):
        self.num_packs = 0
        self.numbers: list[int] = []
        super().__init__(*args, **options)

    def interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def evaluation_step(self, pack: Batch) -> Any:
        self.num_packs += 1
        self.numbers.append(self.phases.now.number)
        if self.num_packs == 3:
            self.interrupt()
        return super().evaluation_step(pack)


def interrupted(config: Path) -> Interrupted:
    trainer = trainer_of(config, kind=Interrupted)
    assert isinstance(trainer, Interrupted)
    return trainer


class Killed(Interrupted):
    """Ends in the third pack of evaluations, like a run that is killed."""

    def interrupt(self) -> None:
        raise KeyboardInterrupt


def write_evaluated_run(folder: Path, **train: Any) -> Path:
    """A run with evaluations of more than three packs, and epochs of six steps."""
    write_tokens(folder / "data", num_samples=60)
    held_out = {"remote": str(folder / "data")}
    settings = {"max_steps": 7, "logging_steps": 1, "lr_scheduler_type": "constant", **train}
    return write_small_run(folder / "run.yaml", folder / "data", eval_dataset=held_out, **settings)


def saved_state(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoints(output / "checkpoints")[-1] / "trainer.json").read_text())
    return state


def losses(output: Path) -> list[tuple[int, float]]:
    """Of all steps and evaluations, in the order of the log."""
    return [(each["step"], each["eval_loss" if "eval_loss" in each else "loss"]) for each in read_log(output)]


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "due": ({"eval_steps": 4, "save_steps": 4}, 4),
    "time": ({"eval_steps": 4, "save_minutes": 1e-9}, 4),
    "epoch": ({"eval_steps": "epoch", "save_steps": 3}, 6),
    "best": ({"eval_steps": 4, "save_steps": "best"}, 4),
    "end": ({"eval_steps": 100}, 7),
}


@pytest.mark.parametrize("case", rounds(["epoch", "best"], [*CASES]))
def test_a_signal_in_an_evaluation_ends_it_and_a_resume_does_it_once(case: str, tmp_path: Path) -> None:
    settings, step = CASES[case]
    config = write_evaluated_run(tmp_path, **settings)
    trainer_of(config, f"train.output_dir={tmp_path / 'whole'}").train()
    trainer = interrupted(config)
    with pytest.raises(StoppedError, match=rf"step {step} is saved, the same command .* begins with its evaluation"):
        trainer.train()
    assert (trainer.step, trainer.num_packs) == (step, 3)
    assert saved_state(tmp_path / "default")["evaluation_pending"]
    trainer_of(config).train()
    assert losses(tmp_path / "default") == losses(tmp_path / "whole")


@pytest.mark.parametrize("case", rounds(["due", "time"], ["due", "time", "epoch", "end"]))
def test_a_due_checkpoint_is_whole_before_the_evaluation_of_its_step_ends(case: str, tmp_path: Path) -> None:
    settings, step = CASES[case]
    trainer = trainer_of(write_evaluated_run(tmp_path, **settings), kind=Killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    state = saved_state(tmp_path / "default")
    assert (state["step"], state["evaluation_pending"]) == (step, True)


def test_an_evaluation_that_a_stopped_step_owes_is_done_by_the_resumed_run(tmp_path: Path) -> None:
    class Told(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    config = write_evaluated_run(tmp_path, eval_steps=4)
    with pytest.raises(StoppedError, match="step 4 is saved, the same command resumes from it, and begins with its"):
        trainer_of(config, callbacks=[Told()]).train()
    resumed = interrupted(config)
    resumed.num_packs = 3  # nothing more interrupts it
    resumed.train()
    assert [step for step, _ in losses(tmp_path / "default") if step in (4, 7)] == [4, 4, 7, 7]


def test_an_evaluation_that_ended_is_not_repeated(tmp_path: Path) -> None:
    class Ended(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    config = write_evaluated_run(tmp_path, eval_steps=4, save_steps=4, best={"metric": "loss"})
    whole = trainer_of(config, f"train.output_dir={tmp_path / 'whole'}")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(config, callbacks=[Ended()]).train()
    trainer_of(config).train()
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "default") == expected
    again = trainer_of(config)  # a finished run
    again.train()
    assert losses(tmp_path / "default") == expected
    assert (again.best.metric, again.best.step) == (whole.best.metric, whole.best.step)


def test_a_resume_records_its_evaluation_where_both_folders_are_one_with_any_spelling(tmp_path: Path) -> None:
    config = write_evaluated_run(tmp_path, max_steps=1, eval_steps=1, checkpoint_dir=f"{tmp_path}/./default/")
    with pytest.raises(KeyboardInterrupt):
        trainer_of(config, kind=Killed).train()
    for _ in range(2):
        trainer_of(config).train()
    assert [step for step, _ in losses(tmp_path / "default")] == [1, 1]


def test_a_resumed_run_does_not_evaluate_at_its_start_again(tmp_path: Path) -> None:
    config = write_evaluated_run(tmp_path, max_steps=1, eval_on_start=True, eval_steps=2)
    trainer_of(config).train()
    expected = losses(tmp_path / "default")
    trainer_of(config).train()
    assert losses(tmp_path / "default") == expected


def test_each_pack_of_an_evaluation_is_progress(tmp_path: Path) -> None:
    """Only a rank without progress stands still."""
    trainer = interrupted(write_evaluated_run(tmp_path, max_steps=1, eval_steps=1))
    trainer.num_packs = 3
    trainer.train()
    assert len(trainer.numbers) > 3
    assert trainer.numbers == sorted(set(trainer.numbers))


def test_a_signal_in_the_build_ends_it_before_the_first_step(tmp_path: Path) -> None:
    class Told(FSDP2SFTTrainer):
        def create_optimizer(self) -> torch.optim.Optimizer:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().create_optimizer()

    config = write_evaluated_run(tmp_path, max_steps=1)
    trainer = trainer_of(config, kind=Told)
    with pytest.raises(StoppedError, match="told to stop by a signal before the first step of this start: nothing new"):
        trainer.train()
    assert "saver" not in vars(trainer)
    assert trainer_of(config).train().global_step == 1


def test_a_signal_in_an_export_ends_it_and_the_same_command_exports(tmp_path: Path) -> None:
    class Told(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    config, out = write_evaluated_run(tmp_path, max_steps=1, export=True), tmp_path / "default" / "export"
    with pytest.raises(StoppedError, match="step-00000001 is saved, and the same command exports it"):
        trainer_of(config, callbacks=[Told()]).train()
    assert not out.exists()
    trainer_of(config).train()
    assert (out / "model.safetensors").exists()


def test_a_signal_in_the_measuring_of_a_reference_keeps_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset_of(write_answers(tmp_path / "data", pairs(12)), most=1)
    measured = FrozenWeights.log_probs
    told: list[int] = []

    def log_probs(self: FrozenWeights, passes: Any) -> Any:
        told.append(1)
        if len(told) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return measured(self, passes)

    monkeypatch.setattr(FrozenWeights, "log_probs", log_probs)
    settings: dict[str, Any] = {"output_dir": str(tmp_path / "out"), "max_steps": 1, "train_dataset": data}
    with pytest.raises(StoppedError, match="before the first step"):
        answers_trainer(tmp_path, DPO(reference="stored"), **settings).train()
    (part,) = (tmp_path / "data" / "_lmms" / "reference").glob("*.part.npy")
    assert (~np.isnan(np.load(part)).any(axis=1)).sum() == 3
    answers_trainer(tmp_path, DPO(reference="stored"), **settings).train()
    assert len(told) == 12


def test_a_second_run_leaves_the_files_of_a_measurement_alone(tmp_path: Path) -> None:
    """It measures in its own folder: renamed files would end the first run."""
    write_answers(tmp_path / "data", pairs(12))
    folder, out = tmp_path / "data" / "_lmms" / "reference", tmp_path / "out"
    answers_trainer(tmp_path, DPO(reference="stored"), output_dir=str(out)).build()
    (path,) = folder.glob("*.json")
    described = json.loads(path.read_text())["described"]
    path.unlink()
    files = StoredLogProbs(folder=folder, described=described, shape=(12, 2))
    with files.owned(tmp_path / "elsewhere") as first:
        assert first is files
        files.begin()
        before = {each.name: each.read_bytes() for each in folder.iterdir()}
        answers_trainer(tmp_path, DPO(reference="stored"), output_dir=str(out)).build()
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert len(list((out / "reference").glob("*.json"))) == 1
