"""A model that is built without weights: a checkpoint fills it, or each rank's part is read where the weights lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .checkpoint.beginning import configs_to_resume
from .checkpoint.paths import checkpoints_url
from .checkpoint.saving import STAGING_NAME
from .model.build import ModelConfig
from .model.pretrained import unread_weights
from .run.distributed import cpu_group

if TYPE_CHECKING:
    from .protocol import Trainer


Finish = Callable[[torch.nn.Module], torch.nn.Module]  # what makes of a model that is built the one that is trained


def resume_choice(asked: bool | str | Path | None) -> str | None:
    """What train(resume_from_checkpoint) asks for, in the words of train.resume; None: as that says."""
    return None if asked is None else "auto" if asked is True else "never" if not asked else str(asked)


def model_to_fill(
    trainer: Trainer, given: object, asked: bool | str | Path | None, *, finish: Finish
) -> torch.nn.Module | None:
    """The model that train(asked) goes on with, without weights; None, on all ranks, where it is built with them.

    That is where the run begins, and where a model is made by others: by the user, by a task, by diffusers, or with an
    adapter, whose checkpoints hold nothing else; and where the starting weights are needed, as a task's reference.
    given: what the trainer was given as its model. finish: see there. All ranks call it.
    """
    config = trainer.config
    is_compared = getattr(trainer.task, "reference", None) is not None
    if asked is False or is_compared or _is_others(trainer) or not isinstance(given, ModelConfig):
        return None
    choice = resume_choice(asked) or config.resume
    staging = Path(config.output_dir) / STAGING_NAME / "configs"
    url = checkpoints_url(config.output_dir, config.checkpoint_dir)
    configs = configs_to_resume(url, choice=choice, staging=staging)
    if not configs:
        return None
    with TemporaryDirectory() as folder:
        for name, data in configs.items():
            Path(folder, name).write_bytes(data)
        made = given.build_empty(Path(folder))
    if made is None:
        return None
    told: list[Any] = [not _computed(made)]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    return finish(made) if told[0] else None


def model_to_share(trainer: Trainer, given: object, *, finish: Finish) -> torch.nn.Module:
    """The model that a run begins with; its weights stay in their files where ranks can get them from there.

    What others make has its weights, see model_to_fill. given: as there; None where create_model is overridden.
    """
    if _is_others(trainer) or not isinstance(given, ModelConfig):
        return trainer.create_model()
    made = given.build_unread()
    if unread_weights(made) is not None and _computed(made):
        made = given.build()
    return finish(made)


def finish(model: torch.nn.Module, *, token_ids: Mapping[str, int | None], has_dropout: bool) -> torch.nn.Module:
    """The model itself, whose config has these ids; without has_dropout, its modules of dropout do nothing."""
    for name, token_id in token_ids.items():
        setattr(model.config, name, token_id)
    for module in () if has_dropout else model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _is_others(trainer: Trainer) -> bool:
    """Whether a model is made, or run, by a function of the user's or a task."""
    is_set = trainer.functions.model_init is not None or "create_model" in vars(trainer)
    return is_set or getattr(trainer.task, "wrap", None) is not None


def _computed(model: torch.nn.Module) -> list[str]:
    """Tensors that a checkpoint does not fill, and that the model computed of weights which it does not have."""
    return [
        name
        for module in model.modules()
        for name, value in {**module._buffers, **vars(module)}.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
