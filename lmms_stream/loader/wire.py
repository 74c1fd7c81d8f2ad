"""Batches on their way from a worker process to the loader: one run of bytes each, a third of their size in memory.

Five tensors as shared memory, which is torch's way, cost a millisecond a batch in system calls, whatever their size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..types import Batch
from .collate import to_batch
from .row_memory import new_rows

LIMIT = 1 << 31  # the first number that an int32 cannot hold


class WireBatch(NamedTuple):
    """payload: int32 tokens and labels, int32 cu_seqlens, int64 sample ids; position_ids follow from cu_seqlens."""

    payload: bytes
    num_tokens: int
    num_bounds: int
    max_seqlen: int
    num_loss_tokens: int
    source: str
    step: int
    micro_batch: int


def to_wire(batch: Batch) -> Batch | WireBatch:
    """A batch that collate made, for the wire; as it is where it has media, or a value that does not fit an int32."""
    if batch.num_patches:
        return batch
    tokens, labels = batch.input_ids.numpy(), batch.labels.numpy()
    if max(int(tokens.max()), int(labels.max())) >= LIMIT or min(int(tokens.min()), int(labels.min())) < -LIMIT:
        return batch
    bounds = batch.cu_seqlens.numpy()
    arrays = (tokens.astype(np.int32), labels.astype(np.int32), bounds, batch.sample_ids.numpy())
    return WireBatch(
        b"".join(array.data for array in arrays),
        batch.num_tokens,
        len(bounds),
        batch.max_seqlen,
        batch.num_loss_tokens,
        batch.source,
        batch.step,
        batch.micro_batch,
    )


def from_wire(wire: WireBatch) -> Batch:
    """The batch that was put on the wire."""
    num_tokens, num_bounds = wire.num_tokens, wire.num_bounds
    input_ids, labels, position_ids = rows = new_rows(num_tokens)
    input_ids[:], labels[:] = np.frombuffer(wire.payload, np.int32, 2 * num_tokens).reshape(2, -1)
    bounds = np.frombuffer(wire.payload, np.int32, num_bounds, 8 * num_tokens).copy()
    position_ids[:] = np.arange(num_tokens)
    position_ids -= np.repeat(bounds[:-1], np.diff(bounds))
    return to_batch(
        rows,
        bounds,
        np.frombuffer(wire.payload, np.int64, offset=8 * num_tokens + 4 * num_bounds).copy(),
        max_seqlen=wire.max_seqlen,
        num_loss_tokens=wire.num_loss_tokens,
        source=wire.source,
        step=wire.step,
        micro_batch=wire.micro_batch,
    )
