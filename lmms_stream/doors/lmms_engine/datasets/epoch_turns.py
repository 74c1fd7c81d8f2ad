"""Epoch of each iteration of a dataset, the same for all workers of a DataLoader. iterations -> epochs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing import context, get_context, parent_process
from typing import Any

from ....errors import ConfigError
from ....processes.family import first_number, is_running

# Numbers in the shared memory. _ROW: number of the next iteration. _LANES: number chosen for _READERS readers.
_NEXT, _FLOOR, _IS_LOADED, _LOADS, _ROW, _READERS, _LANES = range(7)
_ROWS = _LANES + 1  # offset of the rows
_NUM_ROWS = 32  # number of remembered iterations
_KEY_SIZE = 4  # numbers shared by the workers of an iteration
_FIRST, _PROCESS, _WORKERS, _EPOCH = range(_KEY_SIZE, _KEY_SIZE + 4)  # the other numbers of a row
_ROW_SIZE = _EPOCH + 1


class EpochTurns:
    """Counter of the iterations of one dataset, in memory shared by DataLoader workers and their parent process.

    Each iteration is the next epoch. The first worker of an iteration begins the epoch; the others find it by their
    parent process, seed, number of workers, and number of iterations begun (for persistent workers). Iterators with
    equal seeds are distinguished by the process numbers of their workers, which are consecutive; if another thread
    started processes in between, by the workers still missing. A copy made by pickle, except for a process of
    multiprocessing, counts separately.
    """

    def __init__(self, values: list[int] | None = None):
        # A lock of the context "spawn" works with all start methods.
        values = values or [0] * _ROWS + [-1] * (_ROW_SIZE * _NUM_ROWS)
        self._shared: Any = get_context("spawn").Array("q", values)
        self._num_begun = 0  # iterations begun by this process as a worker

    def begin(self) -> int:
        """Return the epoch of an iteration begun in this process without workers."""
        with self._shared.get_lock():
            return self._new(self._shared.get_obj())

    def begin_in_worker(self, *, seed: int, worker: int, num_workers: int) -> int:
        """Return the epoch of an iteration begun in worker `worker` of a DataLoader. seed: the seed of worker 0."""
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
        """Return the number of lanes for num_readers, as chosen by the first reader: sources may grow meanwhile."""
        with self._shared.get_lock():
            values = self._shared.get_obj()
            if values[_READERS] != num_readers:
                values[_LANES] = choose()
                values[_READERS] = num_readers
            return int(values[_LANES])

    @property
    def floor(self) -> int:
        """Epoch of the last begun iteration, or a later epoch set since."""
        return int(self._shared[_FLOOR])

    @property
    def num_loads(self) -> int:
        """Number of loaded states."""
        return int(self._shared[_LOADS])

    def set(self, epoch: int) -> None:
        """Make this epoch the next iteration; warn and do nothing if the epoch has begun already.

        Raises ConfigError for an epoch before a loaded state's epoch that no iteration has resumed.
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
        """Make the next iteration resume this epoch of a saved state."""
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
