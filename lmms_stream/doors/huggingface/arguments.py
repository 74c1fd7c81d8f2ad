"""transformers.TrainingArguments or TRL's SFTConfig -> TrainConfig; arguments of the constructor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from ...errors import ConfigError, LmmsStreamError
from ...processors.base import Compared
from ...train.run.optimizers import OF_TORCH
from ...train.run.settings import BETAS, EPSILON, BestConfig, Reporter, TrainConfig, share_of_run
from ...types import World
from . import fields

if TYPE_CHECKING:
    from transformers import TrainingArguments


SAME = (
    "output_dir", "learning_rate", "weight_decay", "seed", "save_total_limit", "gradient_checkpointing",
    "torch_compile", "eval_delay", "eval_on_start", "logging_first_step",
)  # fields that are TrainConfig's in name and meaning # fmt: skip
_SCHEDULES = {"constant_with_warmup": "constant"}  # transformers' name -> ours, if different
_QUADRATIC = ("sdpa", "eager")  # their forward costs tokens times tokens, and masks other samples' tokens
LAUNCHED = "launched_values"  # arguments of a launch file: values of TrainConfig without a field of transformers
_REPORTERS = get_args(Reporter)


def option(arguments: TrainingArguments, name: str) -> Any:
    """Return a field of TRL's configs; TRL's default if the arguments do not have the field."""
    default = fields.SFT_DEFAULTS[name] if name in fields.SFT_DEFAULTS else fields.PREFERENCE_DEFAULTS[name]
    return getattr(arguments, name, default)


def group_ranks(arguments: TrainingArguments) -> int:
    """Return the number of ranks that read the same packs, from the degrees of a launch file."""
    degrees = getattr(arguments, LAUNCHED, {})
    return int(degrees.get("sequence_parallel", 1) * degrees.get("tensor_parallel", 1))


def device_batch(arguments: TrainingArguments, world: World) -> int:
    """Return packs per forward pass of a rank; with accelerate's split_batches, the field is the total of all ranks."""
    batch: int = arguments.per_device_train_batch_size
    if not getattr(arguments.accelerator_config, "split_batches", False):
        return batch
    if batch % world.num_groups:
        raise ConfigError(
            f"args.per_device_train_batch_size {batch} is for all ranks together, because of "
            f"accelerator_config.split_batches, and cannot be split over {world.num_groups} groups of ranks: set it "
            "to a multiple of this number"
        )
    return batch // world.num_groups


def train_config(
    arguments: TrainingArguments,
    *,
    world: World,
    steps_of: Callable[[float], int],
    attention: str | None = None,
    packs_batches: bool = False,
) -> TrainConfig:
    """Return the TrainConfig of a run.

    steps_of: epochs, possibly a fraction -> steps. attention: attention of the model; if its cost is quadratic in the
    length, packs run one by one, not joined to a sequence. packs_batches: a pack holds the samples of a batch.
    ConfigError for an unsupported value.
    """
    batch = 1 if packs_batches else device_batch(arguments, world)
    is_quadratic = option(arguments, "packing") and attention in _QUADRATIC
    values: dict[str, Any] = {name: getattr(arguments, name) for name in SAME}
    values |= {
        "global_batch": batch * arguments.gradient_accumulation_steps * world.num_groups,
        "per_device_batch": 1 if is_quadratic else batch,
        "bf16": bool(arguments.bf16),
        "tf32": arguments.tf32,
        "best": _best(arguments),
        "max_grad_norm": arguments.max_grad_norm or 0.0,
        "resume": "never",  # train(resume_from_checkpoint=…) decides
        "num_workers": arguments.dataloader_num_workers,
        "timeout_s": float(arguments.ddp_timeout),
        "report_to": [name for name in _REPORTERS if name in (arguments.report_to or [])],
    }
    values |= _length(arguments, steps_of)
    values |= _schedule(arguments, values.get("max_steps"))
    values |= _optimizer(arguments)
    values |= _times(arguments, lambda: values.get("max_steps") or steps_of(arguments.num_train_epochs))
    _check(arguments)
    return TrainConfig(**values | getattr(arguments, LAUNCHED, {}))


def _best(arguments: TrainingArguments) -> BestConfig:
    mode: Literal["max", "min"] | None = None
    if arguments.greater_is_better is not None:
        mode = "max" if arguments.greater_is_better else "min"
    return BestConfig(metric=arguments.metric_for_best_model, mode=mode, load=bool(arguments.load_best_model_at_end))


def arguments_of(config: TrainConfig) -> TrainingArguments:
    """Return TrainingArguments for callbacks of a run with a TrainConfig. The process group exists already."""
    from transformers import TrainingArguments

    with _without_advice():
        made = TrainingArguments(
            output_dir=config.output_dir,
            per_device_train_batch_size=config.per_device_batch,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            max_steps=-1 if config.max_steps is None else config.max_steps,
            num_train_epochs=config.num_train_epochs or 1,
            logging_strategy=_strategy(config.logging_steps),
            logging_steps=_number_of(config.logging_steps) or 1,
            logging_first_step=config.logging_first_step,
            eval_strategy=_strategy(config.eval_steps),
            eval_steps=_number_of(config.eval_steps) or None,
            save_strategy=_strategy(config.save_steps),
            save_steps=_number_of(config.save_steps) or 500,
            save_total_limit=config.save_total_limit,
            metric_for_best_model=config.best.metric or ("loss" if config.tracks_best else None),
            greater_is_better=None if config.best.mode is None else config.best.mode == "max",
            seed=config.seed,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
        )
    made.load_best_model_at_end = config.best.load  # set later: transformers' rules for steps do not apply
    return made


def _strategy(steps: int | str) -> str:
    """Return transformers' strategy for steps; transformers has no strategy for only the end of a run."""
    return steps if isinstance(steps, str) else "steps" if steps else "no"


def _number_of(steps: int | str) -> int:
    return steps if isinstance(steps, int) else 0


def unwritten_reports(arguments: TrainingArguments) -> list[str]:
    """Return the reporters in the arguments that are not supported here."""
    return [name for name in arguments.report_to or [] if name not in _REPORTERS]


def _length(arguments: TrainingArguments, steps_of: Callable[[float], int]) -> dict[str, Any]:
    if arguments.max_steps > 0:
        return {"max_steps": arguments.max_steps}
    epochs = arguments.num_train_epochs
    if not epochs > 0:
        raise ConfigError(f"args.num_train_epochs must be above 0, or max_steps, got {epochs}")
    if float(epochs).is_integer():
        return {"num_train_epochs": int(epochs)}
    return {"max_steps": steps_of(epochs)}


def _schedule(arguments: TrainingArguments, max_steps: int | None) -> dict[str, Any]:
    name = _value(arguments.lr_scheduler_type)
    values: dict[str, Any] = {
        "lr_scheduler_type": _SCHEDULES.get(name, name),
        "lr_scheduler_kwargs": _fields(arguments.lr_scheduler_kwargs),
    }
    if name == "constant":  # transformers' constant schedule has no warm-up
        return values
    if arguments.warmup_steps >= 1:
        return {**values, "warmup": math.ceil(arguments.warmup_steps)}
    ratio = arguments.warmup_steps or getattr(arguments, "warmup_ratio", 0.0)
    if max_steps is not None:
        return {**values, "warmup": math.ceil(max_steps * ratio)}
    return {**values, "warmup": share_of_run(ratio)}


def _optimizer(arguments: TrainingArguments) -> dict[str, Any]:
    """Return optim and optim_args; adamw_torch_fused and adamw_torch both become adamw, with the fused kernel."""
    name = _value(arguments.optim)
    settings = _named_values(arguments.optim_args)
    if name in ("adamw_torch_fused", "adamw_torch"):
        name = "adamw"
    betas = [arguments.adam_beta1, arguments.adam_beta2]
    of_adam: dict[str, Any] = {} if betas == [*BETAS] else {"betas": betas}
    if arguments.adam_epsilon != EPSILON:
        of_adam["eps"] = arguments.adam_epsilon
    if of_adam and name in OF_TORCH:
        raise ConfigError(
            f"args.adam_beta1, adam_beta2 and adam_epsilon are of AdamW, and args.optim is {name}: leave them out; "
            f"optim_args has the arguments of {name}"
        )
    if "eps" in settings and name not in OF_TORCH:
        raise ConfigError("args.optim_args has eps: set args.adam_epsilon")
    return {"optim": name, "optim_args": settings | of_adam}


def _named_values(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return names and values of "a=1,b=x", in transformers' notation."""
    if not text or isinstance(text, Mapping):
        return dict(text or {})
    pairs = [each.partition("=") for each in text.replace(" ", "").split(",")]
    wrong = [name for name, equals, _ in pairs if not equals]
    if wrong:
        raise ConfigError(f"args.optim_args {text!r} has {wrong[0]!r} without a value: write name=value,name=value")
    return {name: _number(value) for name, _, value in pairs}


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except LmmsStreamError:
            raise
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _times(arguments: TrainingArguments, num_steps: Callable[[], int]) -> dict[str, Any]:
    """Return the steps of records, evaluations and checkpoints; values below 1 are a share of the run."""

    def every(strategy: str, steps: float | None) -> int | str:
        if strategy != "steps" or not steps:
            return 0 if strategy == "steps" else strategy
        return max(1, math.ceil(num_steps() * steps)) if steps < 1 else int(steps)

    values = {
        f"{name}_steps": every(_value(getattr(arguments, f"{name}_strategy")), getattr(arguments, f"{name}_steps"))
        for name in ("logging", "eval", "save")
    }
    return {**values, "logging_steps": values["logging_steps"] or 1}


def _check(arguments: TrainingArguments) -> None:
    """Raise ConfigError for unsupported values of honoured fields."""
    if arguments.use_cpu and torch.cuda.is_available():
        raise ConfigError(
            "args.use_cpu is True, and this process sees a GPU: start the script with CUDA_VISIBLE_DEVICES=''"
        )
    details = _fields(arguments.gradient_checkpointing_kwargs)
    unknown = sorted(set(details) - {"use_reentrant"} - {name for name in ("selective",) if not details.get(name)})
    if unknown or details.get("use_reentrant"):
        raise ConfigError(
            f"args.gradient_checkpointing_kwargs {details} cannot be kept: blocks are computed again without "
            "reentrant autograd: leave it out"
        )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress transformers' advice to launch several processes, given to a single process with a process group."""
    told_by = logging.getLogger("transformers.training_args")
    level = told_by.level
    told_by.setLevel(logging.ERROR)
    try:
        yield
    finally:
        told_by.setLevel(level)


def _fields(value: Any) -> dict[str, Any]:
    """Return a dict of fields; transformers has parsed JSON already."""
    return dict(value or {})


def _value(name: Any) -> str:
    """Return a name as text, also of an enum of transformers."""
    return str(getattr(name, "value", name))


# Arguments of the constructor of FSDP2SFTTrainer.


@dataclass(frozen=True, kw_only=True)
class TrainerInputs:
    """Arguments of a trainer. objective: objective of a task that compares answers, else None."""

    model: Any = None
    args: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    data_collator: Any = None
    processing_class: Any = None
    formatting_func: Callable[..., Any] | None = None
    peft_config: Any = None
    quantization_config: Any = None
    objective: Compared | None = None
