"""Validated, memory-mapped reading of MDS shards (MosaicML Streaming's format, version 2).

A shard file is: uint32 count; uint32[count + 1] offsets from the start of the file; a JSON header; the samples.
A sample is: uint32 sizes of its columns of variable size; the columns' bytes, in order.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import ShardError

INDEX_NAME = "index.json"
DATASET_NAME = "_lmms/dataset.json"  # what a converter says of the dataset; written last
_HASH = "xxh3_64"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One entry of index.json: file names, sizes in bytes, checksums (xxh3_64, hex) and columns."""

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


def parse_index(data: bytes, *, source: str) -> list[ShardInfo]:
    """The shards that an index.json lists; ShardError unless all of it is safe to follow."""
    try:
        index = json.loads(data)
        if index["version"] != 2:
            raise ShardError(f"{source}: MDS version {index['version']!r} is not supported, expected 2")
        return [_parse_shard(entry, source=source) for entry in index["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{source}: not a valid MDS index ({error!r}): convert the dataset again") from error


def _parse_shard(entry: dict[str, Any], *, source: str) -> ShardInfo:
    if entry["format"] != "mds":
        raise ShardError(f"{source}: shard format {entry['format']!r} is not supported, expected 'mds'")
    raw, zipped = entry["raw_data"], entry.get("zip_data")
    for data in (raw, zipped):
        if data is None:
            continue
        name, size = data["basename"], data["bytes"]
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\\" in name:
            raise ShardError(f"{source}: shard name {name!r} is not a plain file name: refused")
        if not isinstance(size, int) or not 8 <= size < 1 << 32:
            raise ShardError(
                f"{source}: shard {name!r} gives a size of {size!r} bytes, a shard has from 8 bytes to 4 GiB"
            )
    for name, encoding in zip(entry["column_names"], entry["column_encodings"], strict=True):
        if encoding == "pkl":
            raise ShardError(f"{source}: column {name!r} is pickled; unpickling data runs code: refused")
    return ShardInfo(
        name=raw["basename"],
        size=raw["bytes"],
        checksum=raw.get("hashes", {}).get(_HASH),
        num_samples=int(entry["samples"]),
        column_names=tuple(entry["column_names"]),
        column_encodings=tuple(entry["column_encodings"]),
        column_sizes=tuple(entry["column_sizes"]),
        compression=entry.get("compression"),
        zip_name=zipped["basename"] if zipped else None,
        zip_size=zipped["bytes"] if zipped else None,
        zip_checksum=zipped.get("hashes", {}).get(_HASH) if zipped else None,
    )


def file_matches(path: Path, *, size: int | None, checksum: str | None) -> bool:
    """Whether a file has this size in bytes and this xxh3_64 (hex); None is not checked."""
    if size is not None and path.stat().st_size != size:
        return False
    if checksum is None:
        return True
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return bool(digest.hexdigest() == checksum)


def _decode_ndarray(dtype: str) -> Callable[[memoryview], NDArray[Any]]:
    """MDS's dynamic-shape arrays: a byte (ndim << 2 | log2 of the shape's width), the shape, the values."""
    item = np.dtype(dtype)

    def decode(data: memoryview) -> NDArray[Any]:
        ndim, width = data[0] >> 2, 1 << (data[0] & 3)
        shape = np.frombuffer(data, f"<u{width}", ndim, 1)
        return np.frombuffer(data, item, -1, 1 + ndim * width).reshape([int(n) for n in shape])

    return decode


def _decoder(encoding: str) -> Callable[[memoryview], Any]:
    if encoding == "str":
        return lambda data: str(data, "utf-8")
    if encoding == "bytes":
        return bytes
    if encoding == "int":
        return lambda data: int.from_bytes(data, "little", signed=True)
    if encoding.startswith("ndarray:") and encoding.count(":") == 1:
        return _decode_ndarray(encoding.removeprefix("ndarray:"))
    from streaming.base.format.mds.encodings import mds_decode

    return lambda data: mds_decode(encoding, bytes(data))


class Shard:
    """One shard file, memory-mapped; `shard[i]` is sample i as a dict of decoded columns.

    Opening checks the file against its index entry: size, number of samples, and that all offsets ascend and
    lie inside the file; ShardError says what does not hold. The checksum is file_matches' business.
    Arrays are read-only views of the file.
    """

    def __init__(self, path: Path, info: ShardInfo, *, columns: Sequence[str] | None = None):
        self.path = path
        self.info = info
        with path.open("rb") as file:
            size = path.stat().st_size
            if size != info.size:
                raise ShardError(f"{path} has {size} bytes, its index says {info.size}: it is truncated or changed")
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._offsets = self._read_offsets()
        self._columns = self._layout(info.column_names if columns is None else columns)
        self._num_sizes = sum(size is None for size in info.column_sizes)
        self._sizes = struct.Struct(f"<{self._num_sizes}I")

    def _read_offsets(self) -> NDArray[np.uint32]:
        count = self.info.num_samples
        header = 4 * (count + 2)
        if len(self._data) < header or int.from_bytes(self._data[:4], "little") != count:
            raise ShardError(f"{self.path} does not hold the {count} samples that its index says: it is corrupt")
        offsets = np.frombuffer(self._data, "<u4", count + 1, 4)
        if offsets[0] < header or offsets[-1] > len(self._data) or np.any(offsets[1:] < offsets[:-1]):
            raise ShardError(f"{self.path} has offsets that descend or leave the file: it is corrupt")
        return offsets

    def _layout(self, columns: Sequence[str]) -> list[tuple[str, int, Callable[[memoryview], Any]]]:
        missing = set(columns) - set(self.info.column_names)
        if missing:
            raise ShardError(
                f"{self.path} has no column {sorted(missing)[0]!r}: it has {', '.join(self.info.column_names)}"
            )
        return [
            (name, at, _decoder(self.info.column_encodings[at]))
            for at, name in enumerate(self.info.column_names)
            if name in columns
        ]

    def __len__(self) -> int:
        return self.info.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        data = self._data[start:stop]
        try:
            variable = iter(self._sizes.unpack_from(data))
            bounds = [4 * self._num_sizes]
            for size in self.info.column_sizes:
                bounds.append(bounds[-1] + (next(variable) if size is None else size))
            if bounds[-1] != len(data):
                raise ValueError(f"columns take {bounds[-1]} of {len(data)} bytes")
            return {name: decode(data[bounds[at] : bounds[at + 1]]) for name, at, decode in self._columns}
        except (ValueError, struct.error, IndexError) as error:
            raise ShardError(f"{self.path}: sample {index} cannot be decoded ({error})") from error
