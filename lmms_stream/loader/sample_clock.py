"""Which sample each worker is at, and since when: memory that they share with their loader, which watches it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import WorkerError
from ..storage.threads import start_thread

LONGEST_POLL_S = 1.0
logger = logging.getLogger("lmms_stream")


class SampleClock:
    """A row a process: when its sample began (nanoseconds, 0: it is at none), the number of its source, its id.

    timeout_s: a sample that takes longer is an error. sources: their names.
    """

    def __init__(self, num_workers: int, *, sources: Sequence[str], timeout_s: float):
        self.sources = tuple(sources)
        self.timeout_s = timeout_s
        self._rows = torch.zeros(max(1, num_workers), 3, dtype=torch.int64)
        if num_workers:
            self._rows.share_memory_()

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
    """A thread that ends the worker whose sample takes too long, so that whoever waits for it is told."""

    def __init__(self, clock: SampleClock, end: Callable[[int], Any]):
        self.error: WorkerError | None = None
        self._clock, self._end, self._pid = clock, end, os.getpid()
        self._stop = threading.Event()
        start_thread(self._watch, name="lmms_stream-samples")

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(min(LONGEST_POLL_S, self._clock.timeout_s / 4)):
            if (overdue := self._clock.overdue()) is not None:
                worker, self.error = overdue
                logger.error("%s", self.error)
                self._end(worker)
                return
