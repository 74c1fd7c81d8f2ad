"""The processed samples of a pack -> one Batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .processors.base import IGNORED_LABEL
from .types import Batch, PackRows, Processed

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
    rows = new_rows(sum(lengths), len(lengths), pad_to=pad_to)
    start = num_loss_tokens = 0
    for number, sample in enumerate(samples):
        at = slice(start, start + lengths[number])
        rows.input_ids[0, at] = sample["input_ids"]
        rows.labels[0, at] = sample["labels"]
        rows.labels[0, start] = IGNORED_LABEL
        rows.position_ids[0, at] = np.arange(lengths[number])
        num_loss_tokens += int(np.count_nonzero(rows.labels[0, at] != IGNORED_LABEL))
        start = at.stop
        rows.cu_seqlens[number + 1] = start
    return finish(
        rows,
        np.array(sample_ids, np.int64),
        max_seqlen=max(lengths, default=0),
        num_loss_tokens=num_loss_tokens,
        source=source,
        step=step,
        micro_batch=micro_batch,
    )


def new_rows(num_tokens: int, num_segments: int, *, pad_to: int | None = None) -> PackRows:
    """Rows for so many tokens in segments, and behind them the padding, a segment of its own that is written."""
    total = max(num_tokens, pad_to or 0, MIN_PAD_TOKENS if num_tokens == 0 else 0)
    padding = total - num_tokens
    rows = PackRows(
        input_ids=np.empty((1, total), np.int64),
        labels=np.empty((1, total), np.int64),
        position_ids=np.empty((1, total), np.int64),
        cu_seqlens=np.empty(num_segments + 1 + (padding > 0), np.int32),
    )
    rows.cu_seqlens[0] = 0
    if padding:
        rows.input_ids[0, num_tokens:] = PAD_TOKEN_ID
        rows.labels[0, num_tokens:] = IGNORED_LABEL
        rows.position_ids[0, num_tokens:] = np.arange(padding)
        rows.cu_seqlens[-1] = total
    return rows


def finish(
    rows: PackRows,
    sample_ids: NDArray[np.int64],
    *,
    max_seqlen: int,
    num_loss_tokens: int,
    source: str,
    step: int,
    micro_batch: int,
) -> Batch:
    """The batch of rows that are filled; max_seqlen: of their segments, without the padding."""
    padding = rows.cu_seqlens.item(-1) - rows.cu_seqlens.item(-2)
    return Batch(
        input_ids=torch.from_numpy(rows.input_ids),
        labels=torch.from_numpy(rows.labels),
        position_ids=torch.from_numpy(rows.position_ids),
        cu_seqlens=torch.from_numpy(rows.cu_seqlens),
        max_seqlen=max(padding, max_seqlen),  # where there is no padding, the last segment itself
        num_loss_tokens=num_loss_tokens,
        sample_ids=torch.from_numpy(sample_ids),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )
