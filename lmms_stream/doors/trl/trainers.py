"""TRL's SFTTrainer, DPOTrainer and KTOTrainer, with TRL's signatures."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...errors import ConfigError, did_you_mean
from ...train.tasks.registry import build_task
from ...train.tasks.task import Task
from ..huggingface.arguments import option
from ..huggingface.models import name_of
from ..huggingface.table import check_numbers
from ..huggingface.trainer import FSDP2SFTTrainer

_REMEDY = "the reference is the model as the run begins: leave ref_model out, or begin with the model that it is"


class SFTTrainer(FSDP2SFTTrainer):
    """See FSDP2SFTTrainer; arguments are in TRL's order."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
        *,
        task: Task | None = None,
        model_init: Callable[..., torch.nn.Module] | None = None,
        **unknown: Any,
    ):
        check_keywords(type(self), unknown)
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, quantization_config=quantization_config,
            peft_config=peft_config, formatting_func=formatting_func, task=task, model_init=model_init,
        )  # fmt: skip


class _AnswersTrainer(FSDP2SFTTrainer):
    """Base class of DPOTrainer and KTOTrainer."""

    kind: str  # dpo or kto

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **unknown: Any,
    ):
        check_keywords(type(self), unknown)
        if args is None:
            args = self._config()(f"{Path(name_of(model) or 'model').name}-{self.kind.upper()}")
        if type(args).__module__.startswith("trl.") and not isinstance(args, self._config()):
            raise ConfigError(
                f"args is a {type(args).__name__}: give {type(self).__name__} a {self._config().__name__}"
            )
        check_numbers(args)
        check_reference(ref_model, model)
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, quantization_config=quantization_config,
            peft_config=peft_config, task=self._task(args),
        )  # fmt: skip

    def compute_ref_log_probs(self, inputs: Any) -> NoReturn:
        """Raise ConfigError: the task computes its reference."""
        raise ConfigError(
            "compute_ref_log_probs is not supported: precompute_ref_log_probs=True stores the same values"
        )

    def _config(self) -> type:
        import trl

        return getattr(trl, f"{self.kind.upper()}Config")  # type: ignore[no-any-return]

    def _task(self, args: Any) -> Task:
        raise NotImplementedError


class DPOTrainer(_AnswersTrainer):
    """TRL's DPOTrainer: pairs of answers, see docs/preferences.md. ref_model must have the model's own weights."""

    kind = "dpo"

    def _task(self, args: Any) -> Task:
        losses = getattr(args, "loss_type", ["sigmoid"])
        losses = [losses] if isinstance(losses, str) else list(losses)
        if len(losses) != 1:
            raise ConfigError(
                f"args.loss_type is {', '.join(losses)}, but only one loss is supported: name one of them"
            )
        return build_task("dpo", {
            "beta": option(args, "beta"), "loss_type": losses[0], "label_smoothing": option(args, "label_smoothing"),
            "reference": "stored" if option(args, "precompute_ref_log_probs") else "model",
        })  # fmt: skip


class KTOTrainer(_AnswersTrainer):
    """TRL's KTOTrainer: single answers, see docs/preferences.md. A pack is a batch of per_device_train_batch_size."""

    kind = "kto"

    def _task(self, args: Any) -> Task:
        loss = getattr(args, "loss_type", "kto")
        measures = option(args, "precompute_ref_log_probs") and loss == "apo_zero_unpaired"
        weights = {name: option(args, name) for name in ("beta", "desirable_weight", "undesirable_weight")}
        return build_task("kto", {**weights, "loss_type": loss, "reference": "stored" if measures else "model"})


def check_keywords(kind: type[FSDP2SFTTrainer], unknown: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown argument of a TRL trainer; fields of TRL's config belong in the config."""
    import trl

    name = next(iter(unknown), None)
    if name is None:
        return
    base = next(each for each in kind.__mro__ if each.__module__ == __name__)
    config = getattr(trl, base.__name__.replace("Trainer", "Config"))
    if name == "tokenizer":
        remedy = "give it as processing_class"
    elif name in {each.name for each in dataclasses.fields(config)}:
        remedy = f"it is a field of {config.__name__}: args={config.__name__}({name}=…)"
    else:
        known = [each for each in inspect.signature(base).parameters if each != "unknown"]
        remedy = did_you_mean(name, known)
    raise ConfigError(f"{base.__name__} takes no {name}: {remedy}")


def check_reference(ref_model: Any, model: Any) -> None:
    """Raise ConfigError for a ref_model with other weights than the model."""
    if ref_model is None or ref_model is model:
        return
    if isinstance(ref_model, str | Path) and isinstance(model, str | Path):
        if str(ref_model) != str(model):
            raise ConfigError(f"ref_model is {ref_model}, and model {model}: {_REMEDY}")
        return
    if not isinstance(ref_model, torch.nn.Module) or not isinstance(model, torch.nn.Module):
        raise ConfigError(f"ref_model is a {type(ref_model).__name__}, and model a {type(model).__name__}: {_REMEDY}")
    theirs, ours = ref_model.state_dict(), model.state_dict()
    other = next((name for name in theirs if name not in ours or not torch.equal(theirs[name], ours[name])), None)
    if other is not None:
        raise ConfigError(f"ref_model has another {other} than model: {_REMEDY}")
