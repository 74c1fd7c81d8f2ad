"""Batches on the way from a worker process to the loader: a run of bytes each, a third of the size in memory.

Torch would put five tensors of any size into shared memory, with system calls of a millisecond a batch. Media are
large: they are in reused shared memory (media_memory.py), and are not copied through a pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..plan.left_out import LeftOutSample
from ..types import Batch
from .collate import to_batch
from .media_memory import SentTensor, SharedBlocks, new_rows

SMALL = 1 << 16  # bytes of a tensor; up to here a copy costs less than the system calls for shared memory
LIMIT = 1 << 31  # the first number above int32


class WireBatch(NamedTuple):
    """A batch as bytes, numbers and small arrays.

    payload: int32 tokens, int32 labels, positions on their own axes (int32, or float32 with fractions), int32
    cu_seqlens, int64 sample ids. The other position_ids restart in each sample, and follow from cu_seqlens. inputs:
    small inputs as arrays, large inputs as SentTensor; the receiver gets tensors. token_inputs: int64[1, T] each.
    """

    payload: bytes
    num_tokens: int
    num_axes: int
    num_bounds: int
    max_seqlen: int
    num_loss_tokens: int
    source: str
    step: int
    micro_batch: int
    num_patches: int
    has_fractions: bool
    inputs: Mapping[str, NDArray[Any] | SentTensor | torch.Tensor]
    token_inputs: Mapping[str, NDArray[np.int64]]
    sequences: NDArray[np.int64] | None
    left_out: Sequence[LeftOutSample]
    repeats: Sequence[int]
    holds_one: bool | None


def to_wire(batch: Batch, blocks: SharedBlocks) -> Batch | WireBatch:
    """Return a batch of collate for the wire; unchanged if a number does not fit into int32. blocks: of the worker."""
    rows = [batch.input_ids.numpy(), batch.labels.numpy()]
    num_axes = len(batch.position_ids) - 1
    if num_axes:
        own = batch.position_ids.numpy()[1:]
        rows.append(own.view(np.int32) if own.dtype == np.float32 else own)
    if max(int(row.max()) for row in rows) >= LIMIT or min(int(row.min()) for row in rows) < -LIMIT:
        return batch
    bounds = batch.cu_seqlens.numpy()
    arrays = (*(row.astype(np.int32) for row in rows), bounds, batch.sample_ids.numpy())
    return WireBatch(
        b"".join(array.data for array in arrays),
        batch.num_tokens,
        num_axes,
        len(bounds),
        batch.max_seqlen,
        batch.num_loss_tokens,
        batch.source,
        batch.step,
        batch.micro_batch,
        batch.num_patches,
        batch.position_ids.is_floating_point(),
        {
            name: blocks.copied(tensor) if tensor.nbytes <= SMALL else blocks.sendable(tensor)
            for name, tensor in batch.inputs.items()
        },
        {name: tensor.numpy() for name, tensor in batch.token_inputs.items()},
        None if batch.sequences is None else batch.sequences.numpy(),
        batch.left_out,
        batch.repeats,
        batch.holds_one,
    )


def from_wire(wire: WireBatch) -> Batch:
    """Return the batch from the wire."""
    num_tokens, num_bounds, num_rows = wire.num_tokens, wire.num_bounds, 2 + wire.num_axes
    input_ids, labels, position_ids = rows = new_rows(num_tokens)
    input_ids[:], labels[:] = np.frombuffer(wire.payload, np.int32, 2 * num_tokens).reshape(2, -1)
    bounds = np.frombuffer(wire.payload, np.int32, num_bounds, 4 * num_rows * num_tokens).copy()
    position_ids[:] = np.arange(num_tokens)
    position_ids -= np.repeat(bounds[:-1], np.diff(bounds))
    if wire.num_axes:
        rows = rows._replace(position_ids=_with_axes(position_ids, wire))
    batch = to_batch(
        rows,
        bounds,
        np.frombuffer(wire.payload, np.int64, offset=4 * (num_rows * num_tokens + num_bounds)).copy(),
        inputs={name: torch.as_tensor(each) for name, each in wire.inputs.items()},
        token_inputs={name: torch.from_numpy(each) for name, each in wire.token_inputs.items()},
        max_seqlen=wire.max_seqlen,
        num_loss_tokens=wire.num_loss_tokens,
        source=wire.source,
        step=wire.step,
        micro_batch=wire.micro_batch,
    )
    batch.holds_one = wire.holds_one
    if wire.left_out or wire.repeats:
        batch = replace(batch, left_out=wire.left_out, repeats=wire.repeats)
    if wire.sequences is not None:
        batch = replace(batch, sequences=torch.from_numpy(wire.sequences))
    return replace(batch, num_patches=wire.num_patches) if wire.num_patches else batch


def _with_axes(positions: NDArray[np.int64], wire: WireBatch) -> NDArray[Any]:
    """Return positions that restart, int64[1, T], followed by the positions on their own axes."""
    num_tokens, num_axes = wire.num_tokens, wire.num_axes
    number = np.float32 if wire.has_fractions else np.int32
    own = np.frombuffer(wire.payload, number, num_axes * num_tokens, 8 * num_tokens)
    first = positions[None].astype(np.float32 if wire.has_fractions else np.int64)
    return np.concatenate([first, own.reshape(num_axes, 1, num_tokens)])
