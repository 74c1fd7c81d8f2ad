"""Clients of stores: one for each process that asks. key -> client.

A fork copies a client's connections, which two processes cannot share, and its locks as they are, held or not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import BinaryIO, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")
MAX_CONNECTIONS = 64  # of one process to one store


class ProcessClients(Generic[K, C]):
    """What `make` gives for a key, made at its first use in each process, by one thread at a time."""

    def __init__(self, make: Callable[[K], C]):
        self._make = make
        self._made: dict[tuple[int, K], C] = {}
        self._making: dict[int, threading.Lock] = {}

    def get(self, key: K) -> C:
        with self._making.setdefault(os.getpid(), threading.Lock()):
            made = os.getpid(), key
            if made not in self._made:
                self._made[made] = self._make(key)
            return self._made[made]


class Watched:
    """A file that a client writes to, for as long as somebody waits: `proceed` raises once nobody does."""

    def __init__(self, file: BinaryIO, proceed: Callable[[], None]):
        self._file = file
        self._proceed = proceed

    def write(self, data: bytes) -> int:
        self._proceed()
        return self._file.write(data)

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()
