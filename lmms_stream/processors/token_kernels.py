"""The compiled loop that makes packs of tokenized samples straight from their memory-mapped shards."""

from __future__ import annotations

import cython
import numpy as np
from numpy.typing import NDArray

FITS, TORN, OTHER_LENGTH, BAD_SPAN = 0, 1, 2, 3  # outcomes of a pack; all but FITS come with a segment's number
_FITS, _TORN, _OTHER_LENGTH, _BAD_SPAN = FITS, TORN, OTHER_LENGTH, BAD_SPAN  # numbers in C
AHEAD = 2  # number of segments that tokens are prefetched ahead
LINE = 64  # bytes of a cache line


def _prefetch(address: int) -> None:
    """Prefetch the cache line at an address: reads of samples all over the shards would wait for one line after
    another.
    """
    prefetch(cython.cast(cython.p_void, address))  # type: ignore[name-defined]  # noqa: F821 (of the .pxd)


def _uint32(address: int) -> int:
    data = cython.cast(cython.p_uchar, address)
    high = cython.cast(cython.longlong, data[3])
    return data[0] | data[1] << 8 | data[2] << 16 | high << 24


def _int32(address: int) -> int:
    return cython.cast(cython.int, _uint32(address))


class Samples:
    """Tokens and loss spans of the samples of a pack's segments; arguments: see `fill`.

    found: int64[segments, 4], address of tokens, their number, address of the bounds of spans, their number.
    """

    def __init__(self, addresses: NDArray[np.int64], indices: NDArray[np.int64], column_sizes: NDArray[np.int64],
                 ids_column: int, spans_column: int):
        self.addresses, self.indices, self.column_sizes = addresses, indices, column_sizes
        self.ids_column, self.spans_column = ids_column, spans_column
        self.found = np.empty((len(indices), 4), np.int64)

    def find_array(self, segment: int, column: int, at: int, stop: int) -> bool:
        """Find the int32 values of an MDS array of any shape; return whether it is whole."""
        if stop - at < 1:
            return False
        data = cython.cast(cython.p_uchar, at)
        first = at + 1 + (data[0] >> 2) * (1 << (data[0] & 3))
        self.found[segment, column], self.found[segment, column + 1] = first, (stop - first) // 4
        return first <= stop and (stop - first) % 4 == 0

    def find(self) -> int:
        """Find the tokens and spans of each sample; return the first sample that is torn, or -1."""
        cython.declare(begin=cython.longlong, size=cython.longlong, ids_at=cython.longlong, spans_at=cython.longlong)
        for segment in range(len(self.indices)):
            _prefetch(self.addresses[segment] + 4 * (self.indices[segment] + 1))
        for segment in range(len(self.indices)):
            entry = self.addresses[segment] + 4 * (self.indices[segment] + 1)
            self.found[segment, 0], self.found[segment, 1] = _uint32(entry), _uint32(entry + 4)
            _prefetch(self.addresses[segment] + self.found[segment, 0])
        num_columns, num_varying = len(self.column_sizes), 0
        for column in range(num_columns):
            num_varying += 1 if self.column_sizes[column] < 0 else 0
        for segment in range(len(self.indices)):
            begin = self.addresses[segment] + self.found[segment, 0]
            size = self.found[segment, 1] - self.found[segment, 0]
            at = cython.cast(cython.longlong, 4 * num_varying)
            if at > size:
                return segment
            ids_at = ids_stop = spans_at = spans_stop = varying = 0
            for column in range(num_columns):
                column_size = self.column_sizes[column]
                if column_size < 0:
                    column_size = _uint32(begin + 4 * varying)
                    varying += 1
                if column == self.ids_column:
                    ids_at, ids_stop = at, at + column_size
                if column == self.spans_column:
                    spans_at, spans_stop = at, at + column_size
                at += column_size
            if (
                at != size
                or not self.find_array(segment, 0, begin + ids_at, begin + ids_stop)
                or not self.find_array(segment, 2, begin + spans_at, begin + spans_stop)
                or self.found[segment, 3] % 2
            ):
                return segment
        return -1


class Rows:
    """Rows of a pack to fill; see `fill`."""

    def __init__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], expected: NDArray[np.int64],
                 ignored_label: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64],
                 position_ids: NDArray[np.int64], num_loss_tokens: NDArray[np.int64]):
        self.starts, self.lengths, self.expected, self.ignored_label = starts, lengths, expected, ignored_label
        self.input_ids, self.labels, self.position_ids = input_ids, labels, position_ids
        self.num_loss_tokens, self.segment, self.value = num_loss_tokens, 0, 0

    def write(self, at: int, tokens: int, length: int, first: int, stop: int) -> None:
        """Write the tokens of a segment from `at` on; of these, [first, stop) are trained on."""
        ids, labels = cython.address(self.input_ids[at]), cython.address(self.labels[at])
        positions, ignored = cython.address(self.position_ids[at]), self.ignored_label
        data = cython.cast(cython.p_int, tokens)
        for n in range(length):
            ids[n] = data[n]
            positions[n] = n
            labels[n] = data[n] if first <= n and n < stop else ignored

    def fill(self, samples: Samples) -> int:
        """Write the segments; return the outcome, and set `segment` and `value`."""
        cython.declare(write=cython.longlong, span_start=cython.longlong, span_stop=cython.longlong,
                       last=cython.longlong, num_tokens=cython.longlong, bounds=cython.longlong, stop=cython.longlong)
        self.segment, count, write = samples.find(), len(self.starts), 0
        if self.segment >= 0:
            return _TORN
        for segment in range(count):
            self.segment = segment
            start, length, num_tokens = self.starts[segment], self.lengths[segment], samples.found[segment, 1]
            self.value = num_tokens
            if (0 <= self.expected[segment] and self.expected[segment] != num_tokens) or (
                start + length > num_tokens or write + length > len(self.input_ids)
            ):
                return _OTHER_LENGTH
            if segment + AHEAD < count:
                following = samples.found[segment + AHEAD, 0] + 4 * self.starts[segment + AHEAD]
                for line in range((4 * self.lengths[segment + AHEAD] + LINE - 1) // LINE):
                    _prefetch(following + line * LINE)
            # The first token of a segment is not trained on: no token before it predicts it.
            first, stop, bounds, last = 1, 1, samples.found[segment, 2], 0
            num_spans = samples.found[segment, 3] // 2
            for span in range(num_spans):
                span_start, span_stop = _int32(bounds + 8 * span), _int32(bounds + 8 * span + 4)
                if not (0 <= span_start < span_stop <= num_tokens and last <= span_start):
                    self.value = span
                    return _BAD_SPAN
                last = span_start
            if num_spans:
                first = min(max(_int32(bounds) - start, 1), length)
                stop = min(max(_int32(bounds + 4) - start, first), length)
            self.write(write, samples.found[segment, 0] + 4 * start, length, min(first, length), min(stop, length))
            num_learnt = stop - first
            for span in range(1, num_spans):
                from_token = min(max(_int32(bounds + 8 * span) - start, stop), length)
                stop = min(max(_int32(bounds + 8 * span + 4) - start, from_token), length)
                for n in range(from_token, stop):
                    self.labels[write + n] = self.input_ids[write + n]
                num_learnt += stop - from_token
            self.num_loss_tokens[segment] = num_learnt
            write += length
        self.segment = self.value = 0
        return _FITS


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
    samples = Samples(addresses, indices, column_sizes, ids_column, spans_column)
    rows = Rows(starts, lengths, expected, ignored_label, input_ids, labels, position_ids, num_loss_tokens)
    with cython.nogil:
        outcome = rows.fill(samples)
    return outcome, rows.segment, rows.value
