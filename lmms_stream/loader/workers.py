"""The worker processes of a loader: started, asked in turn, ended. A worker's code -> [workers] -> items, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_all_start_methods, get_start_method
from typing import Any, Literal, cast

from torch.utils.data import DataLoader

from ..errors import ConfigError, LmmsStreamError, WorkerError
from ..processes.fork_server import address_obstacle
from ..processes.main_guard import check_main_guard
from ..processes.sendable import obstacle
from ..signals import outlive_stop_signal
from .batch_maker import Ready
from .sample_clock import SampleWatch
from .worker import Item, PackWorker, SentWorker
from .worker_end import end_with, is_of_worker_code
from .worker_server import BeginFromServer, start_worker_server, watch_deaths, without_main
from .worker_start import Running, iterate_running

StartMethod = Literal["fork", "spawn", "forkserver", "server"]
logger = logging.getLogger("lmms_stream")


class Workers:
    """num_workers processes that run a worker, or with 0 this process. See PackedLoader for the other settings.

    items_ahead: what each worker has ready.
    """

    def __init__(
        self,
        worker: PackWorker,
        *,
        num_workers: int,
        items_ahead: int,
        persistent: bool,
        start_method: StartMethod | None,
        timeout_s: float,
    ):
        self.timeout_s = timeout_s
        self.start_method = start_method
        self._worker = worker
        batches = getattr(worker, "batches", None)  # loaders of other data have workers of their own
        self._clock = None if batches is None else batches.clock
        self._num_workers = num_workers
        self._items_ahead = items_ahead
        self._persistent = persistent
        self._batches: DataLoader[Item] | None = None
        self._watch: SampleWatch | None = None

    def items(self) -> Iterator[list[Ready]]:
        """What workers make, as it comes; a worker's error, its death and its silence are errors of ours."""
        if self._num_workers == 0:
            self._watch_samples(None)
            try:
                for made in self._worker:
                    if isinstance(made, LmmsStreamError):
                        raise made
                    yield made
            finally:
                self._watch_no_more()
            return
        try:
            waiting = self._start()
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):  # torch's, of one that died while others were started
                raise
            raise self.error(error) from error
        self._watch_samples(lambda worker: waiting._workers[worker].kill())
        keep = False
        try:
            while (item := next(waiting, None)) is not None:
                if isinstance(item, LmmsStreamError):
                    raise item
                yield item
            keep = self._persistent
        except GeneratorExit:
            keep = self._persistent
            raise
        except LmmsStreamError:
            raise
        except (RuntimeError, ConnectionError, EOFError) as error:  # a worker has died, or gave nothing in time
            if is_of_worker_code(error):
                raise
            raise self.error(error) from error
        finally:
            self._watch_no_more()
            if not keep:
                self.end()

    def end(self) -> None:
        """End the workers that run; the next iteration starts others."""
        if self._batches is not None:
            self._batches = None
            self._end()

    def error(self, cause: BaseException) -> WorkerError:
        """What to raise where torch says that a worker is dead or silent; a sample that took too long is why."""
        if self._watch is not None and self._watch.error is not None:
            return self._watch.error
        return WorkerError(
            f"a loader worker died or gave nothing within {self.timeout_s:.0f} s ({cause}): "
            "look for an out-of-memory kill, or set num_workers to 0 to see what happens"
        )

    def _watch_samples(self, end: Callable[[int], Any] | None) -> None:
        """Have samples watched, where they have a time. end: see SampleWatch."""
        self._watch_no_more()
        clock = self._clock
        self._watch = None if clock is None else SampleWatch(clock, end)

    def _watch_no_more(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _start(self) -> Any:
        """An iterator over what they make; kept ones go on."""
        if self._batches is not None and self._persistent:
            return iter(self._batches)
        start_method = self._method()
        around: AbstractContextManager[None] = nullcontext()
        if start_method == "server":
            start_worker_server()
            around = without_main()
        with around:
            self._batches, waiting = iterate_running(partial(self._make, start_method))
        if start_method == "server":
            watch_deaths(waiting)
        self._end = end_with(self, waiting)
        return waiting

    def _method(self) -> StartMethod:
        """How workers are started: from the server, if it was asked for and they can be."""
        if self.start_method == "server" and (reason := obstacle(self._worker)):
            logger.info("loader workers are forked from this process: of what they are given, %s", reason)
            return "fork"
        if self.start_method == "server" and (reason := address_obstacle()):
            logger.warning("loader workers are forked from this process: %s", reason)
            return "fork"
        # get_start_method() without allow_none would set the program's start method for good, and so would torch.
        method: Any = self.start_method or get_start_method(allow_none=True) or get_all_start_methods()[0]
        if method in ("spawn", "forkserver"):
            check_main_guard()
            if reason := address_obstacle():
                raise ConfigError(f"loader workers cannot be started by {method!r}: {reason}")
        return cast(StartMethod, method)

    def _make(self, start_method: StartMethod) -> tuple[DataLoader[Item], Running | None]:
        running = Running(self._num_workers) if start_method == "fork" else None
        begin: Callable[[int], None] = running.begin if running is not None else outlive_stop_signal
        if start_method == "server":
            begin = BeginFromServer()
        batches = DataLoader(
            self._worker if start_method == "fork" else SentWorker(self._worker),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            prefetch_factor=self._items_ahead,
            multiprocessing_context="forkserver" if start_method == "server" else start_method,
            persistent_workers=self._persistent,
            timeout=self.timeout_s,
            worker_init_fn=begin,
        )
        return batches, running


def _as_it_is(made: Any) -> Any:
    return made
