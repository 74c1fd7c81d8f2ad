"""The loss of packed sequences: a loss of each token that is learnt, to be summed over the global batch.

Logits are made for these tokens alone, some at a time, and made again in the backward pass, so that those of a whole
pack are never there together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ...processors.base import IGNORED_LABEL

Head = Callable[[torch.Tensor], torch.Tensor]  # [n, H] -> logits [n, V]
LOGITS_AT_ONCE = 1 << 26  # float32 values: 256 MiB


def learnt_tokens(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a learnt label is predicted, and that label: int64[n] each, in their order.

    labels: int64[1, T], aligned with the inputs, IGNORED_LABEL where nothing is learnt: t is for the label at t + 1.
    """
    targets = labels[0, 1:]
    learnt = torch.nonzero(targets != IGNORED_LABEL)[:, 0]
    return learnt, targets[learnt]


def token_losses(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, *, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each target, and the log of the sum of its softmax: float32[n] each.

    hidden: float[n, H]; targets: int64[n]. With a trained `hidden` the result can be differentiated even where n is 0.
    """
    size = max(64, LOGITS_AT_ONCE // vocab_size)
    parts = [
        checkpoint(_losses, hidden[start : start + size], targets[start : start + size], head, use_reentrant=False)
        for start in range(0, max(1, len(targets)), size)
    ]
    losses, logs = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(logs)


def losses_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of logits that are there: float[n, V]."""
    logits = logits.float()
    logs = torch.logsumexp(logits, dim=-1)
    return logs - logits.gather(1, targets[:, None])[:, 0], logs


def _losses(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    return losses_of_logits(head(hidden), targets)
