"""Files as streams of plain bytes, whether they are compressed or not."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import pyarrow

from ...errors import DataError, LmmsStreamError
from .files import File

GZIP, ZSTD, ZSTD_SKIPPABLE, BZIP2, XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18", b"BZh", b"\xfd7zX"
CHUNK_BYTES = 1 << 18  # of compressed data, read at once
XZ_MEMORY_BYTES = 1 << 28  # that decompressing may take: xz -9 asks for a quarter of it, hostile files for gigabytes


def compression_of(head: bytes) -> str | None:
    """gzip, zstd, bzip2, xz or None, by the first four bytes of a file."""
    if head.startswith(GZIP):
        return "gzip"
    if head.startswith(ZSTD) or (head[1:4] == ZSTD_SKIPPABLE and head[0] >> 4 == 5):
        return "zstd"
    if head.startswith(XZ):
        return "xz"
    if head.startswith(BZIP2) and head[3:4].isdigit():
        return "bzip2"
    return None


class PlainStream(io.RawIOBase):
    """The bytes of a file, decompressed. DataError where compressed data is damaged or breaks off."""

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
    """A decompressor of one stream, as those of bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _GzipDecompressor:
    """A decompressor of one member of a gzip file, with the interface of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: gzip's header and checksum are checked
        self._waiting = b""  # compressed data that is not decompressed yet
        self._is_full = False  # whether the last call gave all that it might, so that zlib may hold more

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
    """Plain bytes of a file of one compressed stream after another, as pbzip2 and `cat` write them.

    No more is decompressed than is asked for, so that what a small file expands to is not held in memory.
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
                raise EOFError("the file ends before its stream does")
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
        self._stream.decompress(rest, 0)  # takes what follows, and gives it when it is asked for
        return True

    def close(self) -> None:
        """The file is closed by whoever opened it."""


_DECOMPRESSORS: dict[str | None, Callable[[], _Decompressor]] = {
    "gzip": _GzipDecompressor,
    "bzip2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES),
}
