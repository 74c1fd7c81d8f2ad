"""The learning rate along a run, and the parameters that decay. step or tokens -> factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import get_scheduler

from .settings import TrainConfig

_NAMES = {"wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}  # transformers' where they differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """factor(position) of the learning rate, and the length of the run; both in steps, or in tokens.

    It has no state: where a run stands says it all.
    """

    factor: Callable[[int], float]
    length: int
    counts_tokens: bool

    def position(self, *, step: int, tokens_seen: int) -> int:
        return tokens_seen if self.counts_tokens else step


def build_schedule(config: TrainConfig, max_steps: int | None) -> Schedule:
    """By transformers' schedules. max_steps: of the run, unless it ends by tokens."""
    length = config.max_tokens if max_steps is None else max_steps
    assert length is not None
    warmup = config.warmup_tokens or config.warmup_steps or round(config.warmup_ratio * length)
    details: dict[str, Any] = {}
    if config.lr_scheduler_type == "wsd":
        details = {"num_decay_steps": round(config.decay_ratio * length)}
    unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    made = get_scheduler(
        _NAMES.get(config.lr_scheduler_type, config.lr_scheduler_type),
        unused,
        num_warmup_steps=warmup,
        num_training_steps=length,
        scheduler_specific_kwargs=details,
    )
    return Schedule(factor=made.lr_lambdas[0], length=length, counts_tokens=max_steps is None)


def parameter_groups(model: torch.nn.Module, *, weight_decay: float, decay_all: bool) -> list[dict[str, Any]]:
    """For AdamW: matrices decay, and vectors (biases, norms) do not, unless all do."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [each for each in trained if decay_all or each.ndim >= 2]
    others = [each for each in trained if not decay_all and each.ndim < 2]
    groups: Iterable[dict[str, Any]] = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
