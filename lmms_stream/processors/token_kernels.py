"""The compiled loop that makes packs of tokenized samples straight from their memory-mapped shards."""

# C names are declared in the .pxd.
# mypy: disable-error-code="attr-defined, name-defined"
# ruff: noqa: F821

from __future__ import annotations

import cython
import numpy as np
from cython.cimports.cpython.buffer import (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cython.cimports.libc.stdlib import free, malloc
from numpy.typing import NDArray

from ..errors import ConfigError

FITS, TORN, OTHER_LENGTH, BAD_SPAN = 0, 1, 2, 3  # outcomes of a pack; all but FITS come with a segment's number
_FITS, _TORN, _OTHER_LENGTH, _BAD_SPAN = FITS, TORN, OTHER_LENGTH, BAD_SPAN  # numbers in C
AHEAD = 2  # number of segments that tokens are prefetched ahead
LINE = 64  # bytes of a cache line
MOST_LINES = 64  # that are prefetched of a segment: a page; the CPU prefetches what follows


def _prefetch(address: int) -> None:
    """Prefetch the cache line at an address: reads of samples all over the shards would wait for one line after
    another.
    """
    prefetch(cython.cast(cython.p_void, address))


def _int32(address: int) -> int:
    return cython.cast(cython.pointer[unaligned_int], address)[0]


def _find_values(at: int, stop: int, values: Values) -> bool:
    """Find the int32 values of an MDS array of any shape; return whether the array is whole."""
    if stop - at < 1:
        return False
    kind = cython.cast(cython.p_uchar, at)[0]
    values.address = at + 1 + (kind >> 2) * (1 << (kind & 3))
    values.number = (stop - values.address) // 4
    return values.address <= stop and (stop - values.address) % 4 == 0


class Pack:
    """Arrays of `fill`. samples: the tokens and the loss spans of each segment's sample."""

    def take(self, array: NDArray[np.int64], name: str, number: int, writable: bool) -> NDArray[np.int64]:
        """Return the first of the `number` values of an array, for -1 of any number. A memoryview takes ten times as
        long.
        """
        view = cython.address(self.views[self.num_views])
        flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
        fits = False
        try:
            PyObject_GetBuffer(array, view, flags)
            self.num_views += 1
            fits = view.ndim == 1 and view.itemsize == 8 and view.format[0] in b"lq"
        except (TypeError, ValueError):  # no array, or neither contiguous nor writable
            pass
        if not fits or (number != -1 and view.len != 8 * number):
            expected = "some" if number == -1 else number
            raise ConfigError(
                f"{name} is {getattr(array, 'dtype', type(array))} {getattr(array, 'shape', '')}, expected {expected} "
                f"int64 values, contiguous{' and writable' if writable else ''}"
            )
        return cython.cast(cython.p_longlong, view.buf)

    def __dealloc__(self) -> None:
        for number in range(self.num_views):
            PyBuffer_Release(cython.address(self.views[number]))
        free(self.samples)

    def find(self) -> int:
        """Find the tokens and spans of each sample; return the first sample that is torn, or -1."""
        cython.declare(begin=cython.longlong, at=cython.longlong, ids_at=cython.longlong, spans_at=cython.longlong)
        for segment in range(self.num_segments):
            _prefetch(self.addresses[segment] + 4 * (self.indices[segment] + 1))
        for segment in range(self.num_segments):
            entry = self.addresses[segment] + 4 * (self.indices[segment] + 1)
            begin = cython.cast(cython.uint, _int32(entry))
            self.samples[2 * segment].address = self.addresses[segment] + begin
            self.samples[2 * segment].number = cython.cast(cython.uint, _int32(entry + 4)) - begin
            _prefetch(self.samples[2 * segment].address)
        num_varying = 0
        for column in range(self.num_columns):
            num_varying += 1 if self.column_sizes[column] < 0 else 0
        for segment in range(self.num_segments):
            begin, size = self.samples[2 * segment].address, self.samples[2 * segment].number
            at, varying = 4 * num_varying, 0
            if at > size:
                return segment
            ids_at = ids_stop = spans_at = spans_stop = 0
            for column in range(self.num_columns):
                column_size = self.column_sizes[column]
                if column_size < 0:
                    column_size = cython.cast(cython.uint, _int32(begin + 4 * varying))
                    varying += 1
                if column == self.ids_column:
                    ids_at, ids_stop = at, at + column_size
                if column == self.spans_column:
                    spans_at, spans_stop = at, at + column_size
                at += column_size
            if (
                at != size
                or not _find_values(begin + ids_at, begin + ids_stop, self.samples + 2 * segment)
                or not _find_values(begin + spans_at, begin + spans_stop, self.samples + 2 * segment + 1)
                or self.samples[2 * segment + 1].number % 2
            ):
                return segment
        return -1

    def fill(self) -> int:
        """Write the segments; return the outcome, and set `segment` and `value`."""
        cython.declare(write=cython.longlong, last=cython.longlong, bounds=cython.longlong, stop=cython.longlong)
        self.segment, self.value, write = self.find(), 0, 0
        if self.segment >= 0:
            return _TORN
        for segment in range(self.num_segments):
            start, length, num_tokens = self.starts[segment], self.lengths[segment], self.samples[2 * segment].number
            self.segment, self.value, ids = segment, num_tokens, self.input_ids + write
            if (
                (self.expected[segment] >= 0 and self.expected[segment] != num_tokens)
                or start + length > num_tokens
                or write + length > self.row_length
            ):
                return _OTHER_LENGTH
            if segment + AHEAD < self.num_segments:
                following = self.samples[2 * (segment + AHEAD)].address + 4 * self.starts[segment + AHEAD]
                for line in range(min((4 * self.lengths[segment + AHEAD] + LINE - 1) // LINE, MOST_LINES)):
                    _prefetch(following + line * LINE)
            # The first token of a segment is not trained on: no token before it predicts it.
            first, stop, last = 1, 1, 0
            bounds, num_spans = self.samples[2 * segment + 1].address, self.samples[2 * segment + 1].number // 2
            for span in range(num_spans):
                span_start, span_stop = _int32(bounds + 8 * span), _int32(bounds + 8 * span + 4)
                if not (0 <= span_start < span_stop <= num_tokens and last <= span_start):
                    self.value = span
                    return _BAD_SPAN
                last = span_start
            if num_spans:
                first = min(max(_int32(bounds) - start, 1), length)
                stop = min(max(_int32(bounds + 4) - start, first), length)
            write_segment(
                cython.cast(cython.p_void, self.samples[2 * segment].address + 4 * start), length, first, stop,
                self.ignored_label, ids, self.labels + write, self.position_ids + write,
            )  # fmt: skip
            self.num_loss_tokens[segment] = stop - first
            for span in range(1, num_spans):
                from_token = min(max(_int32(bounds + 8 * span) - start, stop), length)
                stop = min(max(_int32(bounds + 8 * span + 4) - start, from_token), length)
                for n in range(from_token, stop):
                    self.labels[write + n] = ids[n]
                self.num_loss_tokens[segment] += stop - from_token
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
    pack = Pack()
    pack.addresses = pack.take(addresses, "addresses", -1, False)
    pack.num_segments = pack.views[0].len // 8
    pack.indices = pack.take(indices, "indices", pack.num_segments, False)
    pack.starts = pack.take(starts, "starts", pack.num_segments, False)
    pack.lengths = pack.take(lengths, "lengths", pack.num_segments, False)
    pack.expected = pack.take(expected, "expected", pack.num_segments, False)
    pack.num_loss_tokens = pack.take(num_loss_tokens, "num_loss_tokens", pack.num_segments, True)
    pack.column_sizes = pack.take(column_sizes, "column_sizes", -1, False)
    pack.num_columns = pack.views[6].len // 8
    pack.input_ids = pack.take(input_ids, "input_ids", -1, True)
    pack.row_length = pack.views[7].len // 8
    pack.labels = pack.take(labels, "labels", pack.row_length, True)
    pack.position_ids = pack.take(position_ids, "position_ids", pack.row_length, True)
    pack.ids_column, pack.spans_column, pack.ignored_label = ids_column, spans_column, ignored_label
    pack.samples = cython.cast(cython.pointer[Values], malloc(2 * pack.num_segments * cython.sizeof(Values) + 1))
    if pack.samples is cython.NULL:
        raise MemoryError(f"{pack.num_segments} segments of a pack")
    with cython.nogil:
        outcome = pack.fill()
    return outcome, pack.segment, pack.value
