"""Which epoch an iteration of a dataset is, and where a loaded state lets it begin, for workers that come and go."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from multiprocessing import parent_process
from operator import index
from typing import Any

import torch

from ..errors import CursorError
from ..processes.family import first_number, is_running
from ..processes.shared_tensors import SharesTensors, shared_zeros

MAX_WORKERS = 1 << 10  # of one DataLoader
MAX_STATE_BYTES = 1 << 12
_COUNT_BITS = 31
NUM_KNOWN = 32  # iterations whose workers may still come, of one seed or several
# Words of the shared memory; those of the last iterations follow, and those of each worker.
_BEGUN, _FIRST_EPOCH, _FIRST_ITERATION, _STATE_BYTES, _KNOWN = range(5)
_WORKERS = _KNOWN + NUM_KNOWN
# Words of a worker: the iteration that it began last, its process, and the number of worker 0's, see first_number.
_ITERATION, _PROCESS, _FIRST, _WORDS = range(4)


class EpochCounter(SharesTensors):
    """Counts iterations; all workers of one iteration of a DataLoader get the same number.

    It is in shared memory, which has no name, so nothing of it outlives its processes. The first word holds the count
    of iterations begun and a hash of what the workers of the last one have in common. Processes are numbered as they
    are started, so worker 0's number names an iterator, and of the last iterations a word each holds it, hashed with
    the rest: a worker that finds its own there joins that iteration, also where others were begun since. Where another
    thread started processes between its workers, their numbers say nothing: a worker joins the last iteration if it
    has this in common and has not begun it yet, and the workers that have run; else it begins the next. As words are
    written whole, it does not matter which worker that is, nor whether two do it at once.
    """

    def __init__(self) -> None:
        self._words = shared_zeros(_WORKERS + _WORDS * MAX_WORKERS, dtype=torch.int64)
        self._state = shared_zeros(MAX_STATE_BYTES, dtype=torch.uint8)
        self._iterations_here = 0

    def begin(self, worker: Any) -> int:
        """The epoch of the iteration that begins in this process.

        worker: torch's get_worker_info(). Its seed less its number is common to the workers of a DataLoader's
        iterator; persistent workers iterate several times, which each counts for itself.
        """
        self._iterations_here += 1
        if worker is None:
            begun = self._begun(int(self._words[_BEGUN])) + 1
            self._words[_BEGUN] = begun
            return self._epoch(begun - 1)
        parent, first = parent_process(), first_number(worker.id)
        common = f"{parent and parent.pid} {worker.seed - worker.id} {worker.num_workers} {self._iterations_here}"
        identity, exactly = zlib.crc32(common.encode()), zlib.crc32(f"{common} {first}".encode())
        known = self._words[_KNOWN:_WORKERS]
        row = self._words[_WORKERS:].view(-1, _WORDS)[worker.id % MAX_WORKERS]
        while True:
            word = int(self._words[_BEGUN])
            begun = self._begun(word)
            found = [self._begun(each) for each in known.tolist() if first and each >> _COUNT_BITS == exactly]
            if found:
                return self._joined(row, max(found), first)
            joins = word >> _COUNT_BITS == identity and int(row[_ITERATION]) != begun and self._is_open(begun, first)
            if int(self._words[_BEGUN]) == word:  # else another worker has begun an iteration meanwhile
                break
        if not joins:
            begun += 1
            self._words[_BEGUN] = identity << _COUNT_BITS | begun
            known[begun % NUM_KNOWN] = exactly << _COUNT_BITS | begun
        return self._joined(row, begun, first)

    def _joined(self, row: torch.Tensor, iteration: int, first: int) -> int:
        """The epoch of an iteration, once the words of a worker say that it takes part, unless they say a later one."""
        if iteration > int(row[_ITERATION]):
            row[_PROCESS], row[_FIRST] = os.getpid(), first
            row[_ITERATION] = iteration
        return self._epoch(iteration - 1)

    def _is_open(self, begun: int, first: int) -> bool:
        """Whether the workers that began an iteration were started with one whose `first` this is, or run.

        Else it is one of the same seed that ended early.
        """
        rows = self._words[_WORKERS:].view(-1, _WORDS).numpy()
        begun_by = rows[rows[:, _ITERATION] == begun].tolist()
        return not begun_by or any(each[_FIRST] == first or is_running(each[_PROCESS]) for each in begun_by)

    @staticmethod
    def _begun(word: int) -> int:
        return word & (1 << _COUNT_BITS) - 1

    @property
    def next_epoch(self) -> int:
        """The epoch of the iteration that begins next, unless a state is loaded before."""
        return self._epoch(self._begun(int(self._words[_BEGUN])))

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._words[_FIRST_EPOCH] = epoch
        self._words[_FIRST_ITERATION] = self._begun(int(self._words[_BEGUN]))

    def _epoch(self, iteration: int) -> int:
        return int(self._words[_FIRST_EPOCH]) + iteration - int(self._words[_FIRST_ITERATION])

    def load(self, state: Mapping[str, Any]) -> None:
        """The next iteration is of this state's "epoch", and finds the state in `loaded`."""
        data = json.dumps(dict(state)).encode()
        if len(data) > MAX_STATE_BYTES:
            raise CursorError(
                f"the saved state takes {len(data)} bytes, at most {MAX_STATE_BYTES} do: use another checkpoint"
            )
        self._state[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._words[_STATE_BYTES] = len(data)
        self.next_epoch = int(state["epoch"])

    def loaded(self) -> dict[str, Any] | None:
        """The state that was loaded last, in whatever process."""
        size = int(self._words[_STATE_BYTES])
        state: dict[str, Any] | None = json.loads(bytes(self._state[:size].numpy())) if size else None
        return state


def check_state(obj: Any, ours: Mapping[str, Any], *, unsaved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state, checked; CursorError where it says another value than ours, on which the order depends.

    unsaved: what is taken for settings that the state does not name, as MosaicML's own does not name some.
    """
    try:
        numbers = {
            name: index(obj[name]) for name in ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed")
        }
    except (KeyError, TypeError) as error:
        raise CursorError(f"the saved state is damaged ({error!r}): use another checkpoint") from error
    if numbers["epoch"] < 0:  # MosaicML's class saves epoch -1 before the first batch, and resumes at the first epoch
        numbers |= {"epoch": 0, "sample_in_epoch": 0}
    negative = next((name for name, number in numbers.items() if number < 0), None)
    if negative is not None:
        raise CursorError(f"the saved state is damaged ({negative} is {numbers[negative]}): use another checkpoint")
    state = {**obj, **numbers}
    for name, value in ours.items():
        saved = state.get(name, unsaved.get(name, value))
        if saved != value:
            raise CursorError(
                f"the saved state has {name} {saved!r}, this dataset has {value!r}: restore it, or start over"
            )
    return state
