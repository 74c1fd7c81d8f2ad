"""Room for downloads under a limit: the files used least recently give way, none that is not ours.

All processes of a node that share a cache folder share its limit. What is where is read from the records that lie
beside the files (see record.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, StorageError
from .locks import locked
from .record import Record, boot_id, touch

_POLL_S = 0.05


class CacheRoom:
    """The room that one or more cache folders share, for files of at most `limit_bytes` in all."""

    def __init__(self, folders: Sequence[Path], limit_bytes: int):
        self.folders = sorted(set(folders))
        self.limit_bytes = limit_bytes

    def reserve(self, record_path: Path, num_bytes: int, *, timeout_s: float) -> None:
        """Take room for a download whose record the caller holds locked; files used least recently are deleted.

        Raises ConfigError for more than the limit, StorageError when downloads of others hold the room too long.
        """
        if num_bytes > self.limit_bytes:
            raise ConfigError(
                f"cache_limit is {self.limit_bytes} bytes and {record_path.name[1:-5]} takes {num_bytes}: raise it"
            )
        deadline = time.monotonic() + timeout_s
        while True:
            self.folders[0].mkdir(parents=True, exist_ok=True)
            with locked(self.folders[0] / ".room.lock", timeout_s=math.inf):  # held for a look at the folder
                if self._make_room(record_path, num_bytes):
                    with record_path.open("r+b") as file:
                        Record(size=num_bytes, boot=boot_id(), ours=True).write(file)
                    touch(record_path)
                    return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{record_path.parent}: downloads under way hold all of cache_limit ({self.limit_bytes} bytes) "
                    f"for {timeout_s:g} s: raise it"
                )
            time.sleep(_POLL_S)

    def _make_room(self, wanted_by: Path, num_bytes: int) -> bool:
        """Delete files until `num_bytes` more fit; False when what is left is being downloaded."""
        used = 0
        ours: list[tuple[int, int, Path]] = []
        for entry in (entry for folder in self.folders if folder.is_dir() for entry in os.scandir(folder)):
            if not (entry.name.startswith(".") and entry.name.endswith(".lock")) or entry.path == str(wanted_by):
                continue
            record_path = Path(entry.path)
            record = Record.read(record_path)
            if record.size and not record.inode:
                if _is_locked(record_path):
                    used += record.size
                    continue
                record = Record.read(record_path)  # the download ended since, or its process is dead
            if record.owns(_file_of(record_path)):
                used += record.size
                ours.append((_last_use(entry, record), record.size, record_path))
        for _, size, record_path in sorted(ours):
            if used + num_bytes <= self.limit_bytes:
                break
            if _delete(record_path):
                used -= size
        return used + num_bytes <= self.limit_bytes


def _last_use(entry: os.DirEntry[str], record: Record) -> int:
    """When a file was used last, in nanoseconds since the machine was started; 0 if before, or not known."""
    stamp = entry.stat().st_mtime_ns
    known = record.boot == boot_id() and stamp <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return stamp if known else 0


def _file_of(record_path: Path) -> Path:
    return record_path.with_name(record_path.name[1 : -len(".lock")])


def _is_locked(path: Path) -> bool:
    with locked(path, timeout_s=0) as lock:
        return lock is None


def _delete(record_path: Path) -> bool:
    """Delete a file of ours and its record, unless somebody is at it."""
    with locked(record_path, timeout_s=0) as lock:
        if lock is None:
            return False
        path = _file_of(record_path)
        if Record.read(record_path).owns(path):
            path.unlink(missing_ok=True)
        record_path.unlink(missing_ok=True)
    return True


def least_room(sizes: NDArray[np.int64], samples: NDArray[np.int64], *, num_spans: int, span: int) -> int:
    """Bytes that let `num_spans` readers go through the shards in spans of `span` samples, each shard fetched once.

    sizes, samples: bytes and number of samples of each shard, int64[num_shards]. For any order of the shards: a span
    covers shards whole, at most those with the most bytes a sample, and one in part at either edge.
    """
    densest = np.argsort(-sizes / np.maximum(samples, 1), kind="stable")
    ends = np.cumsum(samples[densest])
    num_whole = int(np.searchsorted(ends, span, side="right"))
    covered = int(sizes[densest[:num_whole]].sum())
    if num_whole < len(sizes):
        left = span - int(ends[num_whole - 1] if num_whole else 0)
        covered += -(-int(sizes[densest[num_whole]]) * left // int(samples[densest[num_whole]]))
    return min(num_spans * (covered + 2 * int(sizes.max())), int(sizes.sum()))
