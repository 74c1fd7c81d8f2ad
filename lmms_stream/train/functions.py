"""What the constructor of a trainer was given -> what a run needs, and what of it cannot be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from ..errors import ConfigError
from ..mds.core import gives_packs
from ..processors.base import Compared
from .habits.collators import adapted
from .habits.given import Given, Resolved
from .model.build import ModelConfig
from .run.distributed import init_distributed
from .run.settings import TrainConfig
from .tasks.causal import CausalLanguageModelling, FunctionTask
from .tasks.registry import CAUSAL, build_task, check_objective, objective_of
from .tasks.task import Task

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


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

    def task(self, given: Task | None, *, z_loss: float, processors: Iterable[Any] = ()) -> Task:
        """The task of a run, by default the one that the processors of its datasets ask for.

        ConfigError for one that reads other samples than theirs.
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
                raise ConfigError(f"train.z_loss {z_loss:g} is none of compute_loss_func's: add it there, or set 0")
            return FunctionTask()
        if given is not None:
            return given
        name = objective_of(processors)
        return CausalLanguageModelling(z_loss=z_loss) if name == CAUSAL else build_task(name)


def compared_by(task: Task | None) -> Compared | None:
    """The objective of rows of a task that compares answers; None of another."""
    name = getattr(task, "name", None)
    return name if name in get_args(Compared) else None


def resolved_of(given: Given) -> Resolved:
    """What a run needs. Nothing of transformers' arguments is imported where all is given in our own words."""
    theirs = (given.processing_class, given.formatting_func, given.peft_config, given.quantization_config)
    if (
        isinstance(given.args, TrainConfig)
        and (given.model is None or isinstance(given.model, ModelConfig | torch.nn.Module))
        and all(map(_is_ours, (given.train_dataset, given.eval_dataset)))
        and all(each is None for each in theirs)
    ):
        return Resolved(
            config=given.args,
            arguments=None,
            model=given.model,
            train_dataset=given.train_dataset,
            eval_dataset=given.eval_dataset,
            data_collator=None if given.data_collator is None else adapted(given.data_collator),
        )
    from .habits.resolve import resolve

    return resolve(given, lambda timeout_s, *, replication=1: init_distributed(timeout_s, replication=replication)[0])


def _is_ours(given: Any) -> bool:
    """Whether this is a dataset of packs, or several by name."""
    if isinstance(given, Mapping):
        return all(map(_is_ours, given.values()))
    return given is None or (not getattr(given, "lacks_processor", False) and gives_packs(given))
