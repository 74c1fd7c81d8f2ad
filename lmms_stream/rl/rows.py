"""The rows of all files, folders and datasets that a path names, as one sequence. path -> [rows] -> rows by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import DataError, ObjectMissingError
from ..mds.index import INDEX_NAME
from ..storage.cache import LocalCache, Wanted
from ..storage.disk_errors import disk_errors
from ..storage.local import LocalStorage
from ..storage.storage import Storage, open_storage
from ..types import StoredObject
from .paths import Part, parse_paths
from .row_files import Lines, RowFile, RowOrError, Shards
from .row_groups import RowGroups

EXTENSIONS = (".jsonl", ".parquet")


class Read(NamedTuple):
    """What was read of a row, and the file that it is of."""

    row: RowOrError
    file: RowFile


class _Range(NamedTuple):
    file: RowFile
    first: int
    num_rows: int


class Rows:
    """Rows 0 <= number < num_rows; digest: names what they are, however they are named."""

    def __init__(self, ranges: Sequence[_Range]):
        self._ranges = [each for each in ranges if each.num_rows]
        self._firsts = np.cumsum([0, *(each.num_rows for each in self._ranges)])
        self.num_rows = int(self._firsts[-1])
        digest = xxhash.xxh3_128()
        for each in self._ranges:
            digest.update(f"{each.file.digest}\0{each.first}\0{each.num_rows}\0")
        self.digest = digest.hexdigest()

    def read(self, numbers: NDArray[np.int64]) -> list[Read]:
        """The rows of these numbers, in this order; threads may call it at once. StorageError."""
        found: list[Read | None] = [None] * len(numbers)
        owners = np.searchsorted(self._firsts, numbers, side="right") - 1
        for owner in np.unique(owners).tolist():
            each, indices = self._ranges[owner], np.flatnonzero(owners == owner)
            inside = numbers[indices] - self._firsts[owner] + each.first
            for index, row in zip(indices.tolist(), each.file.read(inside), strict=True):
                found[index] = Read(row, each.file)
        return [each for each in found if each is not None]

    def name(self, number: int) -> str:
        """Of a row, for messages: its file, and which of its rows it is, from 1."""
        owner = int(np.searchsorted(self._firsts, number, side="right")) - 1
        each = self._ranges[owner]
        return f"{each.file.name}: row {number - int(self._firsts[owner]) + each.first + 1}"

    def sliced(self, rows: slice) -> Rows:
        start, stop, _ = rows.indices(self.num_rows)
        ranges = []
        for each, first in zip(self._ranges, self._firsts.tolist(), strict=False):
            begin, end = max(start, first), min(stop, first + each.num_rows)
            if begin < end:
                ranges.append(_Range(each.file, each.first + begin - first, end - begin))
        return Rows(ranges)

    @property
    def ranges(self) -> Sequence[_Range]:
        return self._ranges


def open_rows(path: str | Path | Sequence[str | Path], *, columns: Sequence[str] = ()) -> Rows:
    """The rows of .jsonl and .parquet files, folders of them (sorted by name), and MDS datasets, here or in stores.

    Each may end in @[START:STOP], and so may a list of them. Files in stores are fetched to this node's cache first.
    columns: those of Parquet files that are read; all where none are named. DataError, ConfigError, StorageError.
    """
    parts, whole = parse_paths(path)
    ranges: list[_Range] = []
    for part in parts:
        files = _files_of(part, columns)
        ranges += Rows([_Range(file, 0, file.num_rows) for file in files]).sliced(part.rows).ranges
    return Rows(ranges).sliced(whole)


def _files_of(part: Part, columns: Sequence[str]) -> list[RowFile]:
    path = part.path.rstrip("/") or part.path
    with disk_errors(path):
        is_file = path.endswith(EXTENSIONS) and ("://" in path or not Path(path).is_dir())
        if is_file:
            parent, _, key = path.rpartition("/") if "://" in path else (str(Path(path).parent), "", Path(path).name)
            store = open_storage(parent)
            return [_open(store, store.stat(key), path, columns)]
        if "://" not in path and Path(path).is_file():
            raise DataError(f"{path}: expected a name that ends in {' or '.join(EXTENSIONS)}: convert or rename it")
        store = open_storage(path)
        objects = store.list_objects("")
        if any(each.key == INDEX_NAME for each in objects):
            return [Shards(path)]
        chosen = [each for each in objects if each.key.endswith(EXTENSIONS)]
        if not chosen and not objects:
            raise ObjectMissingError(f"{path} does not exist, or is empty: check the path")
        if not chosen:
            raise DataError(f"{path}: none of its {len(objects)} files ends in {' or '.join(EXTENSIONS)}: name others")
        return [_open(store, each, f"{path}/{each.key}", columns) for each in chosen]


def _open(store: Storage, described: StoredObject, name: str, columns: Sequence[str]) -> RowFile:
    parent = described.key.rpartition("/")[0]
    folder = "/".join(filter(None, (store.url.rstrip("/"), parent)))
    if isinstance(store, LocalStorage):
        path = store.folder / described.key
    else:
        path = _fetched(store, described)
    if name.endswith(".parquet"):
        return RowGroups(path, name=name, folder=folder, columns=columns)
    return Lines(path, name=name, folder=folder)


def _fetched(store: Storage, described: StoredObject) -> Path:
    """This node's copy of an object, which processes and runs share."""

    def valid(path: Path) -> bool:
        return path.stat().st_size == described.num_bytes

    wanted = Wanted(
        name=described.key,
        identity=f"{described.num_bytes} bytes",
        num_bytes=described.num_bytes,
        valid=valid,
        by_size=True,
    )
    path = LocalCache(store).fetch(described.key, wanted)
    assert path is not None
    return path
