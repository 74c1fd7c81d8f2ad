"""Consecutive packs of a plan as arrays. numbers of packs -> [pack range] -> their segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRange:
    """Some packs, one after another.

    sample_ids: int64[num_segments], global sample ids, pack after pack.
    starts: int64[num_segments], the token of its sample that each segment begins with (0 unless samples are split).
    lengths: int64[num_segments], tokens that each segment takes in its pack.
    offsets: int64[num_packs + 1]; pack p holds segments [offsets[p], offsets[p + 1]).
    canonical_nodes: int64[num_packs], the canonical node that each pack comes from.
    sources: int64[num_packs], the number of each pack's source (0 in a plan of one source).
    patches: int64[num_packs], what each pack gives to the tower of its media; None where no source has media.
    epochs: int64[num_packs], the epoch of its source that each pack is of; None where that is not told.
    """

    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]
    canonical_nodes: NDArray[np.int64]
    sources: NDArray[np.int64]
    patches: NDArray[np.int64] | None = None
    epochs: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, numbers: NDArray[np.int64]) -> PackRange:
        """The packs of these numbers, counted from the first one here, in this order."""
        counts = np.diff(self.offsets)[numbers]
        segments = runs(self.offsets[numbers], counts)
        return PackRange(
            sample_ids=self.sample_ids[segments],
            starts=self.starts[segments],
            lengths=self.lengths[segments],
            offsets=ends_of(counts),
            canonical_nodes=self.canonical_nodes[numbers],
            sources=self.sources[numbers],
            patches=None if self.patches is None else self.patches[numbers],
            epochs=None if self.epochs is None else self.epochs[numbers],
        )


def no_packs(*, has_media: bool) -> PackRange:
    """Return a range of no packs; its patches are an empty array with media, None without."""
    none = np.empty(0, np.int64)
    return PackRange(
        sample_ids=none,
        starts=none,
        lengths=none,
        offsets=np.zeros(1, np.int64),
        canonical_nodes=none,
        sources=none,
        patches=none if has_media else None,
    )


def ends_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of some runs begins when they lie one after another, and where the last one ends.

    >>> ends_of(np.array([3, 2]))
    array([0, 3, 5])
    """
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def runs(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers [begin, begin + count) of each run, one run after another.

    >>> runs(np.array([5, 20]), np.array([3, 2]))
    array([ 5,  6,  7, 20, 21])
    """
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(begins - ends + counts, counts)
    return numbers
