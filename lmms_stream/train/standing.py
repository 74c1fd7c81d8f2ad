"""Where a trainer stands: what its checkpoints hold besides tensors, and what its callbacks are told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..loader.stretches import begin_stretch, stretch_of
from .filled import resume_choice
from .protocol import Trainer
from .run.settings import TrainConfig

logger = logging.getLogger("lmms_stream")


def state_of(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, as JSON values; all ranks call it."""
    state = {"cursor": trainer.data.cursor(), **trainer.counts.state_dict()}
    if trainer.best.name is not None:
        state["best"] = trainer.best.state_dict()
    if trainer.parts.reference is not None:
        state["reference"] = trainer.parts.reference.digest
    callbacks = trainer.callbacks.state_dict()
    return state if callbacks is None else {**state, "callbacks": callbacks}


def resume(trainer: Trainer, asked: bool | str | Path | None) -> None:
    """Go on from a checkpoint, as trainer.train is asked to; all ranks call it."""
    choice = resume_choice(asked) or trainer.config.resume
    state = trainer.saver.resume(lambda state: _begin_from(trainer, state), choice=choice)
    if state is None and asked is True:
        raise CheckpointError(f"{trainer.saver.url} has no checkpoint to resume from: call train() to begin a run")
    if state is None and trainer.parts.empty is not None:
        raise CheckpointError(f"the checkpoints at {trainer.saver.url} were removed as this run began: start it again")
    if state is not None:
        trainer.counts.load(state)
        if trainer.best.name is not None and "best" in state:
            trainer.best.load(state["best"])
        if "callbacks" in state:
            trainer.callbacks.load(state["callbacks"])
        if choice != "auto":
            _tell_later_steps(trainer)
    trainer.data.left_out.begin(trainer.counts)
    trainer.run_log.begin(trainer.step, url=trainer.saver.url)
    begin_stretch(trainer.counts.history, stretch_of(trainer.loader, skipped=trainer.config.skip_steps))
    trainer.phases.step = trainer.step
    trainer.set_length()  # the global batch or skipped steps may have changed
    if trainer.is_finished and trainer.world.rank == 0:
        logger.warning(
            "nothing to do: the %s step %d, where the run has ended (its length is %d %s): raise train.%s to "
            "train longer",
            "trainer is at" if state is None else "checkpoint is of",
            trainer.step, trainer.schedule.length, *_unit_of_length(trainer.config),
        )  # fmt: skip
    trainer.callbacks.given |= {
        "model": trainer.model.model,
        "optimizer": trainer.optimizer,
        "lr_scheduler": trainer.schedule.scheduler,
        "train_dataloader": trainer.loader,
    }


def _tell_later_steps(trainer: Trainer) -> None:
    """Warn if checkpoints of later steps lie where a run that resumes from a named one saves its own."""
    later = [step for step in trainer.saver.steps() if step > trainer.step]
    if later and trainer.world.rank == 0:
        logger.warning(
            "%s has checkpoints of later steps (%s), and train.resume auto takes the latest: move them elsewhere",
            trainer.saver.url,
            ", ".join(map(str, later)),
        )


def _unit_of_length(config: TrainConfig) -> tuple[str, str]:
    """The unit of a run's length, and the setting that it follows from."""
    if config.max_tokens is not None:
        return "tokens", "max_tokens"
    return "steps", "max_steps" if config.num_train_epochs is None else "num_train_epochs"


def _begin_from(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Have the loader go on from a checkpoint's cursor; CheckpointError where that had another reference."""
    reference = trainer.parts.reference
    if reference is not None and state.get("reference", reference.digest) != reference.digest:
        raise CheckpointError(
            f"the checkpoint compares with starting weights of digest {state['reference']}, and this run begins with "
            f"{reference.digest}: name the model that the run began with, or start over in another output_dir"
        )
    trainer.loader.load_state_dict(state["cursor"])


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """The fields of transformers' TrainerState, as they are now; before the schedule is built, without its length."""
    config = trainer.config
    return {
        "global_step": trainer.counts.step,
        "epoch": trainer.data.epoch,
        "max_steps": trainer.max_steps,
        "num_train_epochs": config.num_train_epochs or 0,
        "num_input_tokens_seen": trainer.counts.tokens_seen,
        "train_batch_size": config.per_device_batch,
        "logging_steps": config.logging_steps,
        "eval_steps": config.eval_steps,
        "save_steps": config.save_steps,
        "best_metric": trainer.best.metric,
        "best_global_step": trainer.best.step,
        "best_model_checkpoint": trainer.best.checkpoint,
        "is_local_process_zero": trainer.is_local_process_zero(),
        "is_world_process_zero": trainer.is_world_process_zero(),
    }
