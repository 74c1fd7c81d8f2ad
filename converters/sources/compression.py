"""Files as streams of plain bytes, whether they are compressed or not."""

from __future__ import annotations

import io
from typing import Any

import pyarrow

from ...errors import DataError
from .files import File

GZIP, ZSTD, ZSTD_SKIPPABLE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"


def compression_of(head: bytes) -> str | None:
    """gzip, zstd or None, by the first four bytes of a file."""
    if head.startswith(GZIP):
        return "gzip"
    if head.startswith(ZSTD) or (head[1:4] == ZSTD_SKIPPABLE and head[0] >> 4 == 5):
        return "zstd"
    return None


class PlainStream(io.RawIOBase):
    """The bytes of a file, decompressed. DataError where compressed data is damaged or breaks off."""

    def __init__(self, file: File, *, name: str):
        self._name = name
        self._raw = file.open_raw()
        self._data: Any = self._raw
        self.compression = compression_of(self._raw.read(4))
        self._raw.seek(0)
        if self.compression:
            self._data = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._raw, mode="r"), self.compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._data.read(len(buffer))
        except OSError as error:
            if error.errno is not None:
                raise
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
