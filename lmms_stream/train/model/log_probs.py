"""Log-probabilities of answers: of each sequence of a batch, summed over its tokens that are learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from ...processors.base import IGNORED_LABEL
from ...types import Batch
from .model import PackedModel
from .sharding import reshard

OfPacks = Mapping[int, torch.Tensor]  # micro_batch of a pack -> float32[its sequences]


class Passes(Protocol):
    """Forward passes. packs: of each, on the CPU. Iterated, it gives the batch on the device that they are joined to,
    too.
    """

    @property
    def packs(self) -> Sequence[Sequence[Batch]]: ...

    def __iter__(self) -> Iterator[tuple[Batch, Sequence[Batch]]]: ...


def num_learnt(pack: Batch) -> list[int]:
    """Tokens that are learnt of each sequence of a pack on the CPU. Padding is no sequence, and has none."""
    if pack.sequences is None:
        return []
    ends = np.concatenate([[0], np.cumsum(pack.labels[0].numpy() != IGNORED_LABEL)])
    bounds = pack.sequences.numpy()
    counts: list[int] = (ends[bounds[:, 2]] - ends[bounds[:, 1]]).tolist()
    return counts


def log_probs_of(token_losses: torch.Tensor, packs: Sequence[Batch]) -> torch.Tensor:
    """float32[sequences], from the loss of each learnt token of packs in order; can be differentiated.

    All tokens that are learnt are those of sequences. A result of no sequences can be differentiated, too.
    """
    counts = [count for pack in packs for count in num_learnt(pack)]
    if not counts:
        return -token_losses
    return -torch.stack([each.sum() for each in token_losses.split(counts)])


def measured_log_probs(model: PackedModel, passes: Passes) -> dict[int, torch.Tensor]:
    """Of each pack, those of its sequences, by a model that is not training: no gradients, no dropout.

    All ranks call it with as many passes.
    """
    found: dict[int, torch.Tensor] = {}
    with _not_training(model):
        for batch, packs in passes:
            of_sequences = log_probs_of(model(batch, packs).tokens, packs)
            counts = [0 if pack.sequences is None else len(pack.sequences) for pack in packs]
            found |= zip((pack.micro_batch for pack in packs), of_sequences.split(counts), strict=True)
    return found


@contextmanager
def _not_training(model: PackedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        reshard(model)
