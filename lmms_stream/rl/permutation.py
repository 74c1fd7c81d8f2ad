"""The shuffled order of an epoch, at any position of it, in memory that does not grow. Pure."""

from __future__ import annotations

import random
from array import array
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 16  # rows of which the whole permutation is kept
BLOCK = 4096  # positions whose rows are found together, for those who go through an epoch
_ROUNDS = 8
Order = Literal["own", "relax"]
ORDERS: tuple[Order, ...] = ("own", "relax")
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


class Permutation:
    """A permutation of the numbers 0 <= n < num_rows, chosen by a seed and an epoch; without them it changes nothing.

    >>> sorted(Permutation(5, seed=42, epoch=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]

    Up to SMALL rows it is NumPy's. Beyond, it is a Feistel network over the next power of four, of which numbers that
    are too large are sent through again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    order "relax": Relax's permutation, which is `random.shuffle` of Python's by seed + epoch; 8 bytes a row.
    last: rows that are not shuffled and come last, as those that Relax's eager dataset has dropped before it shuffles.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int = 0,
        epoch: int | None = None,
        order: Order = "own",
        last: NDArray[np.int64] | None = None,
    ):
        self.num_rows = num_rows
        self.epoch = epoch
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))  # the last, by its number
        self._table: NDArray[np.int64] | None = None
        if epoch is None:
            return
        if order == "relax":
            self._table = _relax_table(num_rows, seed + epoch, np.zeros(0, np.int64) if last is None else last)
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

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows at positions start <= position < stop: what a call gives, in a part of the time."""
        if self.epoch is None or self._table is not None or stop - start > BLOCK:
            return self(np.arange(start, stop))
        found = []
        while start < stop:
            number, first = divmod(start, BLOCK)
            last = min(first + stop - start, BLOCK)
            found.append(self._rows_of_block(number)[first:last])
            start += last - first
        return np.concatenate(found) if len(found) != 1 else found[0]

    def _rows_of_block(self, number: int) -> NDArray[np.int64]:
        held, rows = self._block
        if held != number:
            rows = self(np.arange(number * BLOCK, min((number + 1) * BLOCK, self.num_rows)))
            self._block = number, rows
        return rows

    def _mix(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = numbers >> self._half_bits, numbers & mask
        for key in self._keys:
            mixed = right + key
            for multiplier, shift in zip(_MULTIPLIERS, (np.uint64(30), np.uint64(27)), strict=True):
                mixed = (mixed ^ (mixed >> shift)) * multiplier
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        return (left << self._half_bits) | right


def _relax_table(num_rows: int, seed: int, last: NDArray[np.int64]) -> NDArray[np.int64]:
    first = np.delete(np.arange(num_rows), last)
    numbers = array("q", range(len(first)))
    random.Random(seed).shuffle(numbers)
    return np.concatenate([first[np.frombuffer(numbers, np.int64)], last])
