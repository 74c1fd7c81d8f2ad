"""The loss of packed sequences: a sum over tokens, to be divided by the loss tokens of the global batch."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from ..processors.base import IGNORED_LABEL


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of all labels that are not IGNORED_LABEL: float32 scalar.

    logits: float[1, T, V]; labels: int64[1, T], aligned with the inputs: logits at t are for labels at t + 1.
    """
    predictions = logits[:, :-1].flatten(0, 1).float()
    return cross_entropy(predictions, labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
