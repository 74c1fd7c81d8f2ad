"""The compiled loop that makes packs of tokenized samples straight from their memory-mapped shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..versions.numba import compiled

FITS, TORN, OTHER_LENGTH, BAD_SPAN = 0, 1, 2, 3  # outcomes of a pack; all but FITS come with a segment's number
AHEAD = 2  # number of segments that tokens are prefetched ahead
LINE = 64  # bytes of a cache line


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Convert the address of a file's bytes in this process's memory to a pointer for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uintp), generate


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address: reads of samples all over the shards would wait for one line after
    another.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # for reading, to stay in all caches, data
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@njit(inline="always")
def _uint32(data: NDArray[np.uint8], at: int) -> np.int64:
    return (
        np.int64(data[at]) | np.int64(data[at + 1]) << 8 | np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24
    )


@njit(inline="always")
def _array(data: NDArray[np.uint8], at: int, stop: int) -> tuple[int, int]:
    """First byte and number of the int32 values of an MDS array of any shape; number -1 if it is torn."""
    if stop - at < 1:
        return at, -1
    first = at + 1 + (np.int64(data[at]) >> 2) * (np.int64(1) << (np.int64(data[at]) & 3))
    return (first, (stop - first) // 4) if first <= stop and (stop - first) % 4 == 0 else (at, -1)


@compiled
def _find(
    addresses: NDArray[np.int64],
    indices: NDArray[np.int64],
    column_sizes: NDArray[np.int64],
    ids_column: int,
    spans_column: int,
    found: NDArray[np.int64],
) -> int:
    """Find the tokens and spans of each sample: rows (address of tokens, their number, address of bounds, their
    number).

    Return the first sample that is torn, or -1.
    """
    for segment in range(len(indices)):
        _prefetch(addresses[segment] + 4 * (indices[segment] + 1))
    for segment in range(len(indices)):
        offsets = carray(_pointer(addresses[segment]), (4 * (indices[segment] + 3),), np.uint8)
        found[segment, 0] = _uint32(offsets, 4 * (indices[segment] + 1))
        found[segment, 1] = _uint32(offsets, 4 * (indices[segment] + 2))
        _prefetch(addresses[segment] + found[segment, 0])
    num_varying = 0
    for column_size in column_sizes:
        num_varying += column_size < 0
    for segment in range(len(indices)):
        address = addresses[segment] + found[segment, 0]
        size = found[segment, 1] - found[segment, 0]
        data = carray(_pointer(address), (size,), np.uint8)
        at = np.int64(4 * num_varying)
        if at > size:
            return segment
        ids_at = ids_stop = spans_at = spans_stop = np.int64(0)
        varying = 0
        for column in range(len(column_sizes)):
            column_size = column_sizes[column]
            if column_size < 0:
                column_size = _uint32(data, 4 * varying)
                varying += 1
            if column == ids_column:
                ids_at, ids_stop = at, at + column_size
            if column == spans_column:
                spans_at, spans_stop = at, at + column_size
            at += column_size
        if at != size:
            return segment
        first, num_tokens = _array(data, ids_at, ids_stop)
        first_bound, num_bounds = _array(data, spans_at, spans_stop)
        if num_tokens < 0 or num_bounds < 0 or num_bounds % 2:
            return segment
        found[segment, 0], found[segment, 1] = address + first, num_tokens
        found[segment, 2], found[segment, 3] = address + first_bound, num_bounds
    return -1


@compiled
def fill(
    addresses: NDArray[np.int64],
    indices: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    expected: NDArray[np.int64],
    column_sizes: NDArray[np.int64],
    ids_column: int,
    spans_column: int,
    ignored_label: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    num_loss_tokens: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Write the segments one after another into the three rows; loss spans ascend (they may overlap).

    Segment s is the tokens [starts[s], starts[s] + lengths[s]) of sample indices[s] of the shard at addresses[s]. The
    sample must have expected[s] tokens; for -1, any sufficient number. column_sizes: bytes of each column of a sample,
    -1 if they vary. The shards' offsets are checked at opening; the sizes in a sample are checked here. Return the
    outcome, the segment that does not fit, and a value about it; num_loss_tokens is filled for each segment. Tokens
    need no alignment on the CPUs that NumPy supports.
    """
    found = np.empty((len(indices), 4), np.int64)
    torn = _find(addresses, indices, column_sizes, ids_column, spans_column, found)
    if torn >= 0:
        return TORN, torn, 0
    write = 0
    for segment in range(len(indices)):
        start, length, num_tokens = starts[segment], lengths[segment], found[segment, 1]
        other = 0 <= expected[segment] != num_tokens
        if other or start + length > num_tokens or write + length > len(input_ids):
            return OTHER_LENGTH, segment, num_tokens
        tokens = carray(_pointer(found[segment, 0] + 4 * start), (length,), np.int32)
        bounds = carray(_pointer(found[segment, 2]), (found[segment, 3],), np.int32)
        if segment + AHEAD < len(indices):
            following = found[segment + AHEAD, 0] + 4 * starts[segment + AHEAD]
            for line in range(0, 4 * lengths[segment + AHEAD], LINE):
                _prefetch(following + line)
        ids_row = input_ids[write : write + length]
        label_row = labels[write : write + length]
        position_row = position_ids[write : write + length]
        # The first token of a segment is not trained on: no token before it predicts it.
        first, stop = np.int64(1), np.int64(1)
        for bound in range(0, len(bounds), 2):
            span_start, span_stop = np.int64(bounds[bound]), np.int64(bounds[bound + 1])
            ascends = bound == 0 or bounds[bound - 2] <= bounds[bound]
            if not (0 <= span_start < span_stop <= num_tokens and ascends):
                return BAD_SPAN, segment, bound // 2
            if bound == 0:
                first = min(max(span_start - start, first), length)
                stop = min(max(span_stop - start, first), length)
        for n in range(length):
            token = np.int64(tokens[n])
            ids_row[n] = token
            position_row[n] = n
            label_row[n] = token if first <= n and n < stop else ignored_label
        num_learnt = stop - first
        for bound in range(2, len(bounds), 2):
            from_token = min(max(np.int64(bounds[bound]) - start, stop), length)
            stop = min(max(np.int64(bounds[bound + 1]) - start, from_token), length)
            for n in range(from_token, stop):
                label_row[n] = tokens[n]
            num_learnt += stop - from_token
        num_loss_tokens[segment] = num_learnt
        write += length
    return FITS, 0, 0
