"""Pack counts of plans, kept in a folder of the dataset's copy on this node."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..storage.disk_errors import disk_errors
from ..storage.locks import locked
from ..storage.temporaries import remove_leftovers, temporary_name


class PackCountsFolder(MutableMapping[str, NDArray[np.int64]]):
    """Pack counts of plans as files `<key>.npy` in a folder (see PackPlan's counts_cache)."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __getitem__(self, key: str) -> NDArray[np.int64]:
        try:
            counts = np.load(self._folder / f"{key}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # missing or cut short: counted again
            raise KeyError(key) from None
        return np.asarray(counts, dtype=np.int64)

    def __setitem__(self, key: str, counts: NDArray[np.int64]) -> None:
        path = self._folder / f"{key}.npy"
        with disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(f".{path.name}.lock"), timeout_s=0) as lock:
                if lock is None:  # another process is about to write the same
                    return
                remove_leftovers(path)
                temporary = temporary_name(path)
                with temporary.open("wb") as file:
                    np.save(file, counts)
                temporary.replace(path)

    def __delitem__(self, key: str) -> None:
        (self._folder / f"{key}.npy").unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._folder.glob("[!.]*.npy"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
