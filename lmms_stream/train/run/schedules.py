"""The learning rate along a run, by step or by tokens."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from ...checks import check_arguments
from ...errors import ConfigError
from .settings import DECAY_RATIO, TrainConfig

logger = logging.getLogger("lmms_stream")
_NAMES = {"wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}  # our names -> transformers'
_OF_METRICS = ("reduce_lr_on_plateau", "greedy")
_WITH_MINIMUM = ("cosine", "linear", "wsd", "warmup_stable_decay")


class Schedule:
    """Sets the learning rate of an optimizer by the position of a run, in steps, or in tokens with max_tokens.

    create: returns torch's scheduler for a length (default: the config's schedule). transformers' schedules are
    LambdaLRs; their factor depends only on the position. Other schedulers are stepped from the start to the position of
    a resumed run: a schedule is not saved. length: length of the run, in the same unit.
    """

    def __init__(
        self,
        config: TrainConfig,
        optimizer: torch.optim.Optimizer,
        *,
        max_steps: int | None,
        create: Callable[[int], LRScheduler] | None = None,
    ):
        """max_steps: length of the run in steps; None if the run ends by tokens."""
        length = config.max_tokens if max_steps is None else max_steps
        assert length is not None
        self.counts_tokens = max_steps is None
        self._create = create or (lambda length: build_scheduler(config, optimizer, length))
        self._num_moves = 0
        self._scheduler: LRScheduler | None = None
        self.set_length(length)

    def set_length(self, length: int) -> None:
        """Create the schedule again for a run of this length; `move` then sets its position."""
        made = self._create(length)
        if self.counts_tokens and not isinstance(made, LambdaLR):
            raise ConfigError(
                f"a {type(made).__name__} counts steps, and train.max_tokens counts tokens: set train.max_steps, or "
                "give a LambdaLR"
            )
        if made is not self._scheduler:
            self._num_moves = 0
        self.length, self._scheduler = length, made

    @property
    def scheduler(self) -> LRScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, of the first parameter group."""
        return float(self.scheduler.get_last_lr()[0])

    def position(self, *, step: int, tokens_seen: int) -> int:
        return tokens_seen if self.counts_tokens else step

    def move(self, position: int) -> None:
        """Set the learning rate of the step that begins here."""
        scheduler = self.scheduler
        num_moves = position - self._num_moves
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = position - 1  # step() adds one; positions may advance by more
            num_moves = 1
        with warnings.catch_warnings():
            # torch warns if no update came before, for example if the first gradients are not finite
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(num_moves):
                scheduler.step()
        self._num_moves = max(self._num_moves, position)


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, length: int) -> LRScheduler:
    """Return transformers' schedule of a config for a run of `length` steps, or tokens with max_tokens."""
    warmup = round(config.warmup * length) if config.warmup < 1 else round(config.warmup)
    name, details = _named(config, length)
    _check_lengths(config, length, warmup=warmup, details=details)
    check_arguments(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)], details, prefix="train.lr_scheduler_kwargs.")
    try:
        made: LRScheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=max(length, warmup + 1),  # polynomial divides by the steps after the warm-up
            scheduler_specific_kwargs=details,
        )
        factors = [float(of(at)) for of in getattr(made, "lr_lambdas", ()) for at in (0, warmup, length - 1)]
        if not all(0 <= each <= 1 for each in factors):
            raise ValueError("rates would leave the range from 0 to learning_rate: correct the arguments")
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(
            f"train.lr_scheduler_type {config.lr_scheduler_type} with lr_scheduler_kwargs "
            f"{dict(config.lr_scheduler_kwargs)}: {' '.join(str(error).split())}"
        ) from error
    return made


def _check_lengths(config: TrainConfig, length: int, *, warmup: int, details: dict[str, Any]) -> None:
    """Raise ConfigError if the decay begins before the warmup ends; warn if the run ends before the warmup.

    Rounding up both shares of a run may take a step too many: then the decay is one step shorter.
    """
    unit = "tokens" if config.max_tokens is not None else "steps"
    decay = details.get("num_decay_steps", 0)
    if decay and warmup + decay == length + 1:
        details["num_decay_steps"] = decay - 1
    elif decay and warmup < length < warmup + decay and "num_stable_steps" not in details:
        raise ConfigError(
            f"train warms up for {warmup} {unit} and goes down over the last {decay}, and the run has {length}: the "
            "learning rate would fall at once where both meet: lower warmup or lr_scheduler_kwargs.decay_ratio"
        )
    if warmup and warmup >= length:
        logger.warning(
            "the learning rate never reaches %g: the run has %d %s, and warms up for %d: lower warmup",
            config.learning_rate, length, unit, warmup,
        )  # fmt: skip


def num_kept(first: int, stop: int, *, skipped: Sequence[tuple[int, int]]) -> int:
    """Number of steps in [first, stop) outside all ranges `skipped`; ranges may overlap.

    >>> num_kept(0, 10, skipped=[(2, 4), (3, 5), (9, 20)])
    6
    """
    passed = {step for begin, end in skipped for step in range(max(begin, first), min(end, stop))}
    return stop - first - len(passed)


def _named(config: TrainConfig, length: int) -> tuple[str, dict[str, Any]]:
    """Return transformers' name of a run's schedule and its keyword arguments. ConfigError for an unknown name."""
    kind = config.lr_scheduler_type
    name = _NAMES.get(kind, kind)
    if name in _OF_METRICS:
        raise ConfigError(
            f"train.lr_scheduler_type {name} follows evaluations, not the position of a run: choose cosine"
        )
    known = dict.fromkeys([*_NAMES, *(each.value for each in SchedulerType if each.value not in _OF_METRICS)])
    if name not in {*known, *_NAMES.values()}:
        raise ConfigError(f"train.lr_scheduler_type {kind!r} is none of {', '.join(known)}")
    details: dict[str, Any] = {}
    given = dict(config.lr_scheduler_kwargs)
    if name == "warmup_stable_decay" and not ("num_decay_steps" in given and "decay_ratio" not in given):
        details["num_decay_steps"] = round(given.pop("decay_ratio", DECAY_RATIO) * length)
    if kind not in _WITH_MINIMUM:
        if given.get("min_lr") and not name.endswith("_with_min_lr"):
            raise ConfigError(
                f"train.lr_scheduler_kwargs.min_lr needs {', '.join(_WITH_MINIMUM[:3])}, and lr_scheduler_type is "
                f"{kind}: leave it out, or choose one of them"
            )
    elif lowest := given.pop("min_lr", 0):
        share = lowest / config.learning_rate
        if kind == "cosine":
            name, details = "cosine_with_min_lr", {"min_lr_rate": share}
        elif kind == "linear":
            name, details = "polynomial", {"lr_end": lowest, "power": 1.0}
        else:
            details["min_lr_ratio"] = share
    if given and name == "constant_with_warmup":  # transformers ignores them
        raise ConfigError(
            f"train.lr_scheduler_kwargs has {min(given)}, and lr_scheduler_type {kind} has no arguments: leave it out"
        )
    if both := sorted(details.keys() & given.keys()):
        raise ConfigError(
            f"train.lr_scheduler_kwargs sets {both[0]} twice, by its name and by min_lr or decay_ratio: leave one out"
        )
    return name, {**details, **given}
