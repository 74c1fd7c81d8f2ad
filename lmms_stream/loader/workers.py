"""The worker processes of a loader: started, asked in turn, ended. A worker's code -> [workers] -> items, in order."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from multiprocessing import connection, get_all_start_methods, get_start_method
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

from torch.utils.data import DataLoader

from ..errors import ConfigError, LmmsStreamError, WorkerError
from ..processes.fork_server import address_obstacle, check_main_guard
from ..processes.pool import obstacle
from ..signals import outlive_stop_signal
from .bad_samples import SampleWatch
from .batch_maker import Ready
from .worker import Item, PackWorker, SentWorker
from .worker_server import BeginFromServer, start_worker_server, without_main

StartMethod = Literal["fork", "spawn", "forkserver", "server"]
logger = logging.getLogger("lmms_stream")


class Workers:
    """Run a worker in num_workers processes, or with 0 in this process. See PackedLoader for the other settings.

    items_ahead: number of items ready in each worker.
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
        batches = getattr(worker, "batches", None)  # loaders of other data have other workers
        self._clock = None if batches is None else batches.clock
        self._num_workers = num_workers
        self._items_ahead = items_ahead
        self._persistent = persistent
        self._batches: DataLoader[Item] | None = None
        self._watch: SampleWatch | None = None
        self._waiting: Any = None  # iterator over the output of the latest workers
        self._turn = 0  # number of the latest iteration
        self._end: Callable[[], object] = lambda: None  # ends the workers of the latest iteration

    def items(self) -> Iterator[list[Ready]]:
        """Yield the output of workers in order; raise our errors for a worker's error, death or silence.

        Each iteration has separate workers. Persistent workers serve the latest iteration: ConfigError in earlier
        iterations.
        """
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
        self._turn = turn = self._turn + 1
        try:
            waiting, end = self._start()
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):  # torch reports a worker that died during the start of others
                raise
            raise self.error(error) from error
        self._waiting = waiting
        self._watch_samples(lambda worker: waiting._workers[worker].kill())
        keep = False
        try:
            while (item := next(waiting, None)) is not None:
                if isinstance(item, LmmsStreamError):
                    raise item
                yield item
                if self._persistent and turn != self._turn:
                    raise ConfigError(
                        "another iteration of this loader has begun, and persistent workers make batches of only one "
                        "iteration: use the newer iteration, make a second loader, or leave persistent_workers out"
                    )
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
            if turn == self._turn:
                self._watch_no_more()
                if not keep:
                    self._waiting = None
                    self.end()
            elif not self._persistent:
                end()  # workers of the latest iteration stay

    @property
    def num_ready(self) -> int:
        """Number of items made by workers, and not taken yet; may be read in any thread."""
        waiting = self._waiting
        if waiting is None:
            return 0
        early = [*waiting._task_info.values()]  # of each item asked for: its worker, then the item
        return int(waiting._worker_result_queue.qsize()) + sum(len(each) > 1 for each in early)

    def end(self) -> None:
        """End the workers that run; the next iteration starts others."""
        if self._batches is not None:
            self._batches = None
            self._end()

    def error(self, cause: BaseException) -> WorkerError:
        """Return the error for a worker that torch reports dead or silent, with the overdue sample, if any."""
        if self._watch is not None and self._watch.error is not None:
            return self._watch.error
        return WorkerError(
            f"a loader worker died or gave nothing within {self.timeout_s:.0f} s ({cause}): "
            "look for an out-of-memory kill, or set num_workers to 0 to see what happens"
        )

    def _watch_samples(self, end: Callable[[int], Any] | None) -> None:
        """Watch the time of samples, if it is limited. end: see SampleWatch."""
        self._watch_no_more()
        clock = self._clock
        self._watch = None if clock is None else SampleWatch(clock, end)

    def _watch_no_more(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _start(self) -> tuple[Any, Callable[[], object]]:
        """Return an iterator over the output of workers, and the function to end them; reuse persistent workers."""
        if self._batches is not None and self._persistent:
            return iter(self._batches), self._end
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
        return waiting, self._end

    def _method(self) -> StartMethod:
        """Return the start method of workers; "fork" instead of an unusable "server"."""
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


# Workers of a DataLoader that all run: a worker stuck after the fork is killed, and all workers are started again.
#
# A fork copies the locks held by other threads, but not the threads: the child may wait forever for a lock before our
# code runs. storage/retry.py lets forks wait for threads known to hold locks; other threads may also hold locks.

WAITS_S = (10.0, 30.0, 60.0)  # seconds in which workers must begin to run: at the first start, the second, the third
_START_POLL_S = 0.002


class Running:
    """The forked workers that already run Python: a byte per worker, in shared memory."""

    def __init__(self, num_workers: int):
        self._flags = mmap.mmap(-1, num_workers)

    def begin(self, worker: int) -> None:
        """Initialise a worker."""
        self._flags[worker] = 1
        outlive_stop_signal(worker)

    def stuck(self, workers: Sequence[BaseProcess], *, wait_s: float) -> list[BaseProcess]:
        """Return the live workers that have not begun within wait_s."""
        deadline = time.monotonic() + wait_s
        while True:
            with suppress(RuntimeError):  # raised by torch's signal handler if a worker dies
                waiting = [
                    each for each, flag in zip(workers, self._flags[:], strict=True) if not flag and each.is_alive()
                ]
                if not waiting or time.monotonic() > deadline:
                    return waiting
                time.sleep(_START_POLL_S)


def iterate_running(make: Callable[[], tuple[DataLoader[Any], Running | None]]) -> tuple[DataLoader[Any], Any]:
    """Return a loader and an iterator whose workers all run; WorkerError if some workers are stuck at each start.

    make: returns the loader, and the Running of forked workers (None for other start methods).
    """
    for wait_s in WAITS_S:
        loader, running = make()
        batches: Any = iter(loader)
        stuck = running.stuck(batches._workers, wait_s=wait_s) if running is not None else []
        if not stuck:
            return loader, batches
        logger.warning("%d loader workers did not begin within %g s of their fork, they are killed", len(stuck), wait_s)
        for end in (
            *(worker.kill for worker in stuck),
            *(partial(worker.join, ENDS_S) for worker in stuck),
            batches._shutdown_workers,
        ):
            with suppress(RuntimeError):  # torch's signal handler raises the death of a worker at any line
                end()
    raise WorkerError(
        f"{len(stuck)} loader workers did not begin within {WAITS_S[-1]:g} s of their fork, {len(WAITS_S)} times: is "
        "the machine out of memory? Set num_workers to 0, or start_method to spawn"
    )


# End of the workers of a DataLoader, in bounded time.
#
# torch waits 5 s for each worker, and then sends a SIGTERM, but our workers outlive SIGTERM for a while (signals.py).
# At the end of a process multiprocessing also sends SIGTERM, and waits for the workers.

ENDS_S = 1.0  # for workers to end by themselves
_END_POLL_S = 0.005
_running: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose workers were not ended


def end_with(owner: object, batches: Any) -> Callable[[], object]:
    """Return a function that ends the workers of a DataLoader's iterator.

    The workers end at the latest when the owner is deleted, or when this process ends.
    """
    _running.add(batches)
    end = weakref.finalize(owner, _end_in, os.getpid(), batches)
    end.atexit = False  # weakref's exit handler may run after multiprocessing's
    return end


def _end_in(pid: int, batches: Any) -> None:
    if pid == os.getpid():  # a fork has the iterator, but not the workers
        end_workers(batches)


@atexit.register
def _end_all() -> None:
    for batches in list(_running):
        end_workers(batches)


os.register_at_fork(after_in_child=_running.clear)


def end_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator; kill workers that are busy for longer than ENDS_S.

    Killing is safe: locks are the kernel's, and downloads have a temporary name.
    """
    _running.discard(batches)
    workers = batches._workers
    with suppress(RuntimeError):  # torch may raise the death of a worker at any line
        _tell(batches)
    with suppress(RuntimeError):
        _wait(workers)
    busy = [worker for worker in workers if worker.is_alive()]
    for end in (
        *(worker.kill for worker in busy),
        *(partial(worker.join, ENDS_S) for worker in busy),
        batches._shutdown_workers,
    ):
        with suppress(RuntimeError):
            end()


def _tell(batches: Any) -> None:
    batches._workers_done_event.set()
    for number in range(len(batches._workers)):
        if batches._persistent_workers or batches._workers_status[number]:
            batches._mark_worker_as_unavailable(number, shutdown=True)


def _wait(workers: Any) -> None:
    deadline = time.monotonic() + ENDS_S
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(_END_POLL_S)


def is_of_worker_code(error: BaseException) -> bool:
    """Whether torch passes on an error of the worker's code, rather than the end of a worker."""
    return str(error).startswith("Caught ")


def watch_deaths(batches: Any) -> None:
    """End the wait of a DataLoader's iterator when a worker dies.

    The kernel reports only the death of own children to torch, and the server's workers are not children. The wait for
    the rest of a batch never ends if the worker died while writing, unless no process can write any more.
    """
    threading.Thread(target=_watch, args=(weakref.ref(batches), batches._workers), daemon=True).start()


def _watch(iterator: weakref.ref[Any], workers: list[BaseProcess]) -> None:
    numbers = {worker.sentinel: number for number, worker in enumerate(workers)}
    while numbers:
        for sentinel in connection.wait(list(numbers)):
            number = numbers.pop(cast(int, sentinel))
            batches = iterator()
            if batches is None or batches._workers_done_event.is_set():
                return
            if batches._workers_status[number]:  # not asked to end
                for other in numbers.values():  # presumably alive
                    with suppress(ProcessLookupError):
                        os.kill(cast(int, workers[other].pid), signal.SIGKILL)
                batches._worker_result_queue._writer.close()
                return
