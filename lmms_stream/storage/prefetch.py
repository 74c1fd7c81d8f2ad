"""Downloads ahead of their reader, in the order of need, by a few threads.

Concurrent downloads share a link. Downloads needed later therefore begin only after the downloads needed soon have
ended: a reader without any shard would wait for both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError
from .fetch_config import FetchConfig
from .retry import start_thread

_BUSY_S, _NEEDED_S = 0.2, 0.02  # seconds between looks for a shard that another process downloads
_IDLE_S = 2.0  # seconds after which a thread without work ends
_GRACE_S = 5.0  # seconds added to a wait: the request's own error, which says more, comes first


class Prefetcher:
    """Fetches shards by number in threads. `fetch` returns None for a shard in download by another process.

    The threads end after _IDLE_S without work, and do not keep the process from ending. Each process needs its own
    prefetcher.
    """

    def __init__(self, fetch: Callable[[int], Path | None], *, name: Callable[[int], str], config: FetchConfig):
        self._fetch = fetch
        self._name = name
        self._config = config
        self._changed = threading.Condition()
        self._queue: dict[int, float] = {}  # shard -> earliest time of the next attempt, in the order of need
        self._later: dict[int, float] = {}  # the same for shards needed later
        self._under_way: set[int] = set()
        self._begun_later: set[int] = set()  # current downloads needed later
        self._stale: set[int] = set()  # current downloads forgotten since: the outcome is ignored
        self._done: dict[int, Path | Exception] = {}
        self._needed: set[int] = set()  # shards that a reader waits for
        self._num_threads = 0
        self._num_holds = 0

    def request(self, shard_ids: Iterable[int], *, later: bool = False) -> None:
        """Fetch these shards in the background, after earlier requests.

        later: begin only after all downloads needed soon have ended.
        """
        with self._changed:
            for shard_id in shard_ids:
                if isinstance(self._done.get(shard_id), Exception):
                    del self._done[shard_id]  # no reader took the error: ask the store again
                if shard_id not in self._done:
                    self._ask_for(shard_id, later=later)
            self._start_threads()
            self._changed.notify_all()

    def _ask_for(self, shard_id: int, *, later: bool) -> None:
        if not later:
            self._begun_later.discard(shard_id)
        if shard_id in self._under_way and shard_id not in self._stale:
            return
        if not later:
            self._queue.setdefault(shard_id, self._later.pop(shard_id, 0.0))
        elif shard_id not in self._queue:
            self._later.setdefault(shard_id, 0.0)

    def forget(self, shard_ids: Iterable[int] | None = None) -> None:
        """Forget requests of these shards, or of all, unless a reader has taken the file; ignore current downloads."""
        with self._changed:
            known = [*self._queue, *self._later, *self._done, *self._under_way]
            for shard_id in known if shard_ids is None else shard_ids:
                self._queue.pop(shard_id, None)
                self._later.pop(shard_id, None)
                self._done.pop(shard_id, None)
                if shard_id in self._under_way:
                    self._stale.add(shard_id)
            self._go_on()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin no downloads inside the context, except for shards with a waiting reader.

        A reader that checks many present shards would otherwise wait for the GIL, held by the threads, at each shard.
        """
        with self._changed:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_holds -= 1
                self._go_on()

    def is_begun(self, shard_id: int) -> bool:
        """Return whether a shard is finished or under way, and must be fetched with `take`."""
        return shard_id in self._done or shard_id in self._under_way

    def has(self, shard_id: int) -> bool:
        """Return whether `take` returns or raises at once."""
        return shard_id in self._done

    def leave(self, shard_id: int) -> bool:
        """Cancel the request of a shard found by the reader; return False for a begun download, which needs `take`."""
        with self._changed:
            if self.is_begun(shard_id):
                return False
            self._queue.pop(shard_id, None)
            self._later.pop(shard_id, None)
            return True

    def take(self, shard_id: int, *, timeout_s: float | None = None) -> Path:
        """Return the file of a shard, after waiting for the download; StorageError after timeout_s.

        timeout_s: default from the config; streams may have other timeouts. Raises the error of a failed download.
        """
        timeout_s = self._config.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s + _GRACE_S
        with self._changed:
            self._needed.add(shard_id)
            if shard_id in self._later:
                self._queue[shard_id] = self._later.pop(shard_id)
            self._begun_later.discard(shard_id)
            self._start_threads()
            self._changed.notify_all()
            try:
                while shard_id not in self._done:
                    soon = time.monotonic() + _NEEDED_S
                    if shard_id not in self._under_way and not self._queue.get(shard_id, soon + 1) <= soon:
                        self._queue[shard_id] = 0.0  # at once, at any position in the order of need
                        self._start_threads()
                        self._changed.notify_all()
                    if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                        raise StorageError(
                            f"{self._name(shard_id)} was not downloaded within {timeout_s:g} s: another process holds "
                            "its download, or the store does not answer; end that process, or raise timeout_s"
                        )
            finally:
                self._needed.discard(shard_id)
            result = self._done.pop(shard_id)
            self._go_on()  # there may be room for more downloads
        if isinstance(result, Exception):
            raise result
        return result

    def _go_on(self) -> None:
        """Wake threads to begin the next downloads."""
        if self._queue or self._later:
            self._start_threads()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while self._num_threads < self._config.threads:
            self._num_threads += 1
            start_thread(self._work, name="lmms-fetch")

    def _work(self) -> None:
        while True:
            with self._changed:
                shard_id, wait_s = self._next()
                while shard_id is None:
                    is_idle = not self._changed.wait(_IDLE_S if wait_s is None else wait_s) and wait_s is None
                    shard_id, wait_s = self._next()  # also after _IDLE_S: a request at that moment woke no thread
                    if is_idle and shard_id is None and wait_s is None:
                        self._num_threads -= 1  # end the thread: a waiting thread keeps the reader's data alive
                        return
                if self._queue.pop(shard_id, None) is None:
                    del self._later[shard_id]
                    self._begun_later.add(shard_id)
                self._under_way.add(shard_id)
            result: Path | Exception | None
            try:
                result = self._fetch(shard_id)
            except Exception as error:  # noqa: BLE001 - raised by the reader
                result = error
            with self._changed:
                self._end(shard_id, result)
                if self._later:  # downloads needed later may begin now
                    self._start_threads()
                self._changed.notify_all()

    def _end(self, shard_id: int, result: Path | Exception | None) -> None:
        """Note the outcome of a download."""
        is_later = shard_id in self._begun_later
        self._under_way.discard(shard_id)
        self._begun_later.discard(shard_id)
        if shard_id in self._stale:
            self._stale.discard(shard_id)
        elif result is not None:
            self._done[shard_id] = result
        else:  # back to the front of the queue, before later requests
            front = {shard_id: time.monotonic() + (_NEEDED_S if shard_id in self._needed else _BUSY_S)}
            if is_later:
                self._later = front | self._later
            else:
                self._queue = front | self._queue

    def _next(self) -> tuple[int | None, float | None]:
        """Return the shard to fetch now; or None, and the maximum wait in seconds."""
        now = time.monotonic()
        queue = self._without_stale(self._queue)
        for shard_id in self._needed:
            if queue.get(shard_id, now + 1) <= now:
                return shard_id, None
        wait_s = min((queue[each] - now for each in self._needed if each in queue), default=None)
        if not self._num_holds and len(self._done) + len(self._under_way) < self._config.ahead:
            if not self._queue and self._under_way <= self._begun_later | self._stale:
                queue = self._without_stale(self._later)
            for shard_id, at in queue.items():
                if at <= now:
                    return shard_id, None
                wait_s = min(wait_s or _BUSY_S, at - now)
        return None, wait_s

    def _without_stale(self, queue: dict[int, float]) -> dict[int, float]:
        """Return the queue without shards of forgotten downloads: a new request waits until the old download ends."""
        return {each: at for each, at in queue.items() if each not in self._stale} if self._stale else queue
