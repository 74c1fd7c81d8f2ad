"""The processed samples of a pack -> one Batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .processors.base import IGNORED_LABEL
from .types import Batch, Processed

PAD_TOKEN_ID = 0
MIN_PAD_TOKENS = 2  # a pad pack must have a next token to predict, or a model's shapes degenerate


def collate(
    samples: Sequence[Processed],
    sample_ids: Sequence[int],
    *,
    pad_to: int | None = None,
    source: str = "",
    step: int = 0,
    micro_batch: int = 0,
) -> Batch:
    """One sequence of all samples of a pack; see Batch for the shapes.

    pad_to: at least this many tokens; what is added is a segment of its own, without labels. No samples at all
    give a pad pack: only such a segment.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    num_tokens = sum(lengths)
    total = padded_length(num_tokens, pad_to)
    rows = np.empty((3, total), np.int64)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        at = slice(start, start + length)
        rows[0, at] = sample["input_ids"]
        rows[1, at] = sample["labels"]
        rows[1, start] = IGNORED_LABEL
        rows[2, at] = np.arange(length)
        start += length
    write_padding(rows, num_tokens)
    padding = [total - num_tokens] if total > num_tokens else []
    return to_batch(
        rows,
        np.cumsum([0, *lengths, *padding], dtype=np.int32),
        np.array(sample_ids, np.int64),
        max_seqlen=max(lengths + padding),
        num_loss_tokens=int(np.count_nonzero(rows[1] != IGNORED_LABEL)),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )


def padded_length(num_tokens: int, pad_to: int | None) -> int:
    """Tokens of a pack with its padding."""
    return max(num_tokens, pad_to or 0, 0 if num_tokens else MIN_PAD_TOKENS)


def write_padding(rows: NDArray[np.int64], num_tokens: int) -> None:
    """Fill what lies behind the first num_tokens of int64[3, T] rows of input_ids, labels and position_ids."""
    rows[0, num_tokens:] = PAD_TOKEN_ID
    rows[1, num_tokens:] = IGNORED_LABEL
    rows[2, num_tokens:] = np.arange(rows.shape[1] - num_tokens)


def to_batch(
    rows: NDArray[np.int64],
    cu_seqlens: NDArray[np.int32],
    sample_ids: NDArray[np.int64],
    *,
    max_seqlen: int,
    num_loss_tokens: int,
    source: str,
    step: int,
    micro_batch: int,
) -> Batch:
    """The batch of int64[3, T] rows of input_ids, labels and position_ids; they become its tensors, uncopied."""
    return Batch(
        input_ids=torch.from_numpy(rows[:1]),
        labels=torch.from_numpy(rows[1:2]),
        position_ids=torch.from_numpy(rows[2:]),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        num_loss_tokens=num_loss_tokens,
        sample_ids=torch.from_numpy(sample_ids),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )
