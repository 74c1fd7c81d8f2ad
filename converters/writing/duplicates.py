"""Samples whose content came before. hashes, in order -> which of them are new. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]  # [n, 2]: the halves of 128 bits
_RATIO = 4  # a run is joined with the one before it unless that is so many times as long


class Seen:
    """The hashes of all samples so far, in sorted runs: 16 bytes each, and for a moment 56 while two runs are joined.

    Among n samples, two that differ have the same hash with a probability of n^2 / 2^129: for 10^9 of them, 10^-21.
    """

    def __init__(self) -> None:
        self._runs: list[
            tuple[NDArray[np.uint64], NDArray[np.uint64]]
        ] = []  # halves, sorted by the first; long to short

    def add(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these are the first of their content, bool[n]; they are known from then on. hashes: uint64[n, 2]."""
        high, low = hashes[:, 0], hashes[:, 1]
        order = np.lexsort((low, high))  # keeps the order of equal ones
        high, low = high[order], low[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        for run in self._runs:
            is_new &= ~_holds(run, high, low)
        if is_new.any():
            self._keep(high[is_new], low[is_new])
        is_first = np.zeros(len(order), bool)
        is_first[order[is_new]] = True
        return is_first

    def _keep(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> None:
        while self._runs and len(self._runs[-1][0]) < _RATIO * len(high):
            before_high, before_low = self._runs.pop()
            high, low = np.concatenate([before_high, high]), np.concatenate([before_low, low])
            order = np.argsort(high, kind="stable")  # which finds the two runs, and only merges them
            high, low = high[order], low[order]
        self._runs.append((high, low))


def _holds(
    run: tuple[NDArray[np.uint64], NDArray[np.uint64]], high: NDArray[np.uint64], low: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Whether a run holds each of these hashes."""
    at = np.searchsorted(run[0], high)
    inside = np.minimum(at, len(run[0]) - 1)
    same_high = run[0][inside] == high
    found: NDArray[np.bool_] = same_high & (run[1][inside] == low)
    for index in np.flatnonzero(same_high & ~found):  # another one may have the same first half
        stop = np.searchsorted(run[0], high[index], side="right")
        found[index] = bool((run[1][at[index] : stop] == low[index]).any())
    return found
