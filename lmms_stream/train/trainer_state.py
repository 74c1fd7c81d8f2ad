"""The state of a trainer in checkpoints, next to the tensors, and for callbacks; and the model of a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..errors import CheckpointError
from ..loader.loader import begin_stretch, stretch_of
from .checkpoint.resume import Resumable, configs_of, find_checkpoint
from .checkpoint.saving import STAGING_NAME
from .checkpoint.store import checkpoints_url, refuse_theirs
from .model.build import ModelConfig
from .model.pretrained import unread_weights
from .parts import Finish, TrainerParts
from .run.distributed import cpu_group, from_rank_0

logger = logging.getLogger("lmms_stream")


def state_of(trainer: TrainerParts) -> dict[str, Any]:
    """Return the state of a checkpoint next to the tensors, in JSON values; all ranks call this."""
    state = {"cursor": trainer.data.cursor(), **trainer.counts.state_dict()}
    if trainer.best.name is not None:
        state["best"] = trainer.best.state_dict()
    if trainer.reference is not None:
        state["reference"] = trainer.reference.digest
    callbacks = trainer.callbacks.state_dict()
    return state if callbacks is None else {**state, "callbacks": callbacks}


def checkpoint_to_resume(trainer: TrainerParts, resume_from_checkpoint: bool | str | Path | None) -> Resumable | None:
    """Choose the checkpoint for train(resume_from_checkpoint); all ranks call this."""
    config = trainer.config
    url = checkpoints_url(config.output_dir, config.checkpoint_dir)
    choice = resume_choice(resume_from_checkpoint) or config.resume
    found = find_checkpoint(url, choice=choice, staging=Path(config.output_dir, STAGING_NAME), group=cpu_group())
    if found is None and resume_from_checkpoint is True:
        refuse_theirs(sorted(Path(config.output_dir).glob("checkpoint-*")))
        raise CheckpointError(f"{url} has no checkpoint to resume from: call train() to begin a run")
    return found


def resume(trainer: TrainerParts, found: Resumable | None, *, choice: str) -> None:
    """Load the chosen checkpoint, if any, and begin the run at the checkpoint's step; all ranks call this."""
    if found is None and trainer.empty_model is not None:
        raise CheckpointError(
            f"the checkpoints at {trainer.saver.url} were removed at the start of this run: start it again"
        )
    state = None if found is None else trainer.saver.resume(found, lambda state: _begin_from(trainer, state))
    if state is not None:
        trainer.counts.load(state)
        if trainer.best.name is not None and "best" in state:
            trainer.best.load(state["best"])
        if "callbacks" in state:
            trainer.callbacks.load(state["callbacks"])
        later = [step for step in trainer.saver.steps() if step > trainer.step] if choice != "auto" else []
        if later and trainer.world.rank == 0:
            logger.warning(
                "%s has checkpoints of later steps (%s), and train.resume auto takes the latest: move them elsewhere",
                trainer.saver.url, ", ".join(map(str, later)),
            )  # fmt: skip
        history = trainer.counts.history if trainer.world.rank == 0 else []
        for name, read in history[-1]["sources"].items() if history else ():  # states hold no samples
            now = trainer.loader.identities.get(name)
            if now is not None and read.get("identity", now) != now and "streams" not in read:  # else the loader warns
                logger.warning(
                    "dataset %s has other samples of the same lengths than the run has read so far (identity %s, now "
                    "%s): restore it, or start over in another output_dir", name, read["identity"], now,
                )  # fmt: skip
    trainer.data.left_out.begin(trainer.counts)
    trainer.run_log.begin(trainer.step, url=trainer.saver.url)
    begin_stretch(trainer.counts.history, stretch_of(trainer.loader, skipped=trainer.config.skip_steps))
    trainer.phases.step = trainer.step
    trainer.set_length()  # the global batch or skipped steps may have changed
    config = trainer.config
    unit, setting = "steps", "max_steps" if config.num_train_epochs is None else "num_train_epochs"
    if config.max_tokens is not None:
        unit, setting = "tokens", "max_tokens"
    if trainer.is_finished and trainer.world.rank == 0:
        logger.warning(
            "nothing to do: the %s step %d, where the run has ended (its length is %d %s): raise train.%s to "
            "train longer",
            "trainer is at" if state is None else "checkpoint is of",
            trainer.step, trainer.schedule.length, unit, setting,
        )  # fmt: skip
    trainer.callbacks.given |= {
        "model": trainer.model.model,
        "optimizer": trainer.optimizer,
        "lr_scheduler": trainer.schedule.scheduler,
        "train_dataloader": trainer.loader,
    }


def _begin_from(trainer: TrainerParts, state: Mapping[str, Any]) -> None:
    """Let the loader resume from a checkpoint's cursor; CheckpointError if the checkpoint had another reference."""
    reference = trainer.reference
    if reference is not None and state.get("reference", reference.digest) != reference.digest:
        raise CheckpointError(
            f"the checkpoint compares with starting weights of digest {state['reference']}, and this run begins with "
            f"{reference.digest}: name the model that the run began with, or start over in another output_dir"
        )
    trainer.loader.load_state_dict(state["cursor"])


def trainer_state(trainer: TrainerParts) -> dict[str, Any]:
    """Return the current fields of transformers' TrainerState; max_steps is 0 before the schedule is built."""
    config = trainer.config
    return {
        "global_step": trainer.counts.step,
        "epoch": trainer.data.epoch,
        "max_steps": trainer.max_steps,
        "num_train_epochs": config.num_train_epochs or 0,
        "num_input_tokens_seen": trainer.counts.tokens_seen,
        "train_batch_size": config.per_device_batch,
        "logging_steps": config.logging_steps if isinstance(config.logging_steps, int) else 1,
        "eval_steps": config.eval_steps if isinstance(config.eval_steps, int) else 0,
        "save_steps": config.save_steps if isinstance(config.save_steps, int) else 0,
        "best_metric": trainer.best.metric,
        "best_global_step": trainer.best.step,
        "best_model_checkpoint": trainer.best.checkpoint,
        "is_local_process_zero": trainer.is_local_process_zero(),
        "is_world_process_zero": trainer.is_world_process_zero(),
    }


# A model built without weights: filled by a checkpoint, or by each rank from the weight files.


def resume_choice(asked: bool | str | Path | None) -> str | None:
    """Return the argument of train(resume_from_checkpoint) in the form of train.resume; None: use the setting."""
    return None if asked is None else "auto" if asked is True else "never" if not asked else str(asked)


def model_to_fill(
    trainer: TrainerParts, given: object, found: Resumable | None, *, finish: Finish
) -> torch.nn.Module | None:
    """Build a model without weights, to be filled by a checkpoint; return None, on all ranks, to build with weights.

    Weights are needed if the run begins; if the user, a task or diffusers makes the model; if the model has an adapter,
    because checkpoints hold only the adapter; and if a task compares with the starting weights. given: the `model`
    argument of the trainer. finish: see the function finish. All ranks call this.
    """
    is_compared = getattr(trainer.task, "reference", None) is not None
    if found is None or is_compared or _is_others(trainer) or not isinstance(given, ModelConfig):
        return None
    configs = configs_of(found, cpu_group())
    if not configs:
        return None
    with TemporaryDirectory() as folder:
        for name, data in configs.items():
            Path(folder, name).write_bytes(data)
        made = given.build_empty(Path(folder))
    if made is None:
        return None
    return finish(made) if from_rank_0(not _computed(made)) else None


def model_to_share(trainer: TrainerParts, given: object, *, finish: Finish) -> torch.nn.Module:
    """Build the model for the beginning of a run.

    Weights stay in their files if each rank can read its part from the files. A model of the user, a task or diffusers
    is built with weights. given: see model_to_fill; None if create_model is overridden.
    """
    if _is_others(trainer) or not isinstance(given, ModelConfig):
        return trainer.create_model()
    made = given.build_unread()
    if unread_weights(made) is not None and _computed(made):
        made = given.build()
    return finish(made)


def finish(model: torch.nn.Module, *, token_ids: Mapping[str, int | None], has_dropout: bool) -> torch.nn.Module:
    """Write the ids into the model's config; without has_dropout, disable nn.Dropout. Return the model."""
    for name, token_id in token_ids.items():
        setattr(model.config, name, token_id)
    for module in () if has_dropout else model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _is_others(trainer: TrainerParts) -> bool:
    """Whether a user's function or a task makes or wraps the model."""
    is_set = trainer.functions.model_init is not None or "create_model" in vars(trainer)
    return is_set or getattr(trainer.task, "wrap", None) is not None


def _computed(model: torch.nn.Module) -> list[str]:
    """Return the names of tensors computed from missing weights: a checkpoint does not fill them."""
    return [
        name
        for module in model.modules()
        for name, value in {**module._buffers, **vars(module)}.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
