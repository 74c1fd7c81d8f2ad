"""Epoch and start position of a dataset's iteration, agreed between workers of a DataLoader."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError, StorageError
from ..plan.mosaic_order import MosaicOrder, Readers, StreamSamples, mosaic_work
from ..processes.family import first_number, is_running
from ..processes.shared_tensors import SharesTensors, shared_zeros
from ..storage.failures import disk_errors
from ..storage.locks import leftovers, locked, map_in_use, remove_leftovers, unused, written_whole

MAX_WORKERS = 1 << 10  # of one DataLoader
MAX_STATE_BYTES = 1 << 12
_COUNT_BITS = 31
NUM_KNOWN = 32  # last iterations that workers may still join
# Words of the shared memory; those of the last iterations follow, and those of each worker.
_BEGUN, _FIRST_EPOCH, _FIRST_ITERATION, _STATE_BYTES, _KNOWN = range(5)
_WORKERS = _KNOWN + NUM_KNOWN
# Words of a worker: the iteration that it began last, its process, and the number of worker 0's, see first_number.
_ITERATION, _PROCESS, _FIRST, _WORDS = range(4)


class EpochCounter(SharesTensors):
    """Counts iterations; all workers of an iteration of a DataLoader get the same number.

    The count is in shared memory without a name: nothing outlives the processes. The first word holds the count of
    begun iterations, and a hash of the facts that the workers of the last iteration have in common. Processes are
    numbered in the order of their start, and worker 0's number names an iterator. For each of the last iterations a
    word holds a hash of the facts with this number. A worker that finds the word of its iterator joins this iteration,
    even if later iterations have begun.

    If another thread started processes between the workers, their numbers are useless. A worker then joins the last
    iteration if it has the same facts, has not begun the iteration yet, and a worker of the iteration runs; else it
    begins the next iteration. Words are written whole: any worker may begin an iteration, and two may begin it at once.
    """

    def __init__(self) -> None:
        self._words = shared_zeros(_WORKERS + _WORDS * MAX_WORKERS, dtype=torch.int64)
        self._state = shared_zeros(MAX_STATE_BYTES, dtype=torch.uint8)
        self._iterations_here = 0

    def begin(self, worker: Any) -> int:
        """Return the epoch of the iteration that begins in this process.

        worker: torch's get_worker_info(). The seed minus the worker's number is common to the workers of a DataLoader's
        iterator; each persistent worker counts the worker's own iterations.
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
            if int(self._words[_BEGUN]) == word:  # else another worker has begun an iteration
                break
        if not joins:
            begun += 1
            self._words[_BEGUN] = identity << _COUNT_BITS | begun
            known[begun % NUM_KNOWN] = exactly << _COUNT_BITS | begun
        return self._joined(row, begun, first)

    def _joined(self, row: torch.Tensor, iteration: int, first: int) -> int:
        """Note in a worker's words its part in an iteration, unless they hold a later one; return the epoch."""
        if iteration > int(row[_ITERATION]):
            row[_PROCESS], row[_FIRST] = os.getpid(), first
            row[_ITERATION] = iteration
        return self._epoch(iteration - 1)

    def _is_open(self, begun: int, first: int) -> bool:
        """Return whether a worker that began an iteration has the same `first`, or still runs, or no worker began it.

        Otherwise the iteration has the same seed, but ended early.
        """
        rows = self._words[_WORKERS:].view(-1, _WORDS).numpy()
        begun_by = rows[rows[:, _ITERATION] == begun].tolist()
        return not begun_by or any(each[_FIRST] == first or is_running(each[_PROCESS]) for each in begun_by)

    @staticmethod
    def _begun(word: int) -> int:
        return word & (1 << _COUNT_BITS) - 1

    @property
    def next_epoch(self) -> int:
        """Epoch of the next iteration, unless a state is loaded before."""
        return self._epoch(self._begun(int(self._words[_BEGUN])))

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._words[_FIRST_EPOCH] = epoch
        self._words[_FIRST_ITERATION] = self._begun(int(self._words[_BEGUN]))

    def _epoch(self, iteration: int) -> int:
        return int(self._words[_FIRST_EPOCH]) + iteration - int(self._words[_FIRST_ITERATION])

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration have this state's "epoch", and return the state from `loaded`."""
        data = json.dumps(dict(state)).encode()
        if len(data) > MAX_STATE_BYTES:
            raise CursorError(
                f"the saved state takes {len(data)} bytes, at most {MAX_STATE_BYTES} do: use another checkpoint"
            )
        self._state[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._words[_STATE_BYTES] = len(data)
        self.next_epoch = int(state["epoch"])

    def loaded(self) -> dict[str, Any] | None:
        """Return the last loaded state, of any process."""
        size = int(self._words[_STATE_BYTES])
        state: dict[str, Any] | None = json.loads(bytes(self._state[:size].numpy())) if size else None
        return state


_NEEDED = ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed")
_RANGES = {  # least and largest number in a state
    "epoch": (0, (1 << 31) - 1),
    "sample_in_epoch": (0, (1 << 62) - 1),
    "num_canonical_nodes": (1, 1 << 24),
    "shuffle_seed": (0, (1 << 63) - 1),
    "initial_physical_nodes": (1, 1 << 24),
    "shuffle_block_size": (1, (1 << 62) - 1),
    "num_ranks": (1, 1 << 31),
}


def check_state(obj: Any, ours: Mapping[str, Any], *, unsaved: Mapping[str, Any]) -> dict[str, Any]:
    """Check and return a saved state; CursorError if a number is out of range, or a setting of the order differs.

    unsaved: values for settings missing in the state: MosaicML's states lack some settings.
    """
    if isinstance(obj, Mapping) and {"sources", "packed_sources", "lanes"} & obj.keys():
        raise CursorError(
            "the saved state is of a PackedLoader, at a pack: load it in a PackedLoader, or begin the epoch of a "
            "StreamingDataLoader without a state"
        )
    try:
        numbers = {name: index(obj[name]) for name in _RANGES if obj.get(name) is not None or name in _NEEDED}
    except (AttributeError, KeyError, TypeError) as error:
        raise CursorError(f"the saved state is damaged ({error!r}): use another checkpoint") from error
    if numbers["epoch"] < 0:  # MosaicML's class saves epoch -1 before the first batch, and resumes at the first epoch
        numbers |= {"epoch": 0, "sample_in_epoch": 0}
    for name, number in numbers.items():
        if not _RANGES[name][0] <= number <= _RANGES[name][1]:
            raise CursorError(f"the saved state is damaged ({name} is {number}): use another checkpoint")
    state = {**obj, **numbers}
    for name, value in ours.items():
        saved = state.get(name, unsaved.get(name, value))
        if saved != value:
            raise CursorError(
                f"the saved state has {name} {saved!r}, this dataset has {value!r}: restore it, or start over"
            )
    return state


# The sample ids of a rank and worker by MosaicML's arithmetic, which computes the ids of all workers together.
#
# For hundreds of millions of samples the computation takes seconds and gigabytes: a single process of a node computes,
# and the others read the file. The file's name depends on all inputs: first the settings, then epoch and position.

MAX_SAMPLES_EACH = 1 << 20  # of an epoch, computed by every process itself
LIMIT_S = 1800.0  # longest wait for the computing process
UNUSED_S = 86400.0  # until an order of other settings is removed


def order_of(dataset: Any) -> MosaicOrder:
    return MosaicOrder(**{each.name: getattr(dataset, each.name) for each in dataclasses.fields(MosaicOrder)})


def sources_of(dataset: Any) -> list[StreamSamples]:
    sizes = np.split(dataset.samples_per_shard, dataset.shard_offset_per_stream[1:])
    firsts = dataset.sample_offset_per_stream.tolist()
    return [
        StreamSamples(first, of_shards, int(stream.choose), float(stream.proportion))
        for first, of_shards, stream in zip(firsts, sizes, dataset.streams, strict=True)
    ]


def epoch_work(dataset: Any, world: EqualWorld, epoch: int, position: int, *, folder: Path) -> NDArray[np.int64]:
    """Return the sample ids of a worker in an epoch, from a position on, without padding: int64[up to its share].

    dataset, world: a StreamingDataset, and the world of this worker. folder: for files of the node.
    """
    if dataset.epoch_size <= MAX_SAMPLES_EACH:
        work = _all_work(dataset, world, epoch, position)
    else:
        work = _shared_work(dataset, world, epoch, position, folder=folder / "_lmms" / "orders")
    mine: NDArray[np.int64] = work[world.node, world.rank_of_node, world.worker_of_rank].ravel()
    return mine[mine >= 0]


def _all_work(dataset: Any, world: EqualWorld, epoch: int, position: int) -> NDArray[np.int64]:
    """Return all sample ids: int64[nodes, ranks of a node, workers of a rank, batches, batch size], -1 for padding."""
    readers = Readers(world.num_nodes, world.ranks_per_node, world.workers_per_rank)
    try:
        return mosaic_work(order_of(dataset), sources_of(dataset), readers, epoch, position)
    except ValueError as error:
        raise ConfigError(f"MosaicML's order does not fit these settings or this state: {error}") from error


def _shared_work(dataset: Any, world: EqualWorld, epoch: int, position: int, *, folder: Path) -> NDArray[np.int64]:
    """Map the values of _all_work from a file, written by the node's first process."""
    path = folder / f"{_name(dataset, world, epoch, position)}.npy"
    with disk_errors(str(path)):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "orders.lock", timeout_s=LIMIT_S) as lock:
            if lock is None:
                raise StorageError(f"{path}: another process worked on it for {LIMIT_S:g} s: end it and try again")
            work = _read_order(path)
            if work is None:
                _remove_old(path)
                work = _all_work(dataset, world, epoch, position)
                remove_leftovers(path)
                with written_whole(path) as temporary, temporary.open("wb") as file:
                    np.save(file, work)
                work = _read_order(path)
                assert work is not None
    return work


def _read_order(path: Path) -> NDArray[np.int64] | None:
    """Map the order in a file; None if the file is missing or damaged."""
    try:
        data = map_in_use(path)
        np.lib.format.read_magic(data)
        shape, _, dtype = np.lib.format.read_array_header_1_0(data)
        work: NDArray[np.int64] = np.frombuffer(data, dtype, offset=data.tell()).reshape(shape)
    except (FileNotFoundError, ValueError):
        return None
    os.utime(path)  # marks the order as used
    return work


def _remove_old(path: Path) -> None:
    """Remove orders not open in any process: other epochs of the same settings, and orders unused for a day.

    Other settings belong to other runs, with workers possibly about to open an order. The caller holds the lock.
    """
    settings = path.name.partition("-")[0]
    for old in path.parent.glob("*.npy"):
        is_same_run = old.name.partition("-")[0] == settings
        if is_same_run or time.time() - old.stat().st_mtime > UNUSED_S:
            with unused(old) as is_unused:
                if is_unused:
                    old.unlink(missing_ok=True)
    for left in leftovers(path.parent):
        remove_leftovers(left)


def _name(dataset: Any, world: EqualWorld, epoch: int, position: int) -> str:
    """Return a name for all inputs of the work: SETTINGS-EPOCH, two hexadecimal digests."""
    shares = [(stream.proportion, stream.choose) for stream in sources_of(dataset)]
    shape = world.num_nodes, world.ranks_per_node, world.workers_per_rank
    said = json.dumps([dataclasses.asdict(order_of(dataset)), shares, shape, np.__version__], default=int)
    digest = hashlib.blake2b(said.encode(), digest_size=16)
    digest.update(dataset.samples_per_shard.tobytes() + dataset.stream_per_shard.tobytes())
    when = hashlib.blake2b(json.dumps([epoch, position], default=int).encode(), digest_size=8)
    return f"{digest.hexdigest()}-{when.hexdigest()}"


# Nodes with equal numbers of ranks, and a worker's number, for MosaicML's orders.


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualWorld:
    """Nodes with equal numbers of ranks. worker: number of this process among all workers; a rank without workers
    counts as a worker.
    """

    num_nodes: int
    ranks_per_node: int
    workers_per_rank: int = 1
    worker: int = 0

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        return self.worker // self.workers_per_rank

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        return self.rank % self.ranks_per_node

    @property
    def worker_of_rank(self) -> int:
        return self.worker % self.workers_per_rank

    def replicate(self, replication: int) -> EqualWorld:
        """Return the world with `replication` consecutive ranks as a rank; on a single node if they do not fit."""
        num_ranks = self.num_ranks // replication
        num_nodes = 1 if num_ranks % self.ranks_per_node else num_ranks // self.ranks_per_node
        worker = self.rank // replication * self.workers_per_rank + self.worker_of_rank
        return replace(self, num_nodes=num_nodes, ranks_per_node=num_ranks // num_nodes, worker=worker)

    def with_workers(self, info: Any) -> EqualWorld:
        """Return the world of a worker of a DataLoader. info: torch's get_worker_info(), None outside of workers."""
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return replace(self, workers_per_rank=count, worker=self.rank * count + number)
