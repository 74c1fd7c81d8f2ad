"""Files that rows lie in, on this machine or in a store, as streams of bytes; of those in stores ranges are read."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash

from ...errors import DataError, ObjectChangedError
from ...storage.disk_errors import disk_errors
from ...storage.storage import Storage, shared_storage
from ...types import StoredObject

LOCAL_BYTES = 1 << 20  # read at once
REQUEST_BYTES = 1 << 23  # of a request for a range, at most: what is kept of it in memory
HEAD_BYTES = 1 << 20  # of a stored file, which are looked at several times before its units are read
REST_BYTES = 1 << 16  # of requests beyond what was asked for, which follow the end of the last row

SAMPLED_BYTES = 1 << 16  # of a piece of a file that is sampled
_NUM_SAMPLED = 4  # pieces of a file


class File(Protocol):
    """Can be pickled, and opened in other processes. key: differs once the file holds something else."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def key(self) -> tuple[object, ...]: ...

    def open(self, *, until: int | None = None) -> IO[bytes]:
        """Its bytes, from the first; until: the offset up to which they will be read, or a little further."""
        ...

    def open_raw(self) -> io.RawIOBase:
        """The same without a buffer."""
        ...


def identity(status: os.stat_result) -> tuple[int, int, int]:
    """Of a file on this machine: it differs once the file was written again."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def sampled_digest(path: Path) -> str:
    """A digest of four pieces of a file, its ends among them, or of all of a small one."""
    digest, num_bytes = xxhash.xxh3_128(), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if num_bytes <= _NUM_SAMPLED * SAMPLED_BYTES:
            digest.update(file.read())
        else:
            for number in range(_NUM_SAMPLED):
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


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def key(self) -> tuple[object, ...]:
        return str(self.path), *identity(self.path.stat())

    def open(self, *, until: int | None = None) -> IO[bytes]:
        return self.path.open("rb", buffering=LOCAL_BYTES)

    def open_raw(self) -> io.RawIOBase:
        return self.path.open("rb", buffering=0)


class StoredFile:
    """An object of a store, as it was when it was listed; only copied where the store tells no tags.

    Reading raises DataError once the object is another, StorageError where the store does not answer.
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
        """All of it, range by range; of a store that tells no tags, at once."""
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
    """A stored file as a stream: each read is a request, of all that is asked for or, with head_bytes, less.

    until: the offset after which requests are small. head_bytes: the offset at which a read from the file's head ends.
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
    """Brings an object to this machine whole, where its format is not read by ranges."""

    file: StoredFile
    path: Path

    def __call__(self) -> None:
        """The path is there once it holds all of the object. DataError for one that was changed; StorageError."""
        temporary = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}.tmp")
        with disk_errors(str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.file.copy_to(temporary)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
