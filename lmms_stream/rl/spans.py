"""Bytes of a file between offsets: of a file on this node, and of an object whose store gives ranges.

Each is a class with the members of Spans, and refuses to go on once the file holds something else.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Protocol

from ..converters.sources.files import StoredFile, identity
from ..errors import ObjectChangedError
from ..storage.disk_errors import disk_errors

Span = tuple[int, int]  # the first byte, and the one after the last
LOCAL_BYTES, REQUEST_BYTES = 1 << 20, 1 << 23  # of spans that are read together, at most
GAP_BYTES = 1 << 18  # that a request reads in vain rather than that there are two
THREADS = 16  # requests at once


class Spans(Protocol):
    """together: bytes that are worth one read, at most; gap: bytes between two spans that may be read along."""

    together: int
    gap: int

    def open(self) -> IO[bytes]:
        """All of it from the first byte on, once."""
        ...

    def read(self, spans: Sequence[Span]) -> list[bytes]: ...


class LocalSpans:
    together = LOCAL_BYTES
    gap = 0

    def __init__(self, path: Path, *, name: str):
        self._path = path
        self._name = name
        with disk_errors(name):
            self._identity = identity(path.stat())

    def open(self) -> IO[bytes]:
        return self._path.open("rb", buffering=0)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        with disk_errors(self._name):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if identity(os.fstat(file)) != self._identity:
                    raise ObjectChangedError(self._name)
                found = [os.pread(file, stop - start, start) for start, stop in spans]
            finally:
                os.close(file)
        if any(len(data) != stop - start for data, (start, stop) in zip(found, spans, strict=True)):
            raise ObjectChangedError(self._name)
        return found


class StoredSpans:
    together = REQUEST_BYTES
    gap = GAP_BYTES

    def __init__(self, file: StoredFile):
        self._file = file

    def open(self) -> IO[bytes]:
        return io.BufferedReader(self._file.open_raw(), REQUEST_BYTES)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        if len(spans) == 1:
            return [self._file.request(*spans[0])]
        with ThreadPoolExecutor(min(THREADS, len(spans)), thread_name_prefix="lmms_stream-rl-ranges") as pool:
            return [*pool.map(lambda span: self._file.request(*span), spans)]
