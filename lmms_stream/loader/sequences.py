"""Sequences of samples, as the two answers of a pair, or documents -> which segments of a batch they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError
from ..types import Batch, Processed, Role


def sequences_of(samples: Sequence[Processed], lengths: Sequence[int]) -> NDArray[np.int64] | None:
    """The sequences of samples of these lengths, which stand one after another: see Batch. None where none has any.

    ConfigError for sequences that do not make up their sample, and for samples without any beside others with them.
    """
    if not any("sequences" in sample for sample in samples):
        return None
    found = []
    starts = accumulate(lengths[:-1], initial=0)
    for index, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        own = np.asarray(sample.get("sequences", ()))
        _check(own, length)
        stops = start + np.cumsum(own[:, 0])
        found.append(np.stack([np.full(len(own), index), stops - own[:, 0], stops, own[:, 1]], axis=1))
    made: NDArray[np.int64] = np.concatenate(found).astype(np.int64)
    return made


def _check(own: NDArray[np.int64], length: int) -> None:
    roles = [int(role) for role in Role]
    if own.ndim != 2 or own.shape[1] != 2 or not np.issubdtype(own.dtype, np.integer):
        raise ConfigError(
            f"a processor gives sequences {own.dtype}{list(own.shape)}: give int64[k, 2], the tokens and the role of "
            "each, for all samples or for none"
        )
    if own[:, 0].sum() != length or (own[:, 0] < 1).any() or not np.isin(own[:, 1], roles).all():
        raise ConfigError(
            f"a processor gives sequences {own.tolist()} for a sample of {length} tokens: their tokens, 1 or more "
            f"each, must make up the sample, and their roles be {' or '.join(map(str, roles))}"
        )


def join_sequences(batches: Sequence[Batch]) -> torch.Tensor | None:
    """Those of batches that stand one after another; None where none has any. Batches without samples have none."""
    if all(batch.sequences is None for batch in batches):
        return None
    found, first_sample, first_token = [], 0, 0
    for batch in batches:
        if batch.sequences is not None:
            offsets = batch.sequences.new_tensor([first_sample, first_token, first_token, 0])
            found.append(batch.sequences + offsets)
        elif len(batch.sample_ids):
            raise ConfigError(
                f"packs of {batch.source or 'one dataset'} have no sequences, and others have: train on datasets of "
                "one kind, or set per_device_batch to 1"
            )
        first_sample += len(batch.sample_ids)
        first_token += batch.num_tokens
    return torch.cat(found)
