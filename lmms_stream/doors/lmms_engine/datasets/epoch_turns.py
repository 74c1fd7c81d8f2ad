"""Epoch of each iteration of a dataset, the same for all workers of a DataLoader. iterations -> epochs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing import context, get_context, parent_process
from typing import Any

from ....errors import ConfigError
from ....processes.family import first_number, is_running

# Numbers in the shared memory. _ROW: of the next iteration. _LANES: that were chosen for _READERS readers.
_NEXT, _FLOOR, _IS_LOADED, _LOADS, _ROW, _READERS, _LANES = range(7)
_ROWS = _LANES + 1  # where the rows begin
_NUM_ROWS = 32  # iterations that are remembered
_KEY_SIZE = 4  # numbers that the workers of an iteration have in common
_FIRST, _PROCESS, _WORKERS, _EPOCH = range(_KEY_SIZE, _KEY_SIZE + 4)  # the other numbers of a row
_ROW_SIZE = _EPOCH + 1


class EpochTurns:
    """Counts the iterations of one dataset, in memory that DataLoader workers share with the process that starts them.

    Each iteration is the next epoch. The first worker of an iteration begins it, and the others find it by the process
    that started them, their seed and number, and how many iterations they have begun, if they persist. Iterators of one
    seed are told apart by the process numbers of their workers, which follow each other; if another thread started
    processes meanwhile, by the workers that have not taken part yet. A copy that is made by pickle, for no process of
    multiprocessing, has a count of its own.
    """

    def __init__(self, values: list[int] | None = None):
        # A lock of the context "spawn" can be given to processes of all start methods.
        self._shared: Any = get_context("spawn").Array("q", values or self._first_values())
        self._num_begun = 0  # by this process as a worker

    def _first_values(self) -> list[int]:
        return [0] * _ROWS + [-1] * (_ROW_SIZE * _NUM_ROWS)

    def begin(self) -> int:
        """Epoch of an iteration that begins in this process and has no workers."""
        with self._shared.get_lock():
            return self._new(self._shared.get_obj())

    def begin_in_worker(self, *, seed: int, worker: int, num_workers: int) -> int:
        """Epoch of an iteration that begins in worker number `worker` of a DataLoader. seed: the one of worker 0."""
        parent = parent_process()
        key = [parent.pid or 0 if parent else 0, seed, num_workers, self._num_begun]
        first, bit = first_number(worker), 1 << worker % 62
        self._num_begun += 1
        with self._shared.get_lock():
            values = self._shared.get_obj()
            rows = [at for at in range(_ROWS, len(values), _ROW_SIZE) if values[at : at + _KEY_SIZE] == key]
            same = [at for at in rows if values[at + _FIRST] == first]
            same = same or [at for at in rows if not values[at + _WORKERS] & bit and is_running(values[at + _PROCESS])]
            if same:
                row = max(same, key=lambda at: values[at + _EPOCH])
                values[row + _WORKERS] |= bit
                return int(values[row + _EPOCH])
            epoch = self._new(values)
            row = _ROWS + _ROW_SIZE * (values[_ROW] % _NUM_ROWS)
            values[_ROW] += 1
            values[row : row + _ROW_SIZE] = [*key, first, os.getpid(), bit, epoch]
            return epoch

    def _new(self, values: Any) -> int:
        epoch = int(values[_NEXT])
        values[_NEXT], values[_FLOOR], values[_IS_LOADED] = epoch + 1, epoch, 0
        return epoch

    def lanes(self, num_readers: int, choose: Callable[[], int]) -> int:
        """The number of lanes for so many readers, as the first of them chose it: sources may grow meanwhile."""
        with self._shared.get_lock():
            values = self._shared.get_obj()
            if values[_READERS] != num_readers:
                values[_LANES] = choose()
                values[_READERS] = num_readers
            return int(values[_LANES])

    @property
    def floor(self) -> int:
        """The epoch of the last iteration that began, or the one that was set since."""
        return int(self._shared[_FLOOR])

    @property
    def num_loads(self) -> int:
        """How often a state was loaded."""
        return int(self._shared[_LOADS])

    def set(self, epoch: int) -> None:
        """Let the next iteration be this epoch; an epoch that was begun is passed over with a warning.

        Raises ConfigError for an epoch before the one of a loaded state that no iteration has continued.
        """
        with self._shared.get_lock():
            values = self._shared.get_obj()
            upcoming, is_loaded = int(values[_NEXT]), bool(values[_IS_LOADED])
            if epoch >= upcoming:
                values[_NEXT] = values[_FLOOR] = epoch
                return
        if is_loaded:
            raise ConfigError(
                f"set_epoch({epoch}): the loaded state is in epoch {upcoming}, which the next iteration continues: "
                f"give {upcoming} or more, or make a new dataset to begin again"
            )
        warnings.warn(
            f"set_epoch({epoch}): epoch {epoch} has begun already, and the next iteration is epoch {upcoming}: each "
            "iteration is an epoch of its own; make a new dataset to read an epoch again",
            stacklevel=3,
        )

    def load(self, epoch: int) -> None:
        """Let the next iteration continue this epoch of a saved state."""
        with self._shared.get_lock():
            values = self._shared.get_obj()
            values[_NEXT] = values[_FLOOR] = epoch
            values[_IS_LOADED] = 1
            values[_LOADS] += 1

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _shared_turns, (self._shared,)
        with self._shared.get_lock():
            return EpochTurns, (list(self._shared.get_obj()),)


def _shared_turns(shared: Any) -> EpochTurns:
    turns = EpochTurns.__new__(EpochTurns)
    turns._shared, turns._num_begun = shared, 0
    return turns
