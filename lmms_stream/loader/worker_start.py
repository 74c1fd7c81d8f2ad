"""Workers of a DataLoader that all run: one that its fork left stuck is killed, and all are started again.

A fork copies locks as other threads hold them at that moment, and the child waits for ever for one whose holder it does
not have, before any code of ours runs. threads.py makes forks wait for the threads that are known to do this; nothing
rules out others.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from ..errors import WorkerError
from ..signals import outlive_stop_signal

logger = logging.getLogger("lmms_stream")

WAITS_S = (10.0, 30.0, 60.0)  # seconds in which workers must begin to run: at the first start, the second, the third
_POLL_S = 0.002


class Running:
    """Which of some forked workers have come to run Python: a byte of each, in memory that they share."""

    def __init__(self, num_workers: int):
        self._flags = mmap.mmap(-1, num_workers)

    def begin(self, worker: int) -> None:
        """What a worker does first."""
        self._flags[worker] = 1
        outlive_stop_signal(worker)

    def stuck(self, workers: Sequence[BaseProcess], *, wait_s: float) -> list[BaseProcess]:
        """Those that live and do not run after as long."""
        deadline = time.monotonic() + wait_s
        while True:
            with suppress(RuntimeError):  # of the death of a worker: reading raises it, too
                waiting = [
                    each for each, flag in zip(workers, self._flags[:], strict=True) if not flag and each.is_alive()
                ]
                if not waiting or time.monotonic() > deadline:
                    return waiting
                time.sleep(_POLL_S)


def iterate_running(make: Callable[[], tuple[DataLoader[Any], Running | None]]) -> tuple[DataLoader[Any], Any]:
    """A loader and its iterator, with workers that all run; WorkerError when some are stuck each time.

    make: the loader, and what its forked workers tell when they run (None for workers that are not forked).
    """
    for wait_s in WAITS_S:
        loader, running = make()
        batches: Any = iter(loader)
        stuck = running.stuck(batches._workers, wait_s=wait_s) if running is not None else []
        if not stuck:
            return loader, batches
        logger.warning("%d loader workers did not begin within %g s of their fork, they are killed", len(stuck), wait_s)
        for end in (*(worker.kill for worker in stuck), *(worker.join for worker in stuck), batches._shutdown_workers):
            with suppress(RuntimeError):  # torch's signal handler raises the death of a worker at any line
                end()
    raise WorkerError(
        f"{len(stuck)} loader workers did not begin within {WAITS_S[-1]:g} s of their fork, {len(WAITS_S)} times: is "
        "the machine out of memory? Set num_workers to 0, or start_method to spawn"
    )
