"""The loss of packed sequences: one for each target, to be summed over the global batch.

Logits are computed only where a target is predicted, some tokens at a time, and again in the backward pass, so that
those of a whole pack are never in memory together. Those of the last part are kept instead: the backward pass begins
with them, and nothing that needs memory comes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ...processors.base import IGNORED_LABEL

Head = Callable[[torch.Tensor], torch.Tensor]  # [n, H] -> logits [n, V]
LOGITS_AT_ONCE = 1 << 26  # float32 values: 256 MiB


def learnt_tokens(
    labels: torch.Tensor, *, num_learnt: int | None = None, ahead: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions at which a target is predicted, and those targets: int64[n] each, in their order.

    labels: int64[1, T], aligned with the inputs, IGNORED_LABEL where there is no target; position t predicts the label
    at t + ahead. num_learnt: number of targets, as a batch knows; without it the host waits for the device.
    """
    targets = labels[0, ahead:]
    is_learnt = targets != IGNORED_LABEL
    if num_learnt is None:
        learnt = torch.nonzero(is_learnt)[:, 0]
        return learnt, targets[learnt]
    positions = torch.arange(len(targets), device=labels.device)
    slots = torch.where(is_learnt, is_learnt.cumsum(0) - 1, num_learnt)  # the last one is for what is not learnt
    learnt = positions.new_zeros(num_learnt + 1).scatter_(0, slots, positions)[:num_learnt]
    return learnt, targets[learnt]


def token_losses(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, *, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each target, and the logsumexp of its logits: float32[n] each.

    hidden: float[n, H]; targets: int64[n]. The result can be differentiated even where n is 0.
    """
    size = max(64, LOGITS_AT_ONCE // vocab_size)
    *others, last = (slice(start, start + size) for start in range(0, max(1, len(targets)), size))
    parts = [checkpoint(_losses, hidden[part], targets[part], head, use_reentrant=False) for part in others]
    losses, logs = zip(*parts, _losses(hidden[last], targets[last], head), strict=True)
    return torch.cat(losses), torch.cat(logs)


def losses_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the logits: float[n, V]."""
    losses, logs = _CrossEntropy.apply(logits.float(), targets)
    return losses, logs


def _losses(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    return losses_of_logits(head(hidden), targets)


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made in one tensor as large as the logits, where autograd's own takes five."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logs = torch.logsumexp(logits, dim=-1)
        ctx.save_for_backward(logits, targets, logs)
        return logs - logits.gather(1, targets[:, None])[:, 0], logs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor, of_logs: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, logs = ctx.saved_tensors
        made = (logits - logs[:, None]).exp_().mul_((of_losses + of_logs)[:, None])
        return made.scatter_add_(1, targets[:, None], -of_losses[:, None]), None
