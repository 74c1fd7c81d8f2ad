"""The learning rate along a run, by step or by tokens, and the parameters that decay or have a rate of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import get_scheduler

from ...errors import ConfigError
from .settings import TrainConfig

_NAMES = {
    "wsd": "warmup_stable_decay",
    "constant": "constant_with_warmup",
}  # our names -> transformers'


class Schedule:
    """Sets the learning rate of an optimizer by the position of a run, in steps, or in tokens where it ends by them.

    It is transformers' schedule, torch's LambdaLR, whose factor follows from the position alone: there is nothing to
    save. length: of the run, in the same unit.
    """

    def __init__(self, config: TrainConfig, optimizer: torch.optim.Optimizer, *, max_steps: int | None):
        """max_steps: of the run, None for one that ends by tokens."""
        length = config.max_tokens if max_steps is None else max_steps
        assert length is not None
        self.counts_tokens = max_steps is None
        self._config, self._optimizer = config, optimizer
        self.set_length(length)

    def set_length(self, length: int) -> None:
        """Begin anew for a run of this length; `move` then goes to where it is."""
        self.length, config = length, self._config
        warmup = config.warmup_tokens or config.warmup_steps or round(config.warmup_ratio * length)
        details: dict[str, Any] = {}
        if config.lr_scheduler_type == "wsd":
            details = {"num_decay_steps": round(config.decay_ratio * length)}
        self._scheduler = get_scheduler(
            _NAMES.get(config.lr_scheduler_type, config.lr_scheduler_type),
            self._optimizer,
            num_warmup_steps=warmup,
            num_training_steps=length,
            scheduler_specific_kwargs=details,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next step; train.learning_rates not counted."""
        return float(self._scheduler.get_last_lr()[0])

    def position(self, *, step: int, tokens_seen: int) -> int:
        return tokens_seen if self.counts_tokens else step

    def move(self, position: int) -> None:
        """Set the learning rate of the step that begins here."""
        self._scheduler.last_epoch = position - 1  # step() adds one; positions may advance by more
        with warnings.catch_warnings():
            # torch warns where no update came before, as when the first gradients are not finite
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._scheduler.step()


def num_kept(first: int, stop: int, *, skipped: Sequence[tuple[int, int]]) -> int:
    """How many of the steps [first, stop) lie in none of the ranges `skipped`, which may overlap.

    >>> num_kept(0, 10, skipped=[(2, 4), (3, 5), (9, 20)])
    6
    """
    passed = {step for begin, end in skipped for step in range(max(begin, first), min(end, stop))}
    return stop - first - len(passed)


def parameter_groups(
    model: torch.nn.Module,
    *,
    weight_decay: float,
    decay_all: bool,
    learning_rates: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: matrices decay, vectors (biases, norms) only with decay_all.

    learning_rates: of parameters whose names match a pattern (fnmatch); the others come first, and have the
    optimizer's. ConfigError for a pattern that matches none that is trained, and for a parameter of two patterns.
    """
    pattern_of = _patterns(model, learning_rates or {})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for pattern in (None, *(learning_rates or {})):
        mine = [each for each in trained if pattern_of.get(id(each)) == pattern]
        rate = {} if pattern is None else {"lr": (learning_rates or {})[pattern]}
        decayed = [each for each in mine if decay_all or each.ndim >= 2]
        others = [each for each in mine if not decay_all and each.ndim < 2]
        groups.append({"params": decayed, "weight_decay": weight_decay, **rate})
        groups.append({"params": others, "weight_decay": 0.0, **rate})
    return [group for group in groups if group["params"]]


def _patterns(model: torch.nn.Module, patterns: Iterable[str]) -> dict[int, str]:
    """The pattern of each parameter that has one, by id; one that is tied has several names."""
    found: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [(name, each) for name, each in named if each.requires_grad and fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"train.learning_rates {pattern!r} matches no parameter that is trained: they are named like "
                f"{next(name for name, each in named if each.requires_grad)!r}"
            )
        for name, each in matched:
            if (before := found.setdefault(id(each), pattern)) != pattern:
                raise ConfigError(
                    f"train.learning_rates {before!r} and {pattern!r} both match {name}: a parameter has one rate"
                )
    return found
