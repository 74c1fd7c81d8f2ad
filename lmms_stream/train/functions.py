"""What the constructor of a trainer was given -> what a run needs, and what of it cannot be kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..loader.batch_maker import Collator
from ..mds.core import PackedDataset
from .model.model import ModelConfig
from .run.distributed import init_distributed
from .run.settings import Datasets, TrainConfig
from .tasks.causal import CausalLanguageModelling
from .tasks.function import FunctionTask
from .tasks.task import Task

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What users of transformers give a Trainer to change parts of it; see FSDP2SFTTrainer."""

    model_init: Callable[..., torch.nn.Module] | None = None
    compute_loss_func: Callable[..., torch.Tensor] | None = None
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[..., Any] | None = None
    optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None)
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None

    def check(self, *, model: Any, task: Task | None, eval_dataset: Any) -> None:
        """ConfigError for what excludes each other."""
        optimizer, scheduler = self.optimizers
        if (model is None) == (self.model_init is None):
            raise ConfigError("a trainer needs exactly one of model and model_init: give one of them")
        if optimizer is not None and not isinstance(model, torch.nn.Module):
            raise ConfigError("optimizers has parameters of a model that is made: give that as model, or "
                              "optimizer_cls_and_kwargs")  # fmt: skip
        if optimizer is not None and self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizers and optimizer_cls_and_kwargs both give an optimizer: leave one of them out")
        if scheduler is not None and optimizer is None:
            raise ConfigError(
                "optimizers has a scheduler without its optimizer: give both, or override create_scheduler"
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "a ReduceLROnPlateau follows evaluations, not the position of a run: give another scheduler"
            )
        if self.compute_loss_func is not None and task is not None:
            raise ConfigError("compute_loss_func and task both say what the loss is: leave one of them out")
        if self.preprocess_logits_for_metrics is not None and self.compute_metrics is None:
            raise ConfigError("preprocess_logits_for_metrics is for compute_metrics: give that, too")
        if self.compute_metrics is not None and eval_dataset is None:
            raise ConfigError("compute_metrics needs an eval_dataset: give one")

    def task(self, given: Task | None, *, z_loss: float) -> Task:
        """The task of a run, by default that of language models."""
        if self.compute_loss_func is not None:
            if z_loss:
                raise ConfigError(f"train.z_loss {z_loss:g} is none of compute_loss_func's: add it there, or set 0")
            return FunctionTask()
        return given or CausalLanguageModelling(z_loss=z_loss)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a run needs, in our words; see habits/resolve.py, which finds it where anything was given in others'."""

    config: TrainConfig
    arguments: TrainingArguments | None = None  # as they were given
    model: ModelConfig | torch.nn.Module | None
    train_dataset: Datasets | None
    eval_dataset: Datasets | None
    data_collator: Collator | None
    processing_class: Any = None
    token_ids: Mapping[str, int] = field(default_factory=dict)

    def make_arguments(self) -> TrainingArguments:
        """What callbacks are given as arguments."""
        from .habits.resolve import arguments_of

        return self.arguments or arguments_of(self.config)


def resolved_of(
    *, model: Any, args: Any, train_dataset: Any, eval_dataset: Any, data_collator: Any, **others: Any
) -> Any:
    """What a run needs. Nothing of `habits` is imported where all is given in our own words."""
    if (
        isinstance(args, TrainConfig)
        and (model is None or isinstance(model, ModelConfig | torch.nn.Module))
        and all(map(_is_ours, (train_dataset, eval_dataset)))
        and all(each is None for each in others.values())
    ):
        return Resolved(
            config=args,
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
        )
    from .habits.given import Given
    from .habits.resolve import resolve

    given = Given(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        **others,
    )
    return resolve(given, lambda timeout_s, *, replication: init_distributed(timeout_s, replication=replication)[0])


def _is_ours(given: Any) -> bool:
    """Whether this is a dataset of packs, or several by name."""
    if isinstance(given, Mapping):
        return all(map(_is_ours, given.values()))
    return given is None or isinstance(getattr(given, "core", given), PackedDataset)
