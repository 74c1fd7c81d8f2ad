"""Samples and where their bytes lie, as arrays that are cut, put in another order and joined. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def inner_numbers(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of things in groups of so many, from 0 in each.

    >>> inner_numbers(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class LossSpans:
    """What is learnt of documents. counts: int64[n], of each. bounds: int32[k, 2], tokens [start, stop) of their own
    documents, in the documents' order.
    """

    counts: NDArray[np.int64]
    bounds: NDArray[np.int32]

    @staticmethod
    def of(documents: Sequence[NDArray[np.int32]]) -> LossSpans:
        """documents: what is learnt of each, int32[k, 2]."""
        bounds = np.concatenate(documents) if documents else np.empty((0, 2), np.int32)
        return LossSpans(np.array([len(each) for each in documents], np.int64), bounds)

    @staticmethod
    def joined(parts: Sequence[LossSpans]) -> LossSpans:
        return LossSpans(
            np.concatenate([each.counts for each in parts]), np.concatenate([each.bounds for each in parts])
        )

    def taken(self, numbers: NDArray[np.int64]) -> LossSpans:
        """Those of documents of these numbers, in their order."""
        counts = self.counts[numbers]
        firsts = (np.cumsum(self.counts) - self.counts)[numbers]
        return LossSpans(counts, self.bounds[np.repeat(firsts, counts) + inner_numbers(counts)])


@dataclass(frozen=True, slots=True)
class Laid:
    """Samples, or documents that samples are made of, in order.

    samples: int64[n, 4]: unit, first byte in it, size, and the packed row of its source. lengths: as in EncodedUnit,
    None where nothing measures them. spans: of documents. not_shown: as in EncodedUnit.
    """

    samples: NDArray[np.int64]
    lengths: NDArray[np.uint32] | None
    spans: LossSpans | None = None
    not_shown: NDArray[np.uint32] | None = None

    def taken(self, numbers: NDArray[np.int64]) -> Laid:
        """Those of these numbers, in their order."""
        return Laid(
            self.samples[numbers],
            None if self.lengths is None else self.lengths[numbers],
            None if self.spans is None else self.spans.taken(numbers),
            None if self.not_shown is None else self.not_shown[numbers],
        )

    @staticmethod
    def joined(parts: Sequence[Laid]) -> Laid:
        """All of them, one part after another."""
        lengths = [part.lengths for part in parts if part.lengths is not None]
        spans = [part.spans for part in parts if part.spans is not None]
        not_shown = [part.not_shown for part in parts if part.not_shown is not None]
        return Laid(
            np.concatenate([part.samples for part in parts]),
            np.concatenate(lengths) if lengths else None,
            LossSpans.joined(spans) if spans else None,
            np.concatenate(not_shown) if not_shown else None,
        )
