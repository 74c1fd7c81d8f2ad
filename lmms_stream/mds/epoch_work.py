"""The sample ids of a rank and worker by MosaicML's arithmetic, which makes those of all at once.

It takes seconds and gigabytes for hundreds of millions of samples, so one process of a node does it and the others read
its file. The file is named by all that it depends on: first by the settings, then by the epoch and the position.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, StorageError
from ..plan.mosaic_order import MosaicOrder, Readers, Source, mosaic_work
from ..storage.disk_errors import disk_errors
from ..storage.locks import locked, map_in_use, unused
from ..storage.temporaries import leftovers, remove_leftovers, temporary_name
from .equal_world import EqualWorld

MAX_SAMPLES_EACH = 1 << 20  # of an epoch, that every process works out for itself
LIMIT_S = 1800.0  # for the process that does it
UNUSED_S = 86400.0  # after which an order of other settings is removed


def order_of(dataset: Any) -> MosaicOrder:
    return MosaicOrder(**{each.name: getattr(dataset, each.name) for each in dataclasses.fields(MosaicOrder)})


def sources_of(dataset: Any) -> list[Source]:
    sizes = np.split(dataset.samples_per_shard, dataset.shard_offset_per_stream[1:])
    firsts = dataset.sample_offset_per_stream.tolist()
    return [
        Source(first, of_shards, int(stream.choose), float(stream.proportion))
        for first, of_shards, stream in zip(firsts, sizes, dataset.streams, strict=True)
    ]


def epoch_work(dataset: Any, world: EqualWorld, epoch: int, position: int, *, folder: Path) -> NDArray[np.int64]:
    """The sample ids that a worker reads of an epoch from a position on, without padding: int64[up to its share].

    dataset, world: a StreamingDataset, and the world with this worker in it. folder: for files of the node.
    """
    if dataset.epoch_size <= MAX_SAMPLES_EACH:
        work = _all_work(dataset, world, epoch, position)
    else:
        work = _shared_work(dataset, world, epoch, position, folder=folder / "_lmms" / "orders")
    mine: NDArray[np.int64] = work[world.node, world.rank_of_node, world.worker_of_rank].ravel()
    return mine[mine >= 0]


def _all_work(dataset: Any, world: EqualWorld, epoch: int, position: int) -> NDArray[np.int64]:
    """The sample ids of all: int64[nodes, ranks of a node, workers of a rank, batches, batch size], -1 for padding."""
    readers = Readers(world.num_nodes, world.ranks_per_node, world.workers_per_rank)
    try:
        return mosaic_work(order_of(dataset), sources_of(dataset), readers, epoch, position)
    except ValueError as error:
        raise ConfigError(f"MosaicML's order does not fit these settings or this state: {error}") from error


def _shared_work(dataset: Any, world: EqualWorld, epoch: int, position: int, *, folder: Path) -> NDArray[np.int64]:
    """The same, mapped from a file that the first process of the node wrote."""
    path = folder / f"{_name(dataset, world, epoch, position)}.npy"
    with disk_errors(str(path)):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "orders.lock", timeout_s=LIMIT_S) as lock:
            if lock is None:
                raise StorageError(f"{path}: another process worked on it for {LIMIT_S:g} s: end it and try again")
            work = _read_order(path)
            if work is None:
                _remove_old(path)
                _write_order(path, _all_work(dataset, world, epoch, position))
                work = _read_order(path)
                assert work is not None
    return work


def _read_order(path: Path) -> NDArray[np.int64] | None:
    """The order in a file, mapped; None where the file is missing or damaged."""
    try:
        data = map_in_use(path)
        np.lib.format.read_magic(data)
        shape, _, dtype = np.lib.format.read_array_header_1_0(data)
        work: NDArray[np.int64] = np.frombuffer(data, dtype, offset=data.tell()).reshape(shape)
    except (FileNotFoundError, ValueError):
        return None
    os.utime(path)  # it is used
    return work


def _write_order(path: Path, work: NDArray[np.int64]) -> None:
    remove_leftovers(path)
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            np.save(file, work)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_old(path: Path) -> None:
    """Remove orders that no process has open: other epochs of the same settings, and what was not used for a day.

    Other settings are those of other runs, whose workers may be about to open their orders. The caller holds the lock.
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
    """A name for all that the work depends on: SETTINGS-EPOCH, two hexadecimal digests."""
    shares = [(stream.proportion, stream.choose) for stream in sources_of(dataset)]
    shape = world.num_nodes, world.ranks_per_node, world.workers_per_rank
    said = json.dumps([dataclasses.asdict(order_of(dataset)), shares, shape, np.__version__], default=int)
    digest = hashlib.blake2b(said.encode(), digest_size=16)
    digest.update(dataset.samples_per_shard.tobytes() + dataset.stream_per_shard.tobytes())
    when = hashlib.blake2b(json.dumps([epoch, position], default=int).encode(), digest_size=8)
    return f"{digest.hexdigest()}-{when.hexdigest()}"
