"""Rows of all files, folders and datasets named by a path, as one sequence. path -> [rows] -> rows by number."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...checks import plain_path
from ...converters.sources.detect import named_format
from ...converters.sources.files import LocalFile, StoredFile
from ...converters.sources.folders import columns_of
from ...converters.sources.listing import (
    README,
    check_numbered,
    check_once,
    configurations_of,
    data_files,
    files_of_configuration,
    files_of_split,
)
from ...converters.sources.specs import CHOICE, Spec, parse_spec
from ...errors import ConfigError, DataError, ObjectMissingError
from ...mds.index import INDEX_NAME
from ...storage.cache import LocalCache, Wanted
from ...storage.failures import disk_errors
from ...storage.fetch_config import FetchConfig
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage
from ...types import StoredObject
from .row_files import Lines, LocalSpans, RowFile, RowOrError, Shards, StoredSpans, WithColumns
from .row_groups import ParquetRows

EXTENSIONS = (".jsonl", ".parquet")
_FORMATS = ("jsonl", "parquet")
_BY_LIST = "in a list"  # name for several files of a folder, in errors
_NO_ROWS = ("text", "images")  # formats of files without rows, stored next to files of rows


class _Range(NamedTuple):
    file: RowFile
    first: int
    num_rows: int


class Rows:
    """Rows 0 <= number < num_rows.

    digest: identifies the content of the rows; old_digest: their digest in earlier releases; all_bytes: digest of the
    full content, see RowFile.
    """

    def __init__(self, ranges: Sequence[_Range]):
        self._ranges = [each for each in ranges if each.num_rows]
        self._firsts = np.cumsum([0, *(each.num_rows for each in self._ranges)])
        self.num_rows = int(self._firsts[-1])

    @cached_property
    def digest(self) -> str:
        return self._digest_of([each.file.digest for each in self._ranges])

    @cached_property
    def old_digest(self) -> str:
        return self._digest_of([each.file.old_digest for each in self._ranges])

    @cached_property
    def all_bytes(self) -> str | None:
        found = [each.file.all_bytes for each in self._ranges]
        known = [each for each in found if each is not None]
        return self._digest_of(known) if len(known) == len(found) else None

    def _digest_of(self, files: Sequence[str]) -> str:
        digest = xxhash.xxh3_128()
        for of_file, each in zip(files, self._ranges, strict=True):
            digest.update(f"{of_file}\0{each.first}\0{each.num_rows}\0".encode())
        return digest.hexdigest()

    def read(self, numbers: NDArray[np.int64]) -> Read:
        """Return the rows with these numbers, in this order; safe to call from several threads. StorageError."""
        if len(self._ranges) == 1:
            return Read(self._ranges[0].file.read(numbers + self._ranges[0].first), numbers, self)
        found: list[RowOrError] = [{}] * len(numbers)
        owners = np.searchsorted(self._firsts, numbers, side="right") - 1
        for owner in np.unique(owners).tolist():
            each, indices = self._ranges[owner], np.flatnonzero(owners == owner)
            inside = numbers[indices] - self._firsts[owner] + each.first
            for index, row in zip(indices.tolist(), each.file.read(inside), strict=True):
                found[index] = row
        return Read(found, numbers, self)

    def owner(self, number: int) -> tuple[RowFile, int]:
        """Return the file of a row, and the row's number in the file."""
        owner = int(np.searchsorted(self._firsts, number, side="right")) - 1
        each = self._ranges[owner]
        return each.file, number - int(self._firsts[owner]) + each.first

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


class Read(NamedTuple):
    """Rows that were read, their numbers, and their source."""

    rows: list[RowOrError]
    numbers: NDArray[np.int64]
    source: Rows

    def name(self, index: int) -> str:
        """Return a row's name for messages: its file, and its number in the file from 1."""
        file, number = self.source.owner(int(self.numbers[index]))
        return f"{file.name}: row {number + 1}"

    def folder(self, index: int) -> str | None:
        """Return the base of relative media paths in a row."""
        return self.source.owner(int(self.numbers[index]))[0].folder


def open_rows(
    path: str | Path | Sequence[str | Path], *, columns: Sequence[str] = (), cache_limit: int | str | None = None
) -> Rows:
    """Open the rows of .jsonl and .parquet files, folders (sorted by name), and MDS datasets, local or in stores.

    A folder with several splits or configurations needs a choice: folder?config=main&split=train. Each path, and a list
    of paths, may end in @[START:STOP]. columns: columns of Parquet files to read; all if empty. cache_limit: space on
    this node for copies of remote data, see BaseDataset.
    DataError, ConfigError, StorageError.
    """
    fetch = FetchConfig(cache_limit=cache_limit)
    copies = _Copies(fetch.limit_bytes)
    parts, whole = parse_paths(path)
    ranges: list[_Range] = []
    for part in parts:
        files = _files_of(part, columns, fetch, copies)
        ranges += Rows([_Range(file, 0, file.num_rows) for file in files]).sliced(part.rows).ranges
    return Rows(ranges).sliced(whole)


def _files_of(part: RowsOfFile, columns: Sequence[str], fetch: FetchConfig, copies: _Copies) -> list[RowFile]:
    open_file = partial(_open, columns=columns, copies=copies)
    path = part.path.rstrip("/") or part.path
    with disk_errors(path):
        is_file = path.endswith(EXTENSIONS) and ("://" in path or not Path(path).is_dir())
        if is_file:
            parent, _, key = path.rpartition("/") if "://" in path else (str(Path(path).parent), "", Path(path).name)
            store = open_storage(parent)
            return [open_file(store, store.stat(key), path)]
        if "://" not in path and Path(path).is_file():
            raise DataError(f"{path}: expected a name that ends in {' or '.join(EXTENSIONS)}: convert or rename it")
        spec = parse_spec(path) if CHOICE.fullmatch(path) else Spec(text=path, path=path)
        store = open_storage(spec.path)
        objects = store.list_objects("", linked=True) if isinstance(store, LocalStorage) else store.list_objects("")
        if any(each.key == INDEX_NAME for each in objects):
            return [Shards(spec.path, fetch)]
        chosen = _chosen(spec, store, objects)
        held = [each for each in chosen if each.num_bytes or not each.tag]  # without a tag the size may be unknown
        files = [(each.key, open_file(store, each, f"{spec.path}/{each.key}")) for each in held or chosen]
        return [WithColumns(file, named) if (named := columns_of(key)) else file for key, file in files]


def _chosen(spec: Spec, store: Storage, objects: Sequence[StoredObject]) -> list[StoredObject]:
    """Return the row files of a folder, for a split of a configuration, with the choice rules of `convert`."""
    if not objects:
        raise ObjectMissingError(f"{spec.path} does not exist, or is empty: check the path")
    if not any(each.key.lower().endswith(EXTENSIONS) for each in objects):
        raise DataError(
            f"{spec.path}: none of its {len(objects)} files has the extension {' or '.join(EXTENSIONS)}: name other "
            "files"
        )
    kept = [each for each in objects if named_format(each.key)[0] not in _NO_ROWS]
    readme = store.read(README) if any(each.key == README for each in objects) else None
    configurations = configurations_of([each.key for each in kept], readme)
    of_one, told = files_of_configuration(spec, kept, configurations)
    chosen = data_files(spec.path, of_one, insisted=None, together=_FORMATS, by=_BY_LIST)
    chosen = files_of_split(spec, chosen, told=told, several=f"several {_BY_LIST}")
    check_numbered(spec.path, chosen, by=_BY_LIST)
    check_once(spec.path, chosen, by=_BY_LIST)
    if other := next((each.key for each in chosen if not each.key.lower().endswith(EXTENSIONS)), None):
        raise DataError(
            f"{spec.path}: holds {other}, whose rows are not read: unpack or convert it, or name the files to be read "
            f"{_BY_LIST}"
        )
    return chosen


class _Copies:
    """Budget for copies of remote files on this node: at most `limit` bytes in total; None: no limit."""

    def __init__(self, limit: int | None):
        self._left = limit

    def fit(self, described: StoredObject) -> bool:
        if self._left is None:
            return True
        fits = described.num_bytes <= self._left
        self._left -= described.num_bytes if fits else 0
        return fits


def _open(store: Storage, described: StoredObject, name: str, *, columns: Sequence[str], copies: _Copies) -> RowFile:
    parent = described.key.rpartition("/")[0]
    folder = "/".join(filter(None, (store.url.rstrip("/"), parent)))
    path = store.folder / described.key if isinstance(store, LocalStorage) else None
    is_parquet = name.lower().endswith(".parquet")
    by_ranges = path is None and described.tag and (is_parquet or not copies.fit(described))
    if path is None and not by_ranges:
        path = _fetched(store, described)
    if is_parquet:
        file = StoredFile(store, described) if path is None else LocalFile(path)
        return ParquetRows(file, name=name, folder=folder, columns=columns)
    spans = StoredSpans(StoredFile(store, described)) if path is None else LocalSpans(path, name=name)
    return Lines(spans, name=name, folder=folder)


def _fetched(store: Storage, described: StoredObject) -> Path:
    """Return this node's copy of an object, shared by processes and runs."""

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


# Typed text -> files, folders and URLs, and slices of their rows. Pure.

_SLICE = re.compile(r"(.*)@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RowsOfFile:
    """A file, folder or URL, and the slice of its rows."""

    path: str
    rows: slice


def parse_paths(path: str | Path | Sequence[str | Path]) -> tuple[list[RowsOfFile], slice]:
    """Return the parts of a path, and a slice of their combined rows. Negative bounds count from the end.

    >>> parts, rows = parse_paths("[a.jsonl, b.parquet@[:-5]]@[0:100]")
    >>> [(part.path, part.rows.stop) for part in parts], rows.stop
    ([('a.jsonl', None), ('b.parquet', -5)], 100)
    """
    if not isinstance(path, str | Path | Sequence):
        raise ConfigError(f"prompt data must be a path, a URL or several in a list, got {path!r}")
    if not isinstance(path, str | Path):
        parts = [_part(str(each)) for each in path]
        whole = slice(None)
    else:
        text, whole = sliced_path(str(path).strip())
        if Path(text).exists() or not (text.startswith(("[", "(")) and text.endswith(("]", ")"))):
            return [RowsOfFile(_named(text, path), whole)], slice(None)
        parts = [_part(each) for each in _listed(text)]
    if not parts:
        raise ConfigError(f"{path!r} names no files: name a .jsonl or .parquet file, a folder, or a list of them")
    return parts, whole


def _part(text: str) -> RowsOfFile:
    path, rows = sliced_path(text)
    return RowsOfFile(_named(path, text), rows)


def _named(path: str, text: str | Path) -> str:
    if not path:
        raise ConfigError(f"{text!r} names no file: name a .jsonl or .parquet file, a folder, or a list of them")
    return plain_path("prompt data", path)


def sliced_path(text: str) -> tuple[str, slice]:
    """Return a path and the slice of rows in its suffix @[START:STOP]; all rows without a suffix."""
    if Path(text).exists():
        return text, slice(None)
    if matched := _SLICE.fullmatch(text):
        start, stop = (int(bound) if bound else None for bound in matched.groups()[1:])
        return matched[1], slice(start, stop)
    if re.search(r"@\[[^\]]*\]$", text):
        raise ConfigError(f"{text}: {text[text.rindex('@[') :]} is no slice of rows: write @[START:STOP]")
    return text, slice(None)


def _listed(text: str) -> list[str]:
    """Return the entries of a list written with Python's syntax, or without quotes."""
    try:
        return [str(each) for each in ast.literal_eval(text)]
    except (ValueError, SyntaxError):
        return [each.strip() for each in re.split(r",(?![^\[]*\])", text[1:-1]) if each.strip()]
