"""What a run that resumes says, and what it does where its settings are others than the checkpoint's."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lmms_stream.config import load_config
from lmms_stream.errors import CheckpointError, ConfigError
from lmms_stream.tools.ledger.opening import open_history
from lmms_stream.tools.watch.source import open_run
from lmms_stream.train.checkpoint.export import export_checkpoint
from lmms_stream.train.checkpoint.saving import LOCK_NAME, STAGING_NAME, RunOwner
from lmms_stream.train.launch import RUN_LENGTHS, prepare
from lmms_stream.train.run_config import RunConfig

from ..conftest import write_samples, write_tokens
from ..rounds import rounds
from .runs import trainer_of, write_small_run
from .test_checkpoint import ours


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "data", num_samples=60)
    return write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=2, lr_scheduler_type="constant")


@pytest.mark.parametrize("resume", [False, True, None])
def test_a_build_ahead_of_train_changes_nothing_of_another_run_in_the_output_dir(
    run: Path, resume: bool | None
) -> None:
    """Only train owns the folder: scripts may build, or look at a model, next to a live run."""
    trainer_of(run, "train.checkpoint_dir=" + str(run.parent / "kept"), "train.export=true").train()
    output = run.parent / "default"
    (output / STAGING_NAME / "rank-0").mkdir(parents=True)
    (output / STAGING_NAME / "rank-0" / "on-its-way").write_bytes(b"of a live run")

    def files() -> dict[Path, tuple[int, bytes]]:
        found = (path for folder in (output, run.parent / "kept") for path in folder.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    before = files()
    with RunOwner(trainer_of(run).config):  # the live run
        trainer = trainer_of(run, "train.checkpoint_dir=" + str(run.parent / "kept"))
        if resume is not False:
            trainer.build(resume)
        else:
            trainer.create_optimizer_and_scheduler(2)
    assert {path: each for path, each in files().items() if path.name != LOCK_NAME} == {
        path: each for path, each in before.items() if path.name != LOCK_NAME
    }


def test_commands_that_get_the_output_dir_find_the_checkpoints_of_a_checkpoint_dir_elsewhere(run: Path) -> None:
    last, output = run.parent / "kept" / "step-00000002", run.parent / "default"
    trainer_of(run, f"train.checkpoint_dir={last.parent}").train()
    assert (open_history(str(output)).where, open_run(output).saved) == (str(last), [last])
    with pytest.raises(CheckpointError, match=f"default is not a checkpoint: name one of {last}"):
        export_checkpoint(output, run.parent / "exported")
    trainer_of(run, "train.max_steps=1").train()  # of another run in the folder, with its checkpoints there
    assert open_history(str(output)).stop == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("optim_args.amsgrad=true", "optim=adamw", r"AdamW, .* AdamW \(its state was .*max_exp_avg_sq, step, now "),
        *rounds(
            [],
            [
                ("optim=adamw", "optim=muon", r"the state of AdamW, .*optimizer is Muon \(its state was exp_avg, "
                 r"exp_avg_sq, step, now momentum_buffer, for example of model\.layers\."),
                ("optim=adamw", "optim=sgd",
                 r"AdamW, .* is SGD \(its state was exp_avg, exp_avg_sq, step, now no state\)"),
                ("optim=sgd", "optim=adamw",
                 r"SGD, .* is AdamW \(its state was no state, now exp_avg, exp_avg_sq, step\)"),
            ],
        ),
    ],
)  # fmt: skip
def test_another_optimizer_is_an_error_with_a_remedy_that_begins_it_without_state(
    run: Path, before: str, after: str, message: str
) -> None:
    trainer_of(run, f"train.{before}").train()
    longer = (f"train.{after}", "train.max_steps=4")
    with pytest.raises(CheckpointError, match=message) as refused:
        trainer_of(run, *longer).train()
    assert "restore train.optim and train.optim_args, or set train.on_other_optimizer to reset" in str(refused.value)
    trainer = trainer_of(run, *longer, "train.on_other_optimizer=reset")
    trainer.train()
    assert trainer.step == 4
    assert {float(state["step"]) for state in trainer.optimizer.state.values() if "step" in state} <= {2.0}
    again = trainer_of(run, f"train.{after}", "train.max_steps=5", "train.on_other_optimizer=reset")
    again.train()  # its own state is taken from its own checkpoint
    assert {float(state["step"]) for state in again.optimizer.state.values() if "step" in state} <= {3.0}


def test_an_optimizer_of_another_name_with_the_same_state_resumes(run: Path) -> None:
    trainer_of(run, "train.optim=adamw").train()
    trainer = trainer_of(run, "train.optim=adamw_torch", "train.max_steps=3")
    trainer.train()
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {3.0}


def test_a_momentum_that_is_new_begins_at_zero_and_one_that_is_gone_is_an_error(run: Path) -> None:
    trainer_of(run, "train.optim=sgd").train()
    trainer_of(run, "train.optim=sgd", "train.optim_args.momentum=0.9", "train.max_steps=3").train()
    with pytest.raises(CheckpointError, match="its state was momentum_buffer, now no state"):
        trainer_of(run, "train.optim=sgd", "train.max_steps=4").train()


def test_a_resume_names_its_step_and_a_run_that_has_ended_says_what_makes_it_longer(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmms_stream")
    trainer_of(run, "train.max_steps=3").train()
    assert "resumed" not in caplog.text
    for overrides, step, said in (
        (["train.max_steps=5"], 5, None),
        (["train.max_steps=2"], 5, "its length is 2 steps): raise train.max_steps to train longer"),
        (["train.max_steps=5"], 5, "its length is 5 steps): raise train.max_steps"),
        (["train.max_steps=null", "train.max_tokens=10"], 5, "its length is 10 tokens): raise train.max_tokens"),
    ):
        caplog.clear()
        trainer = trainer_of(run, *overrides)
        trainer.train()
        assert trainer.step == step
        assert f"resumed from step {3 if said is None else 5} (" in caplog.text
        told = [line for line in ours(caplog) if line.startswith("nothing to do")]
        if said is None:
            assert told == []
        else:
            (line,) = told
            assert line.startswith("nothing to do: the checkpoint is of step 5, where the run has ended")
            assert said in line
    caplog.clear()
    trainer = trainer_of(run, f"train.output_dir={tmp_path}", "train.max_steps=1", "train.save_steps=no")
    trainer.train()
    assert "nothing to do" not in caplog.text
    assert trainer.train().training_loss == 0
    assert "nothing to do: the trainer is at step 1, where the run has ended" in caplog.text


def test_a_resume_names_a_dataset_of_other_samples_with_the_same_lengths(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_of(run).train()
    lengths = np.load(next((run.parent / "data" / "_lmms" / "lengths").glob("*.npy")))
    shutil.rmtree(run.parent / "data")
    trained_on = [np.array([[length // 2, length]], np.int32) for length in lengths]
    others = [np.full(length, 7, np.int32) for length in lengths]
    write_samples(run.parent / "data", zip(others, trained_on, strict=True))
    for steps, num_told in ((3, 1), (4, 0)):
        caplog.clear()
        trainer_of(run, f"train.max_steps={steps}").train()
        told = [line for line in ours(caplog) if line.startswith("dataset data has other samples of the same lengths")]
        assert len(told) == num_told


def test_settings_that_changed_are_told_once_the_checkpoint_is_found_whole(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_of(run, "train.save_steps=1").train()
    folder = run.parent / "default" / "checkpoints"
    (damaged,) = [*(folder / "step-00000002").glob("__*.distcp")][:1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    caplog.clear()
    trainer_of(run, "train.learning_rate=0.5").train()
    told = ours(caplog)
    assert [line.split(":")[0] for line in told if "passed over" in line or "other settings" in line] == [
        next(line for line in told if "passed over" in line).split(":")[0],
        f"resumed from {folder}/step-00000001 with other settings",
    ]


def test_a_checkpoint_dir_that_is_a_file_is_the_error_that_names_it(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot use .*/file for checkpoints \(.*\): name a folder that all"):
        trainer_of(run, f"train.checkpoint_dir={tmp_path / 'file'}").train()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_length_on_the_command_line_replaces_that_of_the_file(run: Path, tmp_path: Path) -> None:
    epochs = write_small_run(tmp_path / "epochs.yaml", tmp_path / "data", num_train_epochs=3)

    def lengths(*overrides: str) -> list[float | None]:
        train = load_config(RunConfig, epochs, overrides, one_of=RUN_LENGTHS).train
        return [train.max_steps, train.num_train_epochs, train.max_tokens]

    assert lengths() == [None, 3, None]
    assert lengths("train.max_steps=5") == [5, None, None]
    assert lengths("train.max_tokens=100") == [None, None, 100]
    assert lengths("train.max_steps=null") == [None, 3, None]
    with pytest.raises(ConfigError, match="got max_steps and max_tokens"):
        lengths("train.max_steps=5", "train.max_tokens=100")
    trainer = prepare(epochs, ["train.max_steps=1"]).trainer()
    trainer.train()
    assert trainer.step == 1


def test_a_max_grad_norm_of_0_clips_nothing(run: Path, tmp_path: Path) -> None:
    weights = {}
    for norm in ("0", "1e9", "1e-6"):
        trainer = trainer_of(
            run, f"train.max_grad_norm={norm}", f"train.output_dir={tmp_path / norm}", "train.optim=sgd"
        )
        trainer.train()
        weights[norm] = [each.full_tensor() for each in trainer.model.parameters()]  # type: ignore[attr-defined]
    assert all(map(torch.equal, weights["0"], weights["1e9"]))
    assert not all(map(torch.equal, weights["0"], weights["1e-6"]))
