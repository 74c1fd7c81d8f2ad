"""packing_mode "auto": measure a missing lengths index of a dataset once. All ranks make the same call.

The job's first rank measures, with all cores for more than 20,000 samples, and puts the index next to the shards. For a
read-only dataset the first rank of each node measures, and keeps the index in the dataset's cache folder on the node.
Other ranks wait for the index. The measuring process holds a kernel's lock: the ranks of the node notice the death of
the process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, LengthsError, StorageError
from ..processes.bar import terminal_bar
from ..processes.interpreter import call_in_interpreter
from ..processes.pool import obstacle
from ..processors.base import Processor, processor_fingerprint
from ..storage.failures import disk_errors
from ..storage.local import FolderStorage, can_write
from ..storage.locks import locked, wait_for_other
from ..storage.storage import Storage, open_storage
from ..types import World
from .lengths import LENGTHS_FOLDER
from .measuring import BeingMeasuredError, add_lengths, keep_lengths, lock_folder, measured_dataset
from .streams import StoredDataset

_FEW_SAMPLES = 20_000  # measuring them takes less time than starting processes
_PAUSE_S = 2.0  # between looks at whether lmms-stream index is done
logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """max_samples: largest dataset to measure. begin_s: longest wait for the beginning of another rank's measuring;
    end_s: longest wait for the index.
    """

    max_samples: int = 2_000_000
    begin_s: float = 600.0
    end_s: float = 7200.0


LIMITS = Limits()


class MeasuredIndex(NamedTuple):
    """where: dataset, or folder of this node, with the index. refused: reason for the folder of this node."""

    where: str
    num_samples: int
    num_tokens: int
    refused: str


def ensure_lengths(stored: StoredDataset, processor: Processor, *, world: World, limits: Limits | None = None) -> None:
    """Ensure that a dataset has a lengths index, measured once, by one of the calling processes.

    Raises ConfigError for a dataset of more than max_samples, LengthsError if another rank does not measure in time,
    and the errors of measured_dataset.
    """
    limits = limits or LIMITS
    if stored.has_lengths(processor):
        return
    if stored.num_samples > limits.max_samples:
        raise ConfigError(
            f"{stored.url} has {stored.num_samples} samples and no lengths index for this processor, and packing_mode "
            f"auto measures at most {limits.max_samples}: {stored.how_to_index}, or set "
            'packing_mode="lanes", which needs none'
        )
    lock = lock_folder(stored.url) / f"{processor_fingerprint(processor)}.auto"
    with disk_errors(str(lock)):
        lock.parent.mkdir(parents=True, exist_ok=True)
    if world.rank == 0 or (world.is_first_of_node and not _is_writable(stored.storage)):
        _measure_once(stored, processor, lock, limits)
    else:
        _wait(stored, processor, lock, limits, world=world)


def _measure_once(stored: StoredDataset, processor: Processor, lock: Path, limits: Limits) -> None:
    """Measure, unless another run on this node does so first."""
    deadline = time.monotonic() + limits.end_s
    with locked(lock, timeout_s=limits.end_s) as ours:
        while ours is not None:
            if stored.has_lengths(processor):
                return
            try:
                _measure(stored, processor)
                return
            except BeingMeasuredError:  # by lmms-stream index
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
    raise _late(stored, limits.end_s)


def _measure(stored: StoredDataset, processor: Processor) -> None:
    started = time.monotonic()
    logger.warning(
        "%s has no lengths index for this processor: measuring its %d samples, once", stored.url, stored.num_samples
    )
    call = partial(measure_and_keep, stored.url, stored.node_folder, processor)
    with terminal_bar("measuring", total=stored.num_samples, unit="samples") as on_samples:
        if stored.num_samples > _FEW_SAMPLES and obstacle(processor) is None:
            measured: MeasuredIndex = call_in_interpreter(partial(call, None), on_progress=on_samples)
        else:
            measured = call(1, on_samples)
    if measured.refused:
        logger.warning("the lengths index cannot be put beside the dataset (%s)", measured.refused)
    logger.info(
        "measured %d samples, %d tokens in %.1f s: the lengths index is kept in %s",
        measured.num_samples,
        measured.num_tokens,
        time.monotonic() - started,
        measured.where,
    )


def measure_and_keep(
    url: str, node_folder: Path, processor: Processor, num_workers: int | None, on_samples: Callable[[int], None]
) -> MeasuredIndex:
    """Measure a dataset, and keep the lengths index next to the shards, or on this node if writing is refused."""
    storage = open_storage(url)
    refused = ""
    with measured_dataset(storage, processor, num_workers=num_workers, on_samples=on_samples) as (index, folder):
        where = storage.url
        try:
            add_lengths(storage, index, folder=folder)
        except StorageError as error:
            keep_lengths(node_folder, index)
            where, refused = str(node_folder), str(error)
        return MeasuredIndex(where, len(index.lengths), index.num_tokens, refused)


def _wait(stored: StoredDataset, processor: Processor, lock: Path, limits: Limits, *, world: World) -> None:
    """Wait for the index; LengthsError if the measuring process dies, or does not finish in time."""
    is_first_node = world.node == 0  # the lock of other nodes may stay free
    waited = wait_for_other(
        lambda: stored.has_lengths(processor),
        lock=lock,
        begin_s=limits.begin_s if is_first_node else limits.end_s,
        end_s=limits.end_s,
    )
    if waited.outcome == "ended":
        raise LengthsError(
            f"the rank that measured {stored.url} ended before its lengths index was written: see its error, or "
            f"before the run {stored.how_to_index}"
        )
    if waited.outcome == "late":
        raise _late(stored, waited.limit_s)


def _late(stored: StoredDataset, limit_s: float) -> LengthsError:
    return LengthsError(
        f"{stored.url} has no lengths index for this processor, and no other process wrote one within {limit_s:g} s: "
        f"before the run (on each node, if each has a copy) {stored.how_to_index}"
    )


def _is_writable(storage: Storage) -> bool:
    """Whether a lengths index can be put next to a dataset's shards."""
    if isinstance(storage, FolderStorage):
        return can_write(storage.folder, storage.folder / "_lmms", storage.folder / LENGTHS_FOLDER)
    name = f"{LENGTHS_FOLDER}/.written-by-{os.uname().nodename}-{os.getpid()}"
    try:
        storage.write(name, b"")
        storage.delete(name)
    except StorageError:
        return False
    return True
