"""Files of rows, local or in a store, in streams of bytes; stored files are read in ranges."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import uuid
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow
import xxhash

from ...errors import DataError, LmmsStreamError, ObjectChangedError
from ...storage.failures import disk_errors
from ...storage.storage import Storage, shared_storage
from ...types import StoredObject

LOCAL_BYTES = 1 << 20  # read at once
REQUEST_BYTES = 1 << 23  # maximum of a range request: its bytes are kept in memory
HEAD_BYTES = 1 << 20  # head of a stored file, which is read several times before its units
REST_BYTES = 1 << 16  # requests behind the requested end, for the rest of the last row

SAMPLED_BYTES = 1 << 16  # piece of a sampled file
_NUM_SAMPLED = 4  # pieces of a file


class File(Protocol):
    """Can be pickled, and opened in other processes. key: differs once the file holds something else."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def key(self) -> tuple[object, ...]: ...

    def open(self, *, until: int | None = None) -> IO[bytes]:
        """Open the file for reading from the start. until: offset to which the caller reads, or slightly beyond it."""
        ...

    def open_raw(self) -> io.RawIOBase:
        """Open the file without a buffer."""
        ...


def identity(status: os.stat_result) -> tuple[int, int, int]:
    """Identity of a file on this machine, different after the file was written again."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def status_of(files: Sequence[Path]) -> str:
    """Return a digest of inodes and times of status changes; each write to a file changes the digest."""
    digest = xxhash.xxh3_64()
    for file in files:
        status = file.stat()
        digest.update(f"{status.st_ino} {status.st_ctime_ns} ".encode())
    return digest.hexdigest()


def sampled_digest(path: Path) -> str:
    """Return a digest of four pieces of a file, including both ends; of all bytes of a small file."""
    with path.open("rb", buffering=0) as file:
        return sampled_digest_of(file)


def sampled_digest_of(file: Any, *, first_piece: int = 0) -> str:
    """Return the sampled_digest of a file that is open without a buffer.

    first_piece: first piece to read of a large file: each request for its head costs HEAD_BYTES.
    """
    digest, num_bytes = xxhash.xxh3_128(), file.seek(0, io.SEEK_END)
    if num_bytes <= _NUM_SAMPLED * SAMPLED_BYTES:
        file.seek(0)
        digest.update(file.read())
    else:
        for number in range(first_piece, _NUM_SAMPLED):
            file.seek((num_bytes - SAMPLED_BYTES) * number // (_NUM_SAMPLED - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return f"{num_bytes}:{digest.hexdigest()}"


def more_than_zeros(file: Any) -> bool:
    """Whether anything but zeros is left to read."""
    return any(chunk.strip(b"\0") for chunk in iter(partial(file.read, LOCAL_BYTES), b""))


def content_digest(path: Path) -> str:
    """A digest of all bytes of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(REQUEST_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def joint_digest(files: Sequence[Path]) -> str:
    """Return a digest of all bytes of files; of a single file, its content_digest."""
    with ThreadPoolExecutor() as threads:
        digests = [*threads.map(content_digest, files)]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest(" ".join(digests))


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def key(self) -> tuple[object, ...]:
        status = self.path.stat()
        return str(self.path), *identity(status), status.st_ctime_ns

    def open(self, *, until: int | None = None) -> IO[bytes]:
        return self.path.open("rb", buffering=LOCAL_BYTES)

    def open_raw(self) -> io.RawIOBase:
        return self.path.open("rb", buffering=0)


class StoredFile:
    """An object of a store, in its listed version; only copied if the store has no tags.

    Reading raises DataError after the object changed, and StorageError if the store does not answer.
    """

    def __init__(self, store: Storage, described: StoredObject):
        self._store = store
        self._described = described

    def __reduce__(self) -> tuple[Callable[..., StoredFile], tuple[str, StoredObject]]:
        return _reopened, (self._store.url, self._described)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredFile) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def num_bytes(self) -> int:
        return self._described.num_bytes

    @property
    def key(self) -> tuple[object, ...]:
        return self._store.url, self._described

    def open(self, *, until: int | None = None) -> IO[bytes]:
        until = self.num_bytes if until is None else min(until, self.num_bytes)
        return io.BufferedReader(_Ranges(self, until=until, head_bytes=min(HEAD_BYTES, self.num_bytes)), REQUEST_BYTES)

    def open_raw(self) -> io.RawIOBase:
        return _Ranges(self, until=self.num_bytes, head_bytes=0)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start <= offset < stop; of the first ones nothing is asked twice in a row."""
        if stop <= HEAD_BYTES:
            return _head(self)[start:stop]
        return self.request(start, stop)

    def request(self, start: int, stop: int) -> bytes:
        try:
            return self._store.read_range(self._described.key, start=start, stop=stop, tag=self._described.tag)
        except ObjectChangedError as error:
            raise DataError(str(error)) from error

    def copy_to(self, path: Path) -> None:
        """Copy the object, range by range; in one request from a store without tags."""
        if not self._described.tag:
            self._store.download(self._described.key, path)
            return
        with path.open("wb") as file:
            for at in range(0, self.num_bytes, REQUEST_BYTES):
                file.write(self.request(at, min(at + REQUEST_BYTES, self.num_bytes)))


@lru_cache(maxsize=4)
def _head(file: StoredFile) -> bytes:
    return file.request(0, min(HEAD_BYTES, file.num_bytes))


def _reopened(url: str, described: StoredObject) -> StoredFile:
    return StoredFile(shared_storage(url), described)


class _Ranges(io.RawIOBase):
    """Stream of a stored file: each read is a request for the requested bytes, or fewer at head_bytes and until.

    until: offset after which requests are small. head_bytes: offset at which a read from the file's head ends.
    """

    def __init__(self, file: StoredFile, *, until: int, head_bytes: int):
        self._file = file
        self._until = until
        self._head_bytes = head_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.num_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        at_most = self._until if self._at < self._until else self._at + REST_BYTES
        if self._at < self._head_bytes:
            at_most = min(at_most, self._head_bytes)
        stop = min(self._at + len(buffer), at_most, self._file.num_bytes)
        if stop <= self._at:
            return 0
        data = self._file.read(self._at, stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copies a complete object to this machine, for formats that are not read in ranges."""

    file: StoredFile
    path: Path

    def __call__(self) -> None:
        """Copy the object; the path exists only when complete. DataError for a changed object; StorageError."""
        temporary = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}.tmp")
        with disk_errors(str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.file.copy_to(temporary)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)


# Streams of plain bytes from plain or compressed files.

GZIP, ZSTD, ZSTD_SKIPPABLE, BZIP2, XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18", b"BZh", b"\xfd7zX"
CHUNK_BYTES = 1 << 18  # of compressed data, read at once
XZ_MEMORY_BYTES = 1 << 28  # limit for decompression: xz -9 uses a quarter of it, hostile files gigabytes


def compression_of(head: bytes) -> str | None:
    """Return gzip, zstd, bzip2, xz or None, by the first four bytes of a file."""
    if head.startswith(GZIP):
        return "gzip"
    if head.startswith(ZSTD) or (head[1:4] == ZSTD_SKIPPABLE and head[0] >> 4 == 5):
        return "zstd"
    if head.startswith(XZ):
        return "xz"
    if head.startswith(BZIP2) and head[3:4].isdigit():
        return "bzip2"
    return None


class DecompressedFile(io.RawIOBase):
    """Decompressed bytes of a file. DataError for damaged or truncated compressed data."""

    def __init__(self, file: File, *, name: str):
        self._name = name
        self._raw = file.open_raw()
        self._data: Any = self._raw
        self.compression = compression_of(self._raw.read(4))
        self._raw.seek(0)
        if self.compression in _DECOMPRESSORS:
            self._data = _Streams(self._raw, _DECOMPRESSORS[self.compression])
        elif self.compression:
            self._data = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._raw, mode="r"), self.compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._data.read(len(buffer))
        except LmmsStreamError:
            raise
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if "Memory usage limit" in str(error):
                raise DataError(
                    f"{self._name}: its xz data asks for more than {XZ_MEMORY_BYTES >> 20} MiB of memory: compress it "
                    "again with xz -9 or less"
                ) from error
            raise DataError(
                f"{self._name}: its {self.compression} data is damaged or breaks off ({error}): copy it again"
            ) from error
        buffer[: len(data)] = data
        return len(data)

    def position(self) -> int:
        """How far the file itself has been read, in bytes."""
        return self._raw.tell()

    def close(self) -> None:
        if not self.closed:
            self._data.close()
            self._raw.close()
        super().close()


class _Decompressor(Protocol):
    """Decompressor of one stream, with the interface of bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _GzipDecompressor:
    """Decompressor of one member of a gzip file, with the interface of bz2 and lzma."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: gzip's header and checksum are checked
        self._waiting = b""  # compressed data waiting for decompression
        self._is_full = False  # True if the last call returned max_length bytes: zlib may hold more

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._waiting and not self._is_full

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """At most max_length bytes; with 0 the data waits for the next call."""
        self._waiting += data
        if max_length == 0:
            return b""
        found = self._stream.decompress(self._waiting, max(0, max_length))
        self._waiting, self._is_full = self._stream.unconsumed_tail, len(found) == max_length
        return found


class _Streams:
    """Plain bytes of a file of consecutive compressed streams, as written by pbzip2 and `cat`.

    Only the requested bytes are decompressed: the expansion of a small file is not held in memory.
    """

    def __init__(self, raw: io.RawIOBase, make: Callable[[], _Decompressor]):
        self._raw = raw
        self._make = make
        self._stream = make()

    def read(self, num_bytes: int) -> bytes:
        """b"" at the end of the last stream. OSError, EOFError or LZMAError for data that is damaged or breaks off."""
        while True:
            if self._stream.eof and not self._begin_next():
                return b""
            given = b""
            if self._stream.needs_input and not (given := self._raw.read(CHUNK_BYTES) or b""):
                raise EOFError("the file ends within its stream")
            if data := self._stream.decompress(given, num_bytes):
                return data

    def _begin_next(self) -> bool:
        """Whether another stream follows; xz pads its streams with zeros, and tapes and block stores pad all files."""
        rest = self._stream.unused_data.lstrip(b"\x00")
        while not rest:
            chunk = self._raw.read(CHUNK_BYTES)
            if not chunk:
                return False
            rest = chunk.lstrip(b"\x00")
        self._stream = self._make()
        self._stream.decompress(rest, 0)  # keeps the data for the next call
        return True

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


_DECOMPRESSORS: dict[str | None, Callable[[], _Decompressor]] = {
    "gzip": _GzipDecompressor,
    "bzip2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES),
}
