"""A long list of shards as files of this node, made once and mapped by every process. index.json -> files -> entries.

A table is a folder: a copy of index.json, in which entries are read when they are asked for; the position of each
shard's entry, its figures and its checksum; and what `_lmms/dataset.json` says besides its shards. All of the index is
checked when the table is made, and each entry once more when it is read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import LmmsStreamError, ShardError
from ..storage.locks import map_in_use
from ..types import Columns
from .index import DATASET_NAME, ShardInfo, ShardNames, check_version, hash_kinds, other_shards, parse_shard
from .shard_list import Identity, ShardList, identity_of

ENTRIES_NAME, ROWS_NAME, ABOUT_NAME = "index.json", "shards.npy", "about.json"
_ROWS = np.dtype(
    [
        ("start", "<u8"),  # of the entry, bytes from the beginning of the index
        ("length", "<u4"),
        ("samples", "<u4"),
        ("size", "<u4"),
        ("zip_size", "<u4"),
        ("xxh3_64", "<u8"),  # that dataset.json gives
        ("has_xxh3_64", "?"),
    ]
)
_CHUNK = 1 << 16  # rows that are collected as Python objects
_HEX = re.compile("[0-9a-f]{16}")


class About(NamedTuple):
    """What a table says of its dataset.

    digest: of index.json; identity: see Identity; dataset: dataset.json without its shards.
    """

    digest: str
    dataset: dict[str, Any] | None
    folders: list[str]
    columns: list[tuple[list[str], list[str], list[int | None]]]
    validate_hash: str | None
    identity: str


class ShardTable(ShardList):
    """The shards of a table in a folder, memory-mapped; pickled as the folder's path.

    The table counts as used (see locks.unused) while this object exists. ShardError for a table that is not whole,
    FileNotFoundError for one that is gone.
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
        """Of the shards of the whole table."""
        return {Columns(tuple(names), tuple(encodings), tuple(sizes)) for names, encodings, sizes in self.about.columns}

    @property
    def folders(self) -> set[str]:
        return set(self.about.folders)

    def first(self, num_shards: int) -> ShardTable:
        return ShardTable(self._folder, source=self._source, num_shards=num_shards)


def _open_table(folder: Path, source: str, num_shards: int) -> ShardTable:
    return ShardTable(folder, source=source, num_shards=num_shards)


def write_table(folder: Path, *, dataset: Path | None, validate_hash: str | None, source: str) -> None:
    """Make a table in a folder that holds the copy of index.json. dataset: a copy of dataset.json, if there is one.

    Raises as parse_index does.
    """
    try:
        with _mapped(folder / ENTRIES_NAME) as index:
            about, rows = _rows_of(index, dataset, validate_hash=validate_hash, source=source)
    except LmmsStreamError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{source}: not a valid MDS index ({error!r}): convert the dataset again") from error
    np.save(folder / ROWS_NAME, rows)
    (folder / ABOUT_NAME).write_text(json.dumps(about._asdict()))


def _rows_of(
    index: mmap.mmap, dataset: Path | None, *, validate_hash: str | None, source: str
) -> tuple[About, NDArray[Any]]:
    kinds, names, described = hash_kinds(validate_hash), ShardNames(source), _Described(dataset, source=source)
    identity, folders = Identity(), set[str]()
    columns: dict[Columns, None] = {}
    rest: dict[str, Any] = {}
    chunks: list[NDArray[Any]] = []
    rows: list[tuple[int, int, int, int, int, int, bool]] = []
    for member in members(index, array="shards"):
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
    about = About(
        digest=hashlib.blake2b(index, digest_size=16).hexdigest(),
        dataset=described.rest(),
        folders=sorted(folders),
        columns=[(list(each.names), list(each.encodings), list(each.sizes)) for each in columns],
        validate_hash=validate_hash,
        identity=identity.name(),
    )
    return about, np.concatenate([*chunks, np.array(rows, _ROWS)])


class _Described:
    """What dataset.json says of the shards, which must be those of the index, one after another."""

    def __init__(self, path: Path | None, *, source: str):
        self._source = source
        self._rest: dict[str, Any] | None = None if path is None else {}
        self._shards = iter(()) if path is None else self._read(path)

    def _read(self, path: Path) -> Iterator[Any]:
        assert self._rest is not None
        with _mapped(path) as data:
            for member in members(data, array="shards"):
                if member.is_item:
                    yield member.value
                else:
                    self._rest[member.name] = member.value

    def checksum_of(self, info: ShardInfo) -> str | None:
        """The xxh3_64 of the next shard, which must be this one; None where it has none."""
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
        """The other members, once all shards were asked for."""
        if next(self._shards, None) is not None:
            raise other_shards(self._source)
        return self._rest


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


# The members of a large JSON file one after another, in little memory. bytes of an index -> entries with offsets.

_WINDOW = 1 << 22  # bytes that are decoded together
_MAX_VALUE = 1 << 28  # bytes of one value; an entry of an index has some hundreds


class Member(NamedTuple):
    """A value of an object, or where it is the array that was asked for one of its items, with its place in the file.

    name: of the object's member. is_item: whether it is an item of the array. start, stop: offsets in bytes.
    """

    name: str
    value: Any
    is_item: bool
    start: int
    stop: int


def members(data: bytes | mmap.mmap, *, array: str, window: int = _WINDOW) -> Iterator[Member]:
    """The members of the object that a JSON file holds, those of the member `array` item by item.

    data: the file's bytes, best memory-mapped. window: bytes that are decoded together. Raises ValueError where it is
    not such an object.
    """
    walk = _Walk(data, window)
    walk.expect(b"{")
    if walk.take(b"}"):
        return walk.end()
    while True:
        name, _, _ = walk.value()
        if not isinstance(name, str):
            raise ValueError(f"a name was expected, found {str(name)[:40]!r}")
        walk.expect(b":")
        if name == array:
            for item in walk.items():
                yield Member(name, item[0], True, item[1], item[2])
        else:
            yield Member(name, *walk.value_of_member())
        if walk.take(b"}"):
            return walk.end()
        walk.expect(b",")


class _Walk:
    """A position in a file, and the text of the window after it."""

    def __init__(self, data: bytes | mmap.mmap, window: int):
        self._data, self._window = data, window
        self._at = 0  # offset of the position in the file
        self._text = ""
        self._in_text = 0  # and in the text
        self._is_ascii = True
        self._decode = json.JSONDecoder().raw_decode

    def _load(self, num_bytes: int) -> bool:
        """The text of the window from the position on; False at the end of the file."""
        window = self._data[self._at : self._at + num_bytes]
        for cut in range(4):  # a character may go on after the window
            try:
                self._text = window[: len(window) - cut].decode()
                break
            except UnicodeDecodeError:
                if cut == 3 or self._at + num_bytes >= len(self._data):
                    raise
        self._in_text = 0
        self._is_ascii = self._text.isascii()
        return bool(self._text)

    def _next(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._in_text < len(self._text):
                character = self._text[self._in_text]
                if character not in " \t\n\r":
                    return character
                self._in_text += 1
                self._at += 1
            if not self._load(self._window):
                return ""

    def take(self, mark: bytes) -> bool:
        """Step over a mark if it comes next."""
        if self._next() != mark.decode():
            return False
        self._in_text += 1
        self._at += 1
        return True

    def expect(self, mark: bytes) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark.decode()!r} was expected at byte {self._at}, found {self._next()!r}")

    def end(self) -> None:
        if self._next():
            raise ValueError(f"the end was expected at byte {self._at}, found {self._next()!r}")

    def value(self) -> tuple[Any, int, int]:
        """The next value, its first and one-past-last byte."""
        self._next()
        size = self._window
        while True:
            try:
                value, end = self._decode(self._text, self._in_text)
                if end + 2 < len(self._text) or self._at_end():  # a number may go on after the window: 1|e+|3
                    break
            except json.JSONDecodeError:
                if self._at_end() or size > _MAX_VALUE:
                    raise
            size = size if self._in_text else 2 * size
            self._load(size)
        start = self._at
        text = self._text[self._in_text : end]
        self._at += len(text) if self._is_ascii else len(text.encode())
        self._in_text = end
        return value, start, self._at

    def _at_end(self) -> bool:
        left = self._text[self._in_text :]
        return self._at + (len(left) if self._is_ascii else len(left.encode())) >= len(self._data)

    def items(self) -> Iterator[tuple[Any, int, int]]:
        """The items of the array that comes next."""
        self.expect(b"[")
        if self.take(b"]"):
            return
        while True:
            yield self.value()
            if self.take(b"]"):
                return
            self.expect(b",")

    def value_of_member(self) -> tuple[Any, bool, int, int]:
        value, start, stop = self.value()
        return value, False, start, stop
