"""The processed samples of a pack -> one Batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..processors.base import IGNORED_LABEL
from ..types import Batch, Processed, Rows
from .row_memory import new_rows

PAD_TOKEN_ID = 0
MIN_PAD_TOKENS = 2  # a pad pack needs a next token to predict, or tensors in the model are empty


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
    rows = new_rows(total)
    input_ids, labels, position_ids = (row[0] for row in rows)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        at = slice(start, start + length)
        input_ids[at] = sample["input_ids"]
        labels[at] = sample["labels"]
        labels[start] = IGNORED_LABEL
        position_ids[at] = np.arange(length)
        start += length
    write_padding(rows, num_tokens)
    padding = [total - num_tokens] if total > num_tokens else []
    return to_batch(
        rows,
        np.cumsum([0, *lengths, *padding], dtype=np.int32),
        np.array(sample_ids, np.int64),
        max_seqlen=max(lengths + padding),
        num_loss_tokens=int(np.count_nonzero(labels != IGNORED_LABEL)),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )


def padded_length(num_tokens: int, pad_to: int | None) -> int:
    """Tokens of a pack with its padding."""
    return max(num_tokens, pad_to or 0, 0 if num_tokens else MIN_PAD_TOKENS)


def write_padding(rows: Rows, num_tokens: int) -> None:
    """Fill what lies behind the first num_tokens."""
    input_ids, labels, position_ids = rows
    input_ids[:, num_tokens:] = PAD_TOKEN_ID
    labels[:, num_tokens:] = IGNORED_LABEL
    position_ids[:, num_tokens:] = np.arange(position_ids.shape[1] - num_tokens)


def to_batch(
    rows: Rows,
    cu_seqlens: NDArray[np.int32],
    sample_ids: NDArray[np.int64],
    *,
    max_seqlen: int,
    num_loss_tokens: int,
    source: str,
    step: int,
    micro_batch: int,
) -> Batch:
    """The batch of rows, which become its tensors, uncopied."""
    input_ids, labels, position_ids = rows
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        num_loss_tokens=num_loss_tokens,
        sample_ids=torch.from_numpy(sample_ids),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )


def join(batches: Sequence[Batch]) -> Batch:
    """Packs one after another as one sequence; what is of one pack alone (source, micro_batch) is of the first."""
    first, *others = batches
    if not others:
        return first
    starts = np.cumsum([0, *(batch.num_tokens for batch in batches[:-1])]).tolist()
    bounds = [batch.cu_seqlens[1:] + start for batch, start in zip(batches, starts, strict=True)]
    return replace(
        first,
        input_ids=torch.cat([batch.input_ids for batch in batches], dim=1),
        labels=torch.cat([batch.labels for batch in batches], dim=1),
        position_ids=torch.cat([batch.position_ids for batch in batches], dim=1),
        cu_seqlens=torch.cat([first.cu_seqlens[:1], *bounds]),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        num_loss_tokens=sum(batch.num_loss_tokens for batch in batches),
        sample_ids=torch.cat([batch.sample_ids for batch in batches]),
        num_patches=sum(batch.num_patches for batch in batches),
    )
