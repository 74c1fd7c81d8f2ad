"""IndexManager: an epoch, the order of its rows, and the position reached by batches. Pure."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from numbers import Integral
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...checks import whole_number
from ...errors import ConfigError, CursorError, DataError


class IndexManager:
    """Cursor of a dataset of total_size rows, with Relax's names.

    shuffle: give each epoch its own order; False keeps the order of the rows. order, last: see Permutation.
    """

    def __init__(
        self,
        total_size: int,
        seed: int = 42,
        *,
        shuffle: bool = True,
        order: Order = "own",
        last: NDArray[np.int64] | None = None,
    ):
        if order not in ORDERS:
            raise ConfigError(f"order must be {' or '.join(map(repr, ORDERS))}, got {order!r}")
        self.total_size = total_size
        self.seed = seed
        self.order = order
        self.last = last
        self._orders: dict[str, Permutation] = {}  # the last two: this epoch's and the next epoch's
        self.begin(0, is_shuffled=shuffle)

    def begin(self, epoch_id: int, *, is_shuffled: bool, position: int = 0) -> None:
        """Move to a position of an epoch."""
        self.check(epoch_id, position)
        self.current_epoch = epoch_id
        self.is_shuffled = is_shuffled
        self.position = position  # rows of the epoch passed by batches
        self.permutation = self.of_epoch(epoch_id)

    def check(self, epoch_id: Any, position: Any) -> None:
        """Raise CursorError for a position outside the epoch, and for an epoch that is no number from 0 on."""
        are_numbers = isinstance(position, Integral) and isinstance(epoch_id, Integral)
        if not are_numbers or not 0 <= position <= self.total_size or not 0 <= epoch_id < MAX_EPOCHS:
            raise CursorError(
                f"the state's position is row {position} of epoch {epoch_id}, which does not exist ({self.total_size} "
                "rows): it is damaged, or belongs to other data; load another state, or start over"
            )

    def of_epoch(self, epoch_id: int) -> Permutation:
        """Return the order of any epoch."""
        name, epoch = self.name_of(epoch_id), epoch_id if self.is_shuffled else None
        if name not in self._orders:
            made = Permutation(self.total_size, seed=self.seed, epoch=epoch, order=self.order, last=self.last)
            self._orders = dict([*self._orders.items()][-1:]) | {name: made}
        return self._orders[name]

    def name_of(self, epoch_id: int) -> str:
        """Return the name of an epoch's order; equal names mean equal orders."""
        return f"{self.order} {'' if self.last is None else len(self.last)} {epoch_id if self.is_shuffled else ''}"

    @property
    def indices(self) -> list[int]:
        """Rows of the epoch in order."""
        return [*map(int, self.permutation.between(0, self.total_size))]

    def shuffle(self, epoch_id: int) -> None:
        """Begin an epoch in the order determined by seed and epoch; do nothing if this shuffled epoch is current."""
        epoch_id = whole_number("an epoch's number", epoch_id, least=0)
        if not self.is_shuffled or epoch_id != self.current_epoch:
            self.begin(epoch_id, is_shuffled=True)

    def reset(self, position: int = 0, epoch_id: int = 0) -> None:
        """Move to a position of a shuffled epoch."""
        self.begin(epoch_id, is_shuffled=True, position=position)

    def next_epoch(self) -> None:
        self.begin(self.current_epoch + 1, is_shuffled=self.is_shuffled)

    def get_next_indices(self, n: int) -> tuple[list[int], bool]:
        """Return the next n rows, and whether they passed the end of an epoch."""
        if n > 0 and not self.total_size:
            raise DataError("there are no rows: check the path and its slices")
        found: list[int] = []
        crossed = False
        while len(found) < n:
            if self.position == self.total_size:
                self.next_epoch()
                crossed = True
            stop = min(self.position + n - len(found), self.total_size)
            found += self.permutation.between(self.position, stop).tolist()
            self.position = stop
        return found, crossed

    def get_state(self) -> dict[str, int]:
        return {"epoch_id": self.current_epoch, "position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of get_state; keep is_shuffled. CursorError for an invalid state."""
        try:
            position, epoch_id = index(state["position"]), index(state["epoch_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(
                f"the state is not an IndexManager's ({error!r}): pass the result of get_state"
            ) from error
        self.begin(epoch_id, is_shuffled=self.is_shuffled, position=position)


# The shuffled order of an epoch, at any position, in constant memory. Pure.

SMALL = 1 << 16  # up to this number of rows, the full permutation is kept
MAX_EPOCHS = 1 << 31
BLOCK = 4096  # positions whose rows are computed together during a pass through an epoch
_ROUNDS = 8
Order = Literal["own", "relax"]
ORDERS: tuple[Order, ...] = ("own", "relax")
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # multipliers of splitmix64


class Permutation:
    """Permutation of the numbers 0 <= n < num_rows, chosen by a seed and an epoch; the identity without an epoch.
    >>> sorted(Permutation(5, seed=42, epoch=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]

    Up to SMALL rows it is NumPy's permutation. Beyond, it is a Feistel network over the next power of four; numbers >=
    num_rows pass through the network again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). order
    "relax": Relax's permutation, Python's `random.shuffle` seeded with seed + epoch; 8 bytes a row. last: rows left
    unshuffled at the end, such as rows dropped by Relax's eager dataset before it shuffles.
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
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))  # number and rows of the last block
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
        """Return the rows at these positions: int64, same shape (one axis)."""
        if self.epoch is None:
            return positions
        if self._table is not None:
            return self._table[positions]
        rows = self._mix(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(rows >= np.uint64(self.num_rows))):
            rows[outside] = self._mix(rows[outside])
        return rows.astype(np.int64)

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows at positions start <= position < stop: faster than a call for small ranges."""
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
