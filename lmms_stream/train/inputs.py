"""Inputs of a trainer: the run, and users' functions to change parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..loader.batch_maker import Collator
from .model.build import ModelConfig
from .run.settings import Datasets, TrainConfig
from .tasks.causal import CausalLanguageModelling, FunctionTask
from .tasks.registry import CAUSAL, build_task, check_objective, check_task, objective_of
from .tasks.task import Task

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class Functions:
    """Functions to change parts of a trainer: arguments of transformers' Trainer."""

    model_init: Callable[..., torch.nn.Module] | None = None
    compute_loss_func: Callable[..., torch.Tensor] | None = None
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[..., Any] | None = None
    optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None)
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None

    def check(self, *, model: Any, task: Task | None, eval_dataset: Any) -> None:
        """Raise ConfigError for invalid or contradictory arguments."""
        if not isinstance(self.optimizers, tuple | list) or len(self.optimizers) != 2:
            raise ConfigError(
                f"optimizers must be (optimizer, scheduler), got {type(self.optimizers).__name__}: pass both, with "
                "None for a default"
            )
        optimizer, scheduler = self.optimizers
        if (model is None) == (self.model_init is None):
            raise ConfigError("a trainer needs exactly one of model and model_init: give one of them")
        if optimizer is not None and not isinstance(model, torch.nn.Module):
            raise ConfigError(
                "optimizers has parameters of an existing model: pass this model as model, or use "
                "optimizer_cls_and_kwargs"
            )
        if optimizer is not None and self.optimizer_cls_and_kwargs is not None:
            raise ConfigError("optimizers and optimizer_cls_and_kwargs both set the optimizer: leave one of them out")
        if scheduler is not None and optimizer is None:
            raise ConfigError(
                "optimizers has a scheduler without its optimizer: give both, or override create_scheduler"
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "a ReduceLROnPlateau follows evaluations, not the position of a run: give another scheduler"
            )
        if self.compute_loss_func is not None and task is not None:
            raise ConfigError("compute_loss_func and task both define the loss: leave one of them out")
        if self.preprocess_logits_for_metrics is not None and self.compute_metrics is None:
            raise ConfigError("preprocess_logits_for_metrics needs compute_metrics: pass compute_metrics, too")
        if self.compute_metrics is not None and eval_dataset is None:
            raise ConfigError("compute_metrics needs an eval_dataset: pass one")

    def task(self, given: Task | None, *, z_loss: float, processors: Iterable[Any] = ()) -> Task:
        """Return the task of a run, by default the task of its datasets' processors.

        Raises ConfigError for a task that cannot read the processors' samples.
        """
        known = list(processors)
        task = self._task(given, z_loss=z_loss, processors=known)
        check_objective(task, known)
        if z_loss and getattr(task, "z_loss", None) != z_loss:
            raise ConfigError(
                f"train.z_loss {z_loss:g} is a loss of task causal, and {type(task).__name__} does not add it: set it "
                "to 0, or give a task of your own this z_loss"
            )
        return task

    def _task(self, given: Task | None, *, z_loss: float, processors: Iterable[Any]) -> Task:
        if self.compute_loss_func is not None:
            if z_loss:
                raise ConfigError(
                    f"train.z_loss {z_loss:g} does not apply to compute_loss_func: add it to your function, or set 0"
                )
            return FunctionTask()
        if given is not None:
            check_task(given)
            return given
        name = objective_of(processors)
        return CausalLanguageModelling(z_loss=z_loss) if name == CAUSAL else build_task(name)


def _as_it_is(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """A run: settings, model and datasets.

    arguments: the TrainingArguments for callbacks; None if not given. processing_class: the tokenizer or
    processor of the tokens; None with datasets of packs. token_ids: the ids for end of text and padding to write into
    the model's config. has_dropout: whether dropout modules drop. open_rows: makes packs of rows passed to a later
    evaluation, like for rows of eval_dataset.
    """

    config: TrainConfig
    model: ModelConfig | torch.nn.Module | None
    train_dataset: Datasets | None
    eval_dataset: Datasets | None = None
    data_collator: Collator | None = None
    arguments: TrainingArguments | None = None
    processing_class: Any = None
    token_ids: Mapping[str, int] = field(default_factory=dict)
    has_dropout: bool = True
    open_rows: Callable[[Any], Any] = _as_it_is
