"""Chunks of an epoch that are made in the background, in the order in which they will be asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Key = tuple[int, int]  # an epoch, and a chunk of it


class Ahead(Generic[T]):
    """make: rows -> what is kept of them; threads call it. Nothing waits for room: at most the chunks of the last
    `keep` are held, so a chunk of any size passes.
    """

    def __init__(self, make: Callable[[NDArray[np.int64]], list[T]], *, num_threads: int):
        self._make = make
        self._waiting: dict[Key, Future[list[T]]] = {}
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lmms_stream-rl")
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def take(self, key: Key) -> list[T] | None:
        """The chunk, once it is made; None if it was not begun. Errors are raised as `make` raised them."""
        future = self._waiting.pop(key, None)
        return None if future is None else future.result()

    def keep(self, following: Iterable[tuple[Key, Callable[[], NDArray[np.int64]]]]) -> None:
        """Begin these chunks, each given by its rows, unless they were begun, and let go of all others."""
        wanted = dict(following)
        for key in self._waiting.keys() - wanted.keys():
            self._waiting.pop(key).cancel()
        for key, rows in wanted.items():
            if key not in self._waiting:
                self._waiting[key] = self._pool.submit(self._make, rows())

    def close(self) -> None:
        self.keep(())
        self._end()
