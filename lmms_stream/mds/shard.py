"""Validated, memory-mapped reading of MDS shards (MosaicML Streaming's format, version 2).

A shard file is: uint32 count; uint32[count + 1] offsets from the start of the file; a JSON header; the samples. A
sample is: uint32 sizes of its columns of variable size; the columns' bytes, in order. Shards of texts have the count
and the offsets in a second file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LmmsStreamError, ShardError
from ..storage.cache import LocalCache, Wanted
from ..storage.local import LocalStorage
from .decoding import Decoder, decoder, decompress
from .hooked_streams import HookedStream
from .index import ShardInfo, file_matches


class Shard:
    """A memory-mapped shard file; `shard[i]` is sample i as a dict of decoded columns.

    Opening checks the file against its index entry: size, number of samples, and ascending offsets inside the file. A
    ShardError names the failed check. The checksum is checked by file_matches. Arrays are read-only views of the file.
    address: address of the file in this process's memory.
    """

    def __init__(self, path: Path, info: ShardInfo, *, columns: Sequence[str] | None = None):
        self.path = path
        self.info = info
        self._data = _mapped(path, info)
        self.address: int = np.frombuffer(self._data, np.uint8).__array_interface__["data"][0]
        _offsets(path, self._data, info.num_samples, first=4 * (info.num_samples + 2), stop=len(self._data))
        self._columns = self._layout(_known_columns(path, info, columns))
        self._sizes = struct.Struct(f"<{sum(size is None for size in info.column_sizes)}I")
        self._bounds = struct.Struct("<2I").unpack_from

    def _layout(self, columns: Sequence[str]) -> list[tuple[str, int | None, Decoder | None]]:
        """Return name, fixed size and decoder (None: not requested) of every column, in stored order."""
        info = self.info
        return [
            (name, size, decoder(encoding) if name in columns else None)
            for name, encoding, size in zip(info.column_names, info.column_encodings, info.column_sizes, strict=True)
        ]

    def __len__(self) -> int:
        return self.info.num_samples

    @property
    def sample_bytes(self) -> NDArray[np.int64]:
        """int64[num_samples], bytes of each sample in the file."""
        starts = np.frombuffer(self._data, "<u4", self.info.num_samples + 1, 4).astype(np.int64)
        return starts[1:] - starts[:-1]

    @property
    def first_bytes(self) -> NDArray[np.int64]:
        """Offset of each sample in the shard: int64[num_samples]."""
        return np.frombuffer(self._data, "<u4", self.info.num_samples, 4).astype(np.int64)

    def stored(self, first: int, stop: int) -> memoryview:
        """Return the encoded samples first <= number < stop."""
        at, end = (int.from_bytes(self._data[4 + 4 * number : 8 + 4 * number], "little") for number in (first, stop))
        return self._data[at:end]

    def __getitem__(self, index: int) -> dict[str, Any]:
        data = self._data
        start, stop = self._bounds(data, 4 + 4 * index)
        sample = {}
        try:
            sizes = iter(self._sizes.unpack_from(data, start))
            at = start + self._sizes.size
            for name, fixed, decode in self._columns:
                size = next(sizes) if fixed is None else fixed
                if decode is not None and at + size <= stop:
                    sample[name] = decode(data, at, size)
                at += size
            if at != stop:
                raise ValueError(f"columns take {at - start} of {stop - start} bytes")
        except LmmsStreamError:
            raise
        except (ValueError, struct.error, IndexError) as error:
            raise ShardError(f"{self.path}: sample {index} cannot be decoded ({error})") from error
        return sample


_DECODE_JSON = decoder("json")
_FROM_TEXT: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
_SEPARATORS = {"csv": ",", "tsv": "\t"}


class SplitShard:
    """A shard of JSON lines or of separated texts (CSV, …), with a second file of the samples' offsets; see Shard."""

    address = -1  # nothing reads text by its address

    def __init__(self, path: Path, info: ShardInfo, *, columns: Sequence[str] | None = None):
        assert info.meta is not None
        self.path = path
        self.info = info
        meta = Path(str(path)[: -len(info.name)] + info.meta.name)
        self._data = _mapped(path, info)
        self._offsets = _offsets(meta, meta.read_bytes(), info.num_samples, first=0, stop=len(self._data))
        self._columns = _known_columns(path, info, columns)
        self._newline: str = info.entry["newline"]
        self._separator: str = _SEPARATORS.get(info.format) or info.entry.get("separator", "")

    def __len__(self) -> int:
        return self.info.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = self._offsets[index : index + 2].tolist()
        try:
            sample = self._objects(start, stop) if self.info.format == "json" else self._texts(start, stop)
            return {name: sample[name] for name in self._columns}
        except (ValueError, KeyError) as error:
            raise ShardError(f"{self.path}: sample {index} cannot be decoded ({error!r})") from error

    @property
    def sample_bytes(self) -> NDArray[np.int64]:
        """int64[num_samples], bytes of each sample in the file."""
        ends = self._offsets.astype(np.int64)
        return ends[1:] - ends[:-1]

    def _objects(self, start: int, stop: int) -> dict[str, Any]:
        sample = _DECODE_JSON(self._data, start, stop - start)
        if not isinstance(sample, dict):
            raise ValueError(f"a JSON {type(sample).__name__} where an object is expected")
        return sample

    def _texts(self, start: int, stop: int) -> dict[str, Any]:
        texts = str(self._data[start:stop], "utf-8").removesuffix(self._newline).split(self._separator)
        encodings = self.info.encodings
        if len(texts) != len(encodings):
            raise ValueError(f"{len(texts)} texts for {len(encodings)} columns")
        return {
            name: _FROM_TEXT[encoding](text)
            for (name, encoding), text in zip(encodings.items(), texts, strict=True)
            if name in self._columns
        }


def _mapped(path: Path, info: ShardInfo) -> memoryview:
    mapped = map_file(path)
    if len(mapped) != info.size:
        raise ShardError(
            f"{path} has {len(mapped)} bytes, but {info.size} bytes in its index: it is truncated or changed"
        )
    return mapped


def _offsets(path: Path, data: bytes | memoryview, count: int, *, first: int, stop: int) -> NDArray[np.uint32]:
    """Return the offsets at the start of a file, after their count; ShardError for offsets outside [first, stop]."""
    if len(data) < 4 * (count + 2) or int.from_bytes(data[:4], "little") != count:
        raise ShardError(f"{path} does not hold the {count} samples of its index: it is corrupt")
    offsets: NDArray[np.uint32] = np.frombuffer(data, "<u4", count + 1, 4)
    if offsets[0] < first or offsets[-1] > stop or np.any(offsets[1:] < offsets[:-1]):
        raise ShardError(f"{path} has offsets that descend or leave the file: it is corrupt")
    return offsets


def _known_columns(path: Path, info: ShardInfo, columns: Sequence[str] | None) -> Sequence[str]:
    """Return the requested columns, by default all; ShardError for an unknown column."""
    missing = set(columns or ()) - set(info.column_names)
    if missing:
        from ..processors import reader_of

        reader, found = reader_of(info.column_names), f"it has {', '.join(info.column_names)}"
        remedy = (
            "convert the dataset to a known kind (lmms-stream convert DATASET TARGET --kind KIND --tokenizer …; "
            "lmms-stream convert --help lists the kinds), or choose a processor of your own"
        )
        if reader is not None:
            remedy = f"choose the processor of these columns: {reader}"
        raise ShardError(f"{path} has no column {sorted(missing)[0]!r}: {found}: {remedy}")
    return info.column_names if columns is None else columns


AnyShard = Shard | SplitShard


def open_shard(path: Path, info: ShardInfo, *, columns: Sequence[str] | None = None) -> AnyShard:
    """Open the shard at a path, in the format of its index entry."""
    return (Shard if info.meta is None else SplitShard)(path, info, columns=columns)


# Shards as files on this node: fetched through the cache, checked, decompressed. index entry -> path.


def fetch_shard(cache: LocalCache, info: ShardInfo) -> Path:
    """Return the local path of a decompressed shard with the size and checksum of its index entry."""
    path = try_fetch_shard(cache, info, wait=True)
    assert path is not None
    return path


def try_fetch_shard(cache: LocalCache, info: ShardInfo, *, wait: bool = False) -> Path | None:
    """Call fetch_shard, but return None at once while another process downloads the shard (unless `wait`)."""
    if info.meta is not None and _fetch(cache, info.meta, wait=wait) is None:
        return None
    return _fetch(cache, info, wait=wait)


def _fetch(cache: LocalCache, info: ShardInfo, *, wait: bool) -> Path | None:
    """Fetch a file of a shard; decompress the kept file if compressed files are kept."""
    if info.zip_name is not None and cache.keep_zip and not isinstance(cache.storage, LocalStorage):
        zipped = Wanted(
            name=info.zip_name,
            identity=f"{info.zip_size} {info.zip_checksum}",
            num_bytes=info.zip_size or 0,
            valid=lambda path: file_matches(path, size=info.zip_size, checksum=info.zip_checksum),
            by_size=info.zip_checksum is None,
        )
        if cache.fetch(info.zip_name, zipped, wait=wait) is None:
            return None
        if not _is_prepared(cache):
            cache = cache.of_kept()
    if _is_prepared(cache):
        return cache.fetch(info.name, replace(_wanted(info), decode=None), wait=wait)
    return cache.fetch(info.zip_name or info.name, _wanted(info), wait=wait)


def _is_prepared(cache: LocalCache) -> bool:
    """Return whether a class of the user decompresses shards itself."""
    return isinstance(cache.storage, HookedStream) and cache.storage.prepares_shards


def shard_at_hand(cache: LocalCache, info: ShardInfo) -> Path | None:
    """Return the local path of a shard fetched before, by any process; None if it must be fetched."""
    if info.meta is not None and shard_at_hand(cache, info.meta) is None:
        return None
    return cache.at_hand(info.zip_name or info.name, _wanted(info))


def _wanted(info: ShardInfo) -> Wanted:
    def valid(path: Path) -> bool:
        return file_matches(path, size=info.size, checksum=info.checksum)

    def decode(data: bytes) -> bytes:
        return decompress(str(info.compression), data, size=info.size)

    return Wanted(
        name=info.name,
        identity=f"{info.size} {info.checksum}",  # this form is stored in records of existing copies
        num_bytes=info.size + (info.zip_size or 0),
        valid=valid,
        by_size=info.checksum is None,
        remember=info.checksum is not None,
        decode=None if info.zip_name is None else decode,
    )


# Map files without keeping a descriptor: a process may map more files than it may open. Python's mmap keeps a copy of
# the descriptor while the mapping exists, and many machines allow 1024.


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> memoryview:
    """Map a whole file for reading. The mapping ends with the last array or view of it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return memoryview(b"")
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    data = (ctypes.c_ubyte * size).from_address(address)
    end = weakref.finalize(data, _libc.munmap, address, size)
    end.atexit = False  # arrays of the mapping may outlive it
    return memoryview(data).cast("B").toreadonly()
