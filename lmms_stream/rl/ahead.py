"""Chunks of an epoch that are made in the background, in the order in which they will be asked for."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Key = tuple[str, int, int]  # an order's name, an epoch, and a chunk of it


class Ahead(Generic[T]):
    """make: rows -> what is kept of them; threads call it. Nothing waits for room: at most the chunks of the last
    `keep` are held, so a chunk of any size passes.

    Before this process is forked, what was begun is ended: a child would have its locks as they were then.
    """

    def __init__(self, make: Callable[[NDArray[np.int64]], list[T]], *, num_threads: int):
        self._make = make
        self._num_threads = num_threads
        self._num_busy = 0
        self._lock = threading.Lock()
        self._waiting: dict[Key, NDArray[np.int64]] = {}  # rows of chunks that no thread has begun, in order of need
        self._begun: dict[Key, Future[list[T]]] = {}
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lmms_stream-rl")
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        _ALIVE.add(self)

    def take(self, key: Key) -> list[T] | None:
        """The chunk, once it is made; None if no thread has begun it. Errors are raised as `make` raised them."""
        with self._lock:
            self._waiting.pop(key, None)
            future = self._begun.pop(key, None)
        return None if future is None else future.result()

    def keep(self, following: Iterable[tuple[Key, Callable[[], NDArray[np.int64]]]]) -> None:
        """Begin these chunks, each given by its rows, unless they were begun, and let go of all others."""
        wanted = dict(following)
        with self._lock:
            self._begun = {key: future for key, future in self._begun.items() if key in wanted}
            self._waiting = {key: rows() for key, rows in wanted.items() if key not in self._begun}
            num_more = max(0, min(self._num_threads, len(self._waiting)) - self._num_busy)
            self._num_busy += num_more
        for _ in range(num_more):
            self._pool.submit(self._make_those_waiting)

    def _make_those_waiting(self) -> None:
        while True:
            with self._lock:
                key = next(iter(self._waiting), None)
                if key is None:
                    self._num_busy -= 1
                    return
                rows = self._waiting.pop(key)
                future: Future[list[T]] = Future()
                self._begun[key] = future
            try:
                future.set_result(self._make(rows))
            except BaseException as error:  # noqa: BLE001 - raised where the chunk is taken
                future.set_exception(error)

    def rest(self) -> None:
        """Forget what no thread has begun, and wait for what threads are at."""
        with self._lock:
            self._waiting.clear()
            begun = [*self._begun.values()]
        wait(begun)

    def close(self) -> None:
        self.keep(())
        self._end()


_ALIVE: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


def _rest_all() -> None:
    for each in list(_ALIVE):
        each.rest()


os.register_at_fork(before=_rest_all, after_in_child=_ALIVE.clear)
