"""The shuffled order of an epoch, at any position of it, in memory that does not grow. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 16  # rows of which the whole permutation is kept
_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


class Permutation:
    """A permutation of the numbers 0 <= n < num_rows, chosen by a seed and an epoch; without them it changes nothing.

    >>> sorted(Permutation(5, seed=42, epoch=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]

    Up to SMALL rows it is NumPy's. Beyond, it is a Feistel network over the next power of four, of which numbers that
    are too large are sent through again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, num_rows: int, *, seed: int = 0, epoch: int | None = None):
        self.num_rows = num_rows
        self.epoch = epoch
        self._table: NDArray[np.int64] | None = None
        if epoch is None:
            return
        rng = np.random.default_rng([seed, epoch])
        if num_rows <= SMALL:
            self._table = rng.permutation(num_rows)
        self._keys = rng.integers(0, 1 << 63, _ROUNDS, dtype=np.uint64)
        self._half_bits = np.uint64(((num_rows - 1).bit_length() + 1) // 2)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at these positions: int64, of the same shape (one axis)."""
        if self.epoch is None:
            return positions
        if self._table is not None:
            return self._table[positions]
        rows = self._mix(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(rows >= np.uint64(self.num_rows))):
            rows[outside] = self._mix(rows[outside])
        return rows.astype(np.int64)

    def _mix(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = numbers >> self._half_bits, numbers & mask
        for key in self._keys:
            mixed = right + key
            for multiplier, shift in zip(_MULTIPLIERS, (np.uint64(30), np.uint64(27)), strict=True):
                mixed = (mixed ^ (mixed >> shift)) * multiplier
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        return (left << self._half_bits) | right
