"""Which sample each worker is at, and since when: memory that they share with their loader, which watches it."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import WorkerError
from ..processes.shared_tensors import SharesTensors, shared_zeros
from ..storage.threads import start_thread

LONGEST_POLL_S = 1.0
LEAST_GRACE_S = 5.0  # that a process which works on a sample itself has beyond its time, to raise the error
logger = logging.getLogger("lmms_stream")


class SampleClock(SharesTensors):
    """A row a process: when its sample began (nanoseconds, 0: it is at none), the number of its source, its id.

    timeout_s: a sample that takes longer is an error. sources: their names.
    """

    def __init__(self, num_workers: int, *, sources: Sequence[str], timeout_s: float):
        self.sources = tuple(sources)
        self.timeout_s = timeout_s
        zeros = shared_zeros if num_workers else torch.zeros
        self._rows = zeros(max(1, num_workers), 3, dtype=torch.int64)

    @contextmanager
    def at(self, source: str, sample_id: int, *, worker: int) -> Iterator[None]:
        """Say what is begun; WorkerError where it took too long."""
        row = self._rows[worker].numpy()
        row[1], row[2] = self.sources.index(source), sample_id
        row[0] = began = time.monotonic_ns()
        try:
            yield
        finally:
            row[0] = 0
        if time.monotonic_ns() - began > self.timeout_s * 1e9:
            raise self.error(source, sample_id)

    def begun(self, worker: int) -> int:
        """When the sample that a worker is at began; 0: it is at none."""
        return int(self._rows[worker, 0])

    def overdue(self) -> tuple[int, WorkerError] | None:
        """The first worker whose sample takes too long, and the error that names it."""
        for worker, (began, source, sample_id) in enumerate(self._rows.tolist()):
            if began and time.monotonic_ns() - began > self.timeout_s * 1e9:
                return worker, self.error(self.sources[source], sample_id)
        return None

    def error(self, source: str, sample_id: int) -> WorkerError:
        return WorkerError(
            f"sample {source}:{sample_id} takes longer than sample_timeout_s, {self.timeout_s:g} s: raise it, or leave "
            f"the sample out with this line in a file that drop names: {source}:{sample_id}"
        )


class SampleWatch:
    """A thread that ends the worker whose sample takes too long, so that whoever waits for it is told.

    end: ends a worker, by its number. None: samples are processed by this process itself, which nobody else can end.
    It raises the error once the sample is done, and ends if it is not after as long again, or LEAST_GRACE_S.
    """

    def __init__(self, clock: SampleClock, end: Callable[[int], Any] | None):
        self.error: WorkerError | None = None
        self._clock, self._end = clock, end
        self._stop = threading.Event()
        start_thread(self._watch, name="lmms_stream-samples")

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        clock = self._clock
        while not self._stop.wait(min(LONGEST_POLL_S, clock.timeout_s / 4)):
            if (overdue := clock.overdue()) is None:
                continue
            worker, self.error = overdue
            logger.error("%s", self.error)
            if self._end is not None:
                self._end(worker)
                return
            begun = clock.begun(worker)
            grace_s = max(clock.timeout_s, LEAST_GRACE_S)
            if begun and not self._stop.wait(grace_s) and clock.begun(worker) == begun:
                _end_this_process(self.error)


def _end_this_process(error: WorkerError) -> None:
    """End with the reason, and with where each thread stands, whatever the main thread is at."""
    sys.stderr.write(f"this process ends itself, as it is still at this sample; error: {error}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
