"""Pack counts of plans, kept in a folder of the dataset's copy on this node."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..storage.disk_errors import disk_errors
from ..storage.locks import file_of, lock_of, locked
from ..storage.temporaries import leftovers, remove_leftovers, temporary_name

KEPT_FILES = 256  # those used last: sixteen epochs of sixteen plans, say
WAIT_S = 600.0  # for another process that counts; one that stands still for longer is not waited for


class PackCountsFolder(MutableMapping[str, NDArray[np.int64]]):
    """Pack counts of plans as files `<key>.npy` in a folder (see PackPlan's counts_cache).

    Of many files those that were used last stay.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def __getitem__(self, key: str) -> NDArray[np.int64]:
        path = self._folder / f"{key}.npy"
        try:
            counts = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # missing or cut short: counted again
            raise KeyError(key) from None
        with suppress(OSError):  # of a folder that cannot be written, nothing is removed either
            os.utime(path)
        return np.asarray(counts, dtype=np.int64)

    def __setitem__(self, key: str, counts: NDArray[np.int64]) -> None:
        path = self._folder / f"{key}.npy"
        with disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(path)
            try:
                with temporary.open("wb") as file:
                    np.save(file, counts)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._remove_old()

    def __delitem__(self, key: str) -> None:
        (self._folder / f"{key}.npy").unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._folder.glob("[!.]*.npy"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @contextmanager
    def counting(self, key: str) -> Iterator[None]:
        """Held by the one of all processes that counts the packs of a key; the others come in when that is done.

        It is the kernel's lock, so that nobody waits for a process that was killed.
        """
        path = self._folder / f"{key}.npy"
        lock_path = lock_of(path)
        with disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(lock_path, timeout_s=WAIT_S) as lock:
                if lock is not None:
                    remove_leftovers(path)
                try:
                    yield
                finally:
                    if lock is not None:
                        lock_path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """Remove the files that were used least recently, and what killed processes left."""
        used = []
        for path in self._folder.glob("[!.]*.npy"):
            with suppress(FileNotFoundError):  # another process removes the same
                used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used, reverse=True)[KEPT_FILES:]:
            path.unlink(missing_ok=True)
        unfinished = {*leftovers(self._folder), *(file_of(path) for path in self._folder.glob(".*.npy.lock"))}
        for path in unfinished:
            lock_path = lock_of(path)
            with locked(lock_path, timeout_s=0) as lock:
                if lock is not None:  # else its process is at it
                    remove_leftovers(path)
                    lock_path.unlink(missing_ok=True)
