"""Which epoch each iteration of a dataset is, told alike to all workers of a DataLoader. iterations -> epochs."""

from __future__ import annotations

from multiprocessing import context, get_context
from typing import Any

from ..errors import ConfigError

_NEXT, _FLOOR, _LOADS, _ROW = range(4)  # numbers in the shared memory; the last one is the row of the next iteration
_ROWS = _ROW + 1  # where the rows begin
_NUM_ROWS = 32  # iterations that are remembered, a key and an epoch each


class EpochTurns:
    """Counts the iterations of one dataset, in memory that DataLoader workers share with the process that starts them.

    Each iteration is the next epoch. Workers of one DataLoader iterator have a seed in common, by which the first of
    them begins the iteration and the others find it; a worker that meets the same seed again (it persists, or the seed
    was set again) takes part in a later iteration. A copy that is made by pickle, for no process of multiprocessing,
    counts on by itself.
    """

    def __init__(self, num_slots: int, values: list[int] | None = None):
        self._num_slots = num_slots
        # A lock of the context "spawn" can be given to processes of all start methods.
        self._shared: Any = get_context("spawn").Array("q", values or self._first_values())

    def _first_values(self) -> list[int]:
        return [0] * _ROWS + [-1] * (2 * _NUM_ROWS) + [-1] * self._num_slots

    def begin(self, *, seed: int | None = None, worker: int = 0) -> int:
        """The epoch of an iteration that begins in this process. seed: what its workers have in common, or None."""
        with self._shared.get_lock():
            values = self._shared.get_obj()
            if seed is None:
                return self._new(values)
            slot = _ROWS + 2 * _NUM_ROWS + worker % self._num_slots
            rows = range(_ROWS, _ROWS + 2 * _NUM_ROWS, 2)
            begun = [values[row + 1] for row in rows if values[row] == seed and values[row + 1] > values[slot]]
            if begun:
                epoch = int(min(begun))
            else:
                row = _ROWS + 2 * (values[_ROW] % _NUM_ROWS)
                values[_ROW] += 1
                epoch = self._new(values)
                values[row], values[row + 1] = seed, epoch
            values[slot] = epoch
            return epoch

    def _new(self, values: Any) -> int:
        epoch = int(values[_NEXT])
        values[_NEXT], values[_FLOOR] = epoch + 1, epoch
        return epoch

    @property
    def floor(self) -> int:
        """The epoch of the last iteration that began, or the one that was set since."""
        return int(self._shared[_FLOOR])

    @property
    def num_loads(self) -> int:
        """How often a state was loaded."""
        return int(self._shared[_LOADS])

    def set(self, epoch: int) -> None:
        """Let the next iteration be this epoch; ConfigError for one that has begun."""
        with self._shared.get_lock():
            values = self._shared.get_obj()
            if epoch < values[_NEXT]:
                raise ConfigError(
                    f"set_epoch({epoch}): epoch {epoch} has begun already, and the next iteration is epoch "
                    f"{values[_NEXT]}: give {values[_NEXT]} or more, or make a new dataset to begin again"
                )
            values[_NEXT] = values[_FLOOR] = epoch

    def load(self, epoch: int) -> None:
        """Let the next iteration continue this epoch of a saved state."""
        with self._shared.get_lock():
            values = self._shared.get_obj()
            values[_NEXT] = values[_FLOOR] = epoch
            values[_LOADS] += 1
            first_slot = _ROWS + 2 * _NUM_ROWS
            for number in range(_ROWS, first_slot + self._num_slots):
                values[number] = -1  # iterations before it are of other epochs

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _shared_turns, (self._num_slots, self._shared)
        with self._shared.get_lock():
            return EpochTurns, (self._num_slots, list(self._shared.get_obj()))


def _shared_turns(num_slots: int, shared: Any) -> EpochTurns:
    turns = EpochTurns.__new__(EpochTurns)
    turns._num_slots, turns._shared = num_slots, shared
    return turns
