"""A long list of shards in files of this node, made once and mapped by every process. index.json -> files -> entries.

A table is a folder with a copy of index.json; position, figures and checksum of each shard's entry; and the contents of
`_lmms/dataset.json` without shards. The whole index is checked when the table is made. An entry is checked again
whenever it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, LmmsStreamError, ShardError
from ..processors.json_text import JsonScanner
from ..storage.locks import map_in_use
from ..types import Columns
from .index import DATASET_NAME, INDEX_NAME, ShardInfo, ShardNames, check_version, hash_kinds, other_shards, parse_shard
from .shard_list import Identity, ShardList, identity_of

ENTRIES_NAME, ROWS_NAME, ABOUT_NAME = "index.json", "shards.npy", "about.json"
_ROWS = np.dtype(
    [
        ("start", "<u8"),  # of the entry, bytes from the beginning of the index
        ("length", "<u4"),
        ("samples", "<u4"),
        ("size", "<u4"),
        ("zip_size", "<u4"),
        ("xxh3_64", "<u8"),  # from dataset.json
        ("has_xxh3_64", "?"),
    ]
)
_CHUNK = 1 << 16  # rows to collect as Python objects
_HEX = re.compile("[0-9a-f]{16}")


class About(NamedTuple):
    """Description of a table's dataset.

    digest: of index.json; identity: see Identity; dataset: dataset.json without the shards.
    """

    digest: str
    dataset: dict[str, Any] | None
    folders: list[str]
    columns: list[tuple[list[str], list[str], list[int | None]]]
    validate_hash: str | None
    identity: str


class ShardTable(ShardList):
    """Shards of a table in a folder, memory-mapped; pickled as the folder's path.

    The table counts as used (see locks.unused) while this object exists. ShardError for a damaged table,
    FileNotFoundError for a removed table.
    """

    def __init__(self, folder: Path, *, source: str, num_shards: int | None = None):
        self._folder, self._source = folder, source
        try:
            self._entries = map_in_use(folder / ENTRIES_NAME)
            rows = np.load(folder / ROWS_NAME, mmap_mode="r")
            self.about = About(**json.loads((folder / ABOUT_NAME).read_bytes()))
        except (ValueError, TypeError, EOFError) as error:
            raise ShardError(
                f"{folder} does not hold the index of {source} ({error!r}): delete this folder, it is made again"
            ) from error
        self._num_listed, self._rows = len(rows), rows[:num_shards]
        self._kinds = hash_kinds(self.about.validate_hash)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_table, (self._folder, self._source, len(self))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ShardInfo]: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | Sequence[ShardInfo]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        row = self._rows[index]
        start = int(row["start"])
        try:
            entry = json.loads(self._entries[start : start + int(row["length"])])
            info = parse_shard(entry, self._kinds, source=self._source)
        except LmmsStreamError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShardError(
                f"{self._folder} does not hold shard {index} of {self._source} ({error!r}): delete this folder, it is "
                "made again"
            ) from error
        return replace(info, checksum=f"xxh3_64:{int(row['xxh3_64']):016x}") if row["has_xxh3_64"] else info

    @property
    def samples(self) -> NDArray[np.int64]:
        return np.asarray(self._rows["samples"], np.int64)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.asarray(self._rows["size"], np.int64)

    @property
    def zip_sizes(self) -> NDArray[np.int64]:
        return np.asarray(self._rows["zip_size"], np.int64)

    @property
    def index_bytes(self) -> int:
        return len(self._entries)

    @property
    def identity(self) -> str:
        return self.about.identity if len(self) == self._num_listed else identity_of(self)

    @property
    def columns(self) -> set[Columns]:
        """Columns of the shards of the whole table."""
        return {Columns(tuple(names), tuple(encodings), tuple(sizes)) for names, encodings, sizes in self.about.columns}

    @property
    def folders(self) -> set[str]:
        return set(self.about.folders)

    def first(self, num_shards: int) -> ShardTable:
        return ShardTable(self._folder, source=self._source, num_shards=num_shards)


def _open_table(folder: Path, source: str, num_shards: int) -> ShardTable:
    return ShardTable(folder, source=source, num_shards=num_shards)


def write_table(folder: Path, *, dataset: Path | None, validate_hash: str | None, source: str) -> None:
    """Make a table in a folder with a copy of index.json. dataset: a copy of dataset.json, if the dataset has the file.

    Raises the errors of parse_index.
    """
    try:
        with (folder / ENTRIES_NAME).open("rb", buffering=0) as index:
            about, rows = _rows_of(index, dataset, validate_hash=validate_hash, source=source)
    except DataError as error:
        raise ShardError(f"{source}: not a valid MDS index ({error}): convert the dataset again") from error
    except LmmsStreamError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{source}: not a valid MDS index ({error!r}): convert the dataset again") from error
    np.save(folder / ROWS_NAME, rows)
    (folder / ABOUT_NAME).write_text(json.dumps(about._asdict()))


def _rows_of(
    index: io.FileIO, dataset: Path | None, *, validate_hash: str | None, source: str
) -> tuple[About, NDArray[Any]]:
    kinds, names, described = hash_kinds(validate_hash), ShardNames(source), _Described(dataset, source=source)
    identity, folders = Identity(), set[str]()
    columns: dict[Columns, None] = {}
    rest: dict[str, Any] = {}
    chunks: list[NDArray[Any]] = []
    rows: list[tuple[int, int, int, int, int, int, bool]] = []
    for member in members(index, array="shards", name=INDEX_NAME):
        if not member.is_item:
            rest[member.name] = member.value
            continue
        info = parse_shard(member.value, kinds, source=source)
        names.add(info)
        folders.add(info.name.rpartition("/")[0] or ".")
        columns[info.columns] = None
        checksum = described.checksum_of(info)
        taken = None if validate_hash is not None else checksum
        identity.add(info.num_samples, info.size, info.checksum if taken is None else f"xxh3_64:{taken}")
        sizes = info.num_samples, info.size, info.zip_size or 0
        rows.append((member.start, member.stop - member.start, *sizes, int(taken or "0", 16), taken is not None))
        if len(rows) == _CHUNK:
            chunks.append(np.array(rows, _ROWS))
            rows.clear()
    check_version(rest["version"], source=source)
    names.check()
    index.seek(0)
    about = About(
        digest=hashlib.file_digest(index, partial(hashlib.blake2b, digest_size=16)).hexdigest(),
        dataset=described.rest(),
        folders=sorted(folders),
        columns=[(list(each.names), list(each.encodings), list(each.sizes)) for each in columns],
        validate_hash=validate_hash,
        identity=identity.name(),
    )
    return about, np.concatenate([*chunks, np.array(rows, _ROWS)])


class _Described:
    """Entries of shards in dataset.json, which must have the index's shards in the same order."""

    def __init__(self, path: Path | None, *, source: str):
        self._source = source
        self._rest: dict[str, Any] | None = None if path is None else {}
        self._shards = iter(()) if path is None else self._read(path)

    def _read(self, path: Path) -> Iterator[Any]:
        assert self._rest is not None
        with path.open("rb", buffering=0) as file:
            for member in members(file, array="shards", name=DATASET_NAME):
                if member.is_item:
                    yield member.value
                else:
                    self._rest[member.name] = member.value

    def checksum_of(self, info: ShardInfo) -> str | None:
        """Return the xxh3_64 of the next shard, which must be this shard; None without a checksum."""
        if self._rest is None:
            return None
        shard = next(self._shards, None)
        if shard is None or (shard["name"], shard["size"], shard["num_samples"]) != (
            info.name,
            info.size,
            info.num_samples,
        ):
            raise other_shards(self._source)
        checksum: str | None = shard.get("xxh3_64")
        if checksum is not None and not _HEX.fullmatch(checksum):
            raise ValueError(f"{DATASET_NAME} gives the checksum {str(checksum)[:40]!r}")
        return checksum

    def rest(self) -> dict[str, Any] | None:
        """Return the other members, after the last shard."""
        if next(self._shards, None) is not None:
            raise other_shards(self._source)
        return self._rest


# The members of a large JSON file in turn, with little memory. bytes of an index -> entries with offsets.


class Member(NamedTuple):
    """A member of a JSON object, or an item of the requested array, with its position in the file.

    name: of the object's member. is_item: whether the value is an item of the array. start, stop: offsets in bytes.
    """

    name: str
    value: Any
    is_item: bool
    start: int
    stop: int


def members(stream: io.RawIOBase, *, array: str, name: str) -> Iterator[Member]:
    """Yield the members of the object in a JSON file; of the member `array`, yield the items.

    name: of the file, for errors. Raises ValueError for a file with other content.
    """
    scanner = JsonScanner(stream, name=name)
    for member in scanner.members():
        is_array = member == array
        for text in scanner.elements() if is_array else (scanner.value(b"}"),):
            yield Member(member, json.loads(text), is_array, scanner.offset - len(text), scanner.offset)
    scanner.end()
