"""Parse and check the shards of an index.json (version 2). bytes -> entries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from ..errors import ConfigError, LmmsStreamError, ObjectMissingError, ShardError, if_lfs_pointer
from ..storage.local import LocalStorage
from ..storage.storage import Storage
from ..types import Columns
from .decoding import COMPRESSIONS, check_encoding

INDEX_NAME = "index.json"
DATASET_NAME = "_lmms/dataset.json"  # a converter's description of the dataset; written last
MAX_NAME_BYTES = 200  # of a name between slashes: a file system's 255, less the additions of temporary names
MAX_NAMES = 8  # folders in the name of a shard: merged datasets may be merged again
SPLIT_FORMATS = ("json", "csv", "tsv", "xsv")  # shards of two files: samples, and offsets of samples
HASHES = sorted(
    xxhash.algorithms_available | {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")},
    key=lambda name: (name != "xxh3_64", not name.startswith("xxh"), name),  # the fastest first
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """Entry of index.json: file names, sizes in bytes, checksums ("algorithm:hex") and columns.

    format: "mds", or a format with a second file (meta) for the offsets of samples. entry: the unchanged JSON value.
    """

    name: str
    size: int
    checksum: str | None
    num_samples: int
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    compression: str | None = None
    zip_name: str | None = None
    zip_size: int | None = None
    zip_checksum: str | None = None
    format: str = "mds"
    meta: ShardInfo | None = None
    entry: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def columns(self) -> Columns:
        return Columns(self.column_names, self.column_encodings, self.column_sizes)

    @property
    def encodings(self) -> dict[str, str]:
        """Column -> MDS encoding, in stored order."""
        return dict(zip(self.column_names, self.column_encodings, strict=True))

    @property
    def shown_columns(self) -> str:
        """Text of the columns for errors, equal for shards that fit in a dataset together."""
        columns = zip(self.column_names, self.column_encodings, self.column_sizes, strict=True)
        return ", ".join(f"{name} ({code}{'' if size is None else f', {size} bytes'})" for name, code, size in columns)


def parse_index(
    data: bytes,
    *,
    source: str,
    dataset: bytes | None = None,
    validate_hash: str | None = None,
    refused: dict[str, str] | None = None,
) -> list[ShardInfo]:
    """Return the shards of an index.json; ShardError for an unsafe index.

    dataset: content of `_lmms/dataset.json`, if present: sizes must agree, and its checksums take precedence.
    validate_hash: kind of checksum to use instead of the fastest; ConfigError for a shard without this kind.
    refused: receives undecodable columns with the reason; without `refused` an undecodable column is an error.
    """
    try:
        index = json.loads(data)
        check_version(index["version"], source=source)
        kinds = hash_kinds(validate_hash)
        infos = [parse_shard(entry, kinds, source=source, refused=refused) for entry in index["shards"]]
        names = ShardNames(source)
        for info in infos:
            names.add(info)
        names.check()
        described = None if dataset is None else _with_checksums(infos, json.loads(dataset), source=source)
        return infos if described is None or validate_hash is not None else described
    except LmmsStreamError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if problem := if_lfs_pointer(data):
            raise ShardError(f"{source} {problem}") from error
        raise ShardError(f"{source}: not a valid MDS index ({error!r}): convert the dataset again") from error


def check_version(version: Any, *, source: str) -> None:
    """Raise ShardError for an index of another version than 2."""
    if version != 2:
        raise ShardError(f"{source}: MDS version {version!r} is not supported, expected 2")


def hash_kinds(validate_hash: str | None) -> Sequence[str]:
    """Kinds of checksums in order of preference; the first kind present in an entry is used."""
    return HASHES if validate_hash is None else [validate_hash]


def parse_shard(
    entry: dict[str, Any], kinds: Sequence[str], *, source: str, refused: dict[str, str] | None = None
) -> ShardInfo:
    """Parse and check an entry of an index; ShardError, or Python's errors for a value of a wrong type.

    kinds: of checksums, see hash_kinds. source: the index, for errors. refused: see parse_index.
    """
    if entry["format"] in SPLIT_FORMATS:
        return _parse_split_shard(entry, kinds, source=source)
    if entry["format"] != "mds":
        raise ShardError(
            f"{source}: shard format {entry['format']!r} is not supported, expected one of mds, "
            f"{', '.join(SPLIT_FORMATS)}"
        )
    info = _parse_file(entry, "data", kinds, source=source)
    if not info.num_samples <= info.size // 4 - 2:
        raise ShardError(
            f"{source}: shard {info.name!r} has {info.num_samples!r} samples in the index, which do not fit into its "
            f"{info.size} bytes: convert the dataset again"
        )
    sizes = entry["column_sizes"]
    counts = len(entry["column_names"]), len(entry["column_encodings"]), len(sizes)
    if len(set(counts)) > 1:
        raise ShardError(
            f"{source}: shard {info.name!r} lists {counts[0]} column names, {counts[1]} encodings and "
            f"{counts[2]} sizes: convert the dataset again"
        )
    for name, encoding, size in zip(entry["column_names"], entry["column_encodings"], sizes, strict=True):
        try:
            check_encoding(encoding, column=name, source=source)
        except ShardError as error:
            if refused is None or not isinstance(encoding, str):
                raise
            refused[str(name)] = str(error)
        if size is not None and (type(size) is not int or not 0 <= size < 1 << 32):
            raise ShardError(f"{source}: column {name!r} gives a size of {size!r} bytes: convert the dataset again")
    return replace(
        info,
        column_names=tuple(str(name) for name in entry["column_names"]),
        column_encodings=tuple(entry["column_encodings"]),
        column_sizes=tuple(sizes),
    )


def decoded_columns(info: ShardInfo) -> list[str]:
    """Names of a shard's decodable columns: all columns, unless parse_index refused some."""

    def is_decoded(encoding: str) -> bool:
        try:
            check_encoding(encoding, column="", source="")
        except ShardError:
            return False
        return True

    return [name for name, encoding in info.encodings.items() if is_decoded(encoding)]


def _parse_split_shard(entry: dict[str, Any], kinds: Sequence[str], *, source: str) -> ShardInfo:
    """Parse a shard of two files, with text columns named by the format."""
    columns = (
        entry["columns"]
        if entry["format"] == "json"
        else dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    )
    for name, encoding in columns.items():
        if encoding not in ("str", "int", "float"):
            raise ShardError(f"{source}: column {name!r} has the encoding {encoding!r}, expected str, int or float")
    for name in ("newline", "separator") if entry["format"] == "xsv" else ("newline",):
        if not isinstance(entry[name], str) or not entry[name]:
            raise ShardError(f"{source}: shards of {entry['format']} have the {name} {entry[name]!r}, expected a text")
    return replace(
        _parse_file(entry, "data", kinds, source=source),
        column_names=tuple(columns),
        column_encodings=tuple(columns.values()),
        column_sizes=(None,) * len(columns),
        format=entry["format"],
        meta=_parse_file(entry, "meta", kinds, source=source),
    )


def _parse_file(entry: dict[str, Any], which: str, kinds: Sequence[str], *, source: str) -> ShardInfo:
    """Parse a file of a shard ("data" or "meta"): names, sizes, checksums and compression."""
    raw, zipped = entry[f"raw_{which}"], entry.get(f"zip_{which}")
    smallest = 1 if which == "data" and entry["format"] in SPLIT_FORMATS else 8  # bytes of a number and an offset
    for data in (raw, zipped):
        if data is not None:
            name, size = data["basename"], data["bytes"]
            if not is_safe_name(name) or "_lmms" in name.split("/"):
                raise ShardError(
                    f"{source}: shard name {name!r} is not a plain path below the dataset: refused; correct the index, "
                    "whose names are relative to its folder"
                )
            if type(size) is not int or not smallest <= size < 1 << 32:
                raise ShardError(
                    f"{source}: shard {name!r} gives a size of {size!r} bytes, a shard has from {smallest} bytes to "
                    "4 GiB"
                )
    num_samples, compression = entry["samples"], entry.get("compression")
    if type(num_samples) is not int or num_samples < 0:
        raise ShardError(
            f"{source}: shard {raw['basename']!r} has {num_samples!r} samples in the index, which do not fit into its "
            f"{raw['bytes']} bytes: convert the dataset again"
        )
    if (zipped is None) != (compression is None) or (
        compression is not None and compression.partition(":")[0] not in COMPRESSIONS
    ):
        raise ShardError(
            f"{source}: shard {raw['basename']!r} has the compression {compression!r}, expected one of "
            f"{', '.join(COMPRESSIONS)}, or none and no zip_{which}"
        )
    return ShardInfo(
        name=raw["basename"],
        size=raw["bytes"],
        checksum=_checksum(raw, kinds, source=source),
        num_samples=num_samples,
        column_names=(),
        column_encodings=(),
        column_sizes=(),
        compression=compression,
        zip_name=zipped["basename"] if zipped else None,
        zip_size=zipped["bytes"] if zipped else None,
        zip_checksum=_checksum(zipped, kinds, source=source) if zipped else None,
        entry=entry,
    )


def is_safe_name(name: Any) -> bool:
    """Whether a name from a dataset is a plain path below the dataset's folder, without hidden files.

    >>> [is_safe_name(name) for name in ("a/shard.00000.mds", "../a", "/a", "a//b", ".a", "a/.b")]
    [True, False, False, False, False, False]
    """
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    names = name.split("/")
    return len(names) <= MAX_NAMES and all(
        each and not each.startswith(".") and len(each.encode()) <= MAX_NAME_BYTES for each in names
    )


class ShardNames:
    """Names of an index's files, without duplicates. Raises ShardError."""

    def __init__(self, source: str):
        self._source = source
        self._names = {INDEX_NAME}
        self._folders: dict[str, str] = {}  # and a file in each

    def add(self, info: ShardInfo) -> None:
        """Add the names of a shard's files; ShardError for a name already added."""
        for each in (info,) if info.meta is None else (info, info.meta):
            for name in (each.name, each.zip_name):
                if name in self._names:
                    raise ShardError(f"{self._source}: {name!r} is named twice: convert the dataset again")
                if name is not None:
                    self._names.add(name)
                    if "/" in name:
                        self._folders.setdefault(name.rpartition("/")[0], name)

    def check(self) -> None:
        """Raise ShardError, after the last shard, if a file is also a folder of another file."""
        for folder, name in self._folders.items():
            for each in (folder, *map(str, PurePosixPath(folder).parents)):
                if each in self._names:
                    raise ShardError(f"{self._source}: {each!r} is a shard, and a folder of {name!r}: refused")


def _checksum(data: Mapping[str, Any], kinds: Sequence[str], *, source: str) -> str | None:
    """Checksum of the first kind present; None if the writer wrote no checksum."""
    hashes = data.get("hashes") or {}
    for algorithm in kinds:
        if algorithm in hashes and algorithm in HASHES:
            return f"{algorithm}:{hashes[algorithm]}"
    if kinds is not HASHES:
        raise ConfigError(
            f"{source}: shard {data['basename']!r} has no checksum of the kind validate_hash asks for ({kinds[0]}): "
            f"choose one of {', '.join(hashes) or 'none, which it has'}"
        )
    if hashes:
        raise ShardError(
            f"{source}: shard {data['basename']!r} has checksums of unknown kinds ({', '.join(map(str, hashes))}): "
            f"expected one of {', '.join(HASHES)}"
        )
    return None


def _with_checksums(infos: Sequence[ShardInfo], dataset: Any, *, source: str) -> list[ShardInfo]:
    described = [(shard["name"], shard["size"], shard["num_samples"]) for shard in dataset["shards"]]
    if described != [(info.name, info.size, info.num_samples) for info in infos]:
        raise other_shards(source)
    return [
        replace(info, checksum=f"xxh3_64:{shard['xxh3_64']}") if "xxh3_64" in shard else info
        for info, shard in zip(infos, dataset["shards"], strict=True)
    ]


def other_shards(source: str) -> ShardError:
    """Error for an index and a dataset.json of different conversions."""
    return ShardError(
        f"{source} and {DATASET_NAME} list other shards: they are of two conversions; convert the dataset again"
    )


def new_digest(algorithm: str, data: bytes = b"") -> Any:
    """Return a hash object of hashlib or xxhash for one of HASHES, updated with data."""
    return getattr(xxhash, algorithm)(data) if algorithm.startswith("xxh") else hashlib.new(algorithm, data)


def file_matches(path: Path, *, size: int | None, checksum: str | None) -> bool:
    """Whether a file has this size in bytes and this checksum ("algorithm:hex"); None is not checked."""
    if not path.is_file() or (size is not None and path.stat().st_size != size):
        return False
    if checksum is None:
        return True
    algorithm, _, expected = checksum.partition(":")
    digest = new_digest(algorithm)
    piece = memoryview(bytearray(1 << 18))  # one buffer for all reads: memory freed by threads is not given back
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return bool(digest.hexdigest() == expected)


# The small files that describe a stored dataset: index.json, and dataset.json if a conversion wrote it.


_MAX_NAMED = 3  # folders in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """index, dataset: contents of the files; dataset is None for a dataset of another program."""

    storage: Storage
    index: bytes
    dataset: bytes | None

    def shards(self, *, refused: dict[str, str] | None = None) -> tuple[ShardInfo, ...]:
        """Parse the index; ShardError for an unsafe index. refused: see parse_index."""
        source = f"{self.storage.url}/{INDEX_NAME}"
        return tuple(parse_index(self.index, source=source, dataset=self.dataset, refused=refused))


def read_listing(storage: Storage) -> Listing | None:
    """Read the describing files of a dataset; None without an index.json."""
    index = read_if_there(storage, INDEX_NAME)
    if index is None:
        return None
    return Listing(storage=storage, index=index, dataset=read_if_there(storage, DATASET_NAME))


def no_dataset(storage: Storage) -> ObjectMissingError:
    """Error for a store without an index.json; for a local folder with the names of datasets one level below."""
    missing = f"{storage.url} holds no dataset ({INDEX_NAME} is missing)"
    local = storage.folder.glob(f"*/{INDEX_NAME}") if isinstance(storage, LocalStorage) else ()
    below = sorted(path.parent.name for path in local)
    if not below:
        return ObjectMissingError(f"{missing}: check the path or URL, or write it with lmms-stream convert")
    named = ", ".join(below[:_MAX_NAMED]) + (", …" if len(below) > _MAX_NAMED else "")
    return ObjectMissingError(
        f"{missing}, but folders in it do ({named}): name one of these, or make one dataset of several with "
        f"lmms-stream merge {storage.url} {storage.url}/{below[0]} …"
    )


def read_if_there(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name)
    except ObjectMissingError:
        return None
