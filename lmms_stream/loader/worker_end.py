"""How workers of a DataLoader end: in bounded time, whatever they are at.

torch waits 5 s for each worker, and then sends it a SIGTERM, which workers of ours outlive for a while (signals.py). At
the end of a process multiprocessing sends that, too, and waits for the workers.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

ENDS_S = 1.0  # for workers to end by themselves
_POLL_S = 0.005
_running: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose workers were not ended


def end_with(owner: object, batches: Any) -> Callable[[], object]:
    """End the workers of a DataLoader's iterator when what is returned is called, at the latest with their owner.

    That is when the owner is deleted, or this process ends.
    """
    _running.add(batches)
    end = weakref.finalize(owner, _end_in, os.getpid(), batches)
    end.atexit = False  # its handler may come after multiprocessing's
    return end


def _end_in(pid: int, batches: Any) -> None:
    if pid == os.getpid():  # a fork has the iterator, too, and not its workers
        end_workers(batches)


@atexit.register
def _end_all() -> None:
    for batches in list(_running):
        end_workers(batches)


os.register_at_fork(after_in_child=_running.clear)


def end_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator; those that are busy for longer than ENDS_S are killed.

    They hold nothing that outlives them: their locks are the kernel's, and what they download has a temporary name.
    """
    _running.discard(batches)
    workers = batches._workers
    with suppress(RuntimeError):  # torch raises the death of a worker wherever we happen to be
        _tell(batches)
    with suppress(RuntimeError):
        _wait(workers)
    busy = [worker for worker in workers if worker.is_alive()]
    for end in (*(worker.kill for worker in busy), *(worker.join for worker in busy), batches._shutdown_workers):
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
        time.sleep(_POLL_S)


def is_of_worker_code(error: BaseException) -> bool:
    """Whether an error was raised by what a worker ran, and is passed on by torch; not that a worker is gone."""
    return str(error).startswith("Caught ")
