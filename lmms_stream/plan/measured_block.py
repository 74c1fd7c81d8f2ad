"""A shuffle block of which samples are measured as they are needed. sample ids + measure -> [this] -> segments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import PackingError
from .packing import MAX_LENGTH, BlockSegments, PackingConfig, cut_overlong

UNMEASURED = -1  # the tokens of a sample that has no length: it takes no room, as if the dataset did not have it

# sample ids -> tokens of each, or UNMEASURED, int64[n]; where the dataset may have media, tokens and patches of each,
# int64[n, 2]
Measure = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSegments:
    """The segments of one window.

    samples: indices in the block. expected, patches: of each segment's sample, as measured. lengths: tokens of each
    segment. pieces: 0 unless samples are split. The window after it begins with piece next_piece of sample
    next_sample, which is one past the last at the end of the block. num_overlong: samples longer than a pack that
    have their first piece in the window.
    """

    samples: NDArray[np.int64]
    expected: NDArray[np.int64]
    patches: NDArray[np.int64]
    lengths: NDArray[np.int32]
    pieces: NDArray[np.int64]
    next_sample: int
    next_piece: int
    num_overlong: int


class MeasuredBlock:
    """A shuffle block whose samples are measured as they are needed, from its sample `first` on."""

    def __init__(self, sample_ids: NDArray[np.int64], first: int, *, packing: PackingConfig, measure: Measure):
        self.sample_ids = sample_ids
        self._packing = packing
        self._measure = measure
        self._lengths = np.zeros(len(sample_ids), np.int32)
        self._patches: NDArray[np.int64] | None = None  # where measuring tells them
        self._num_measured = first

    def window(self, sample: int, piece: int) -> WindowSegments:
        """The window that begins with a piece of a sample; measures what it lacks."""
        num_segments = self._packing.samples_at_once or sys.maxsize
        stop = piece + num_segments
        while True:
            # One more is needed, as samples may take no room, to know whether the window is the last of the block.
            enough = stop + 1
            segments = self._segments(sample)
            if len(segments.lengths) >= enough or self._num_measured == len(self.sample_ids):
                break
            self._measure_next(enough - len(segments.lengths))
        samples = segments.positions.astype(np.int64) + sample
        pieces = np.zeros_like(samples) if segments.pieces is None else segments.pieces.astype(np.int64)
        following = self._num_measured, 0
        if len(samples) > stop:
            following = int(samples[stop]), int(pieces[stop])
        mine = samples[piece:stop]
        met = self._lengths[sample + (piece > 0) : following[0] + (following[1] > 0)]
        return WindowSegments(
            samples=mine,
            expected=self._lengths[mine].astype(np.int64),
            patches=np.zeros_like(mine) if self._patches is None else self._patches[mine],
            lengths=segments.lengths[piece:stop],
            pieces=pieces[piece:stop],
            next_sample=following[0],
            next_piece=following[1],
            num_overlong=int(np.count_nonzero(met > self._packing.packing_length)),
        )

    def _segments(self, first: int) -> BlockSegments:
        """What is packed of the measured samples from `first` on, which positions count from."""
        lengths = self._lengths[first : self._num_measured]
        has_media = None if self._patches is None else self._patches[first : self._num_measured] > 0
        measured = np.flatnonzero(lengths != UNMEASURED).astype(np.int32)
        if len(measured) == len(lengths):
            return cut_overlong(lengths, config=self._packing, has_media=has_media)
        has_media = None if has_media is None else has_media[measured]
        segments = cut_overlong(lengths[measured], config=self._packing, has_media=has_media)
        return replace(segments, positions=measured[segments.positions])

    def _measure_next(self, count: int) -> None:
        """Measure up to `count` more samples, and check that they can be packed."""
        ids = self.sample_ids[self._num_measured : self._num_measured + count]
        measured = np.asarray(self._measure(ids))
        lengths = measured[:, 0] if measured.ndim == 2 else measured
        if lengths.shape != ids.shape:
            raise PackingError(f"measure gave {lengths.size} lengths for {len(ids)} samples: it must give one for each")
        limit = self._packing.packing_length
        for wrong, explanation in (
            ((lengths < 1) & (lengths != UNMEASURED), "a sample must have at least one token"),
            (lengths > MAX_LENGTH, f"a sample may have up to {MAX_LENGTH} tokens"),
            (
                (lengths > limit) & (self._packing.overlong == "error"),
                f"it is longer than packing_length {limit}; raise packing_length, or set overlong to drop, truncate, "
                "split or keep",
            ),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                raise PackingError(f"sample {ids[at]} has length {lengths[at]}: {explanation}")
        here = slice(self._num_measured, self._num_measured + len(ids))
        self._lengths[here] = lengths
        if measured.ndim == 2:
            self._patches = np.zeros(len(self.sample_ids), np.int64) if self._patches is None else self._patches
            self._patches[here] = measured[:, 1]
        self._num_measured += len(ids)
