"""How workers of a DataLoader end: in bounded time, whatever they are at.

torch waits 5 s for each worker, and then sends it a SIGTERM, which workers of ours outlive for a while (signals.py).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

ENDS_S = 1.0  # for workers to end by themselves
_POLL_S = 0.005


def end_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator; those that are busy for longer than ENDS_S are killed.

    They hold nothing that outlives them: their locks are the kernel's, and what they download has a temporary name.
    """
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
