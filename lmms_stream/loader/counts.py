"""Counts of a loader's processes: fetched files, and packs made of samples. Workers write, the loader reads.

Workers share the memory of their counts with the loader's process: no message is sent, and a worker that is busy shows
its work, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..processes.shared_tensors import SharesTensors, shared_zeros
from ..storage.fetch_config import FetchCounts, FetchTally, sum_counts

_LATELY_US = 60_000_000  # after this time the next sample replaces the slowest


class MakeCounts(NamedTuple):
    """Packs that a process has made of a source's samples since the beginning.

    making_us: microseconds for all packs, and reading_us of them to read the stored samples. slowest_us, slowest_id:
    time and id of the slowest sample of the last minute, by the time of its making slowest_at_us. begun_us: begin of
    the pack in the making, 0 between packs. Both are moments of the machine's monotonic clock.
    """

    num_packs: int
    num_samples: int
    making_us: int
    reading_us: int
    slowest_us: int
    slowest_id: int
    slowest_at_us: int
    begun_us: int

    @property
    def with_begun(self) -> MakeCounts:
        """Return these counts with the time of the pack in the making."""
        return self._replace(making_us=self.making_us + (now_us() - self.begun_us if self.begun_us else 0))


_PACKS, _SAMPLES, _MAKING, _READING, _SLOWEST, _SLOWEST_ID, _SLOWEST_AT, _BEGUN = range(len(MakeCounts._fields))


def now_us() -> int:
    """Return the machine's monotonic clock in microseconds, the same in all processes."""
    return time.monotonic_ns() // 1000


class MakeTally:
    """Writes the MakeCounts of this process by source into rows, int64[num_sources, fields]."""

    def __init__(self, sources: Sequence[str], rows: NDArray[np.int64] | None = None):
        self.rows = np.zeros((len(sources), len(MakeCounts._fields)), np.int64) if rows is None else rows
        self._numbers = {source: number for number, source in enumerate(sources)}
        self._row = self.rows[0]
        self._paused_us = 0

    def clock_us(self) -> int:
        """Return a clock that stands still in pauses."""
        return now_us() - self._paused_us

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Leave the time inside out of making and reading: a reader waits for a download."""
        row, since_us = self._row, now_us()
        is_making = bool(row[_BEGUN])
        if is_making:
            row[_MAKING] += since_us - row[_BEGUN]
            row[_BEGUN] = 0
        try:
            yield
        finally:
            self._paused_us += now_us() - since_us
            if is_making:
                row[_BEGUN] = now_us()

    def begin(self, source: str) -> None:
        """Begin packs of a source; pad packs have no source and are not counted."""
        if source in self._numbers:
            self._row = self.rows[self._numbers[source]]
            self._row[_BEGUN] = now_us()

    def read(self, since_us: int) -> None:
        """Count the time from a moment of the clock until now as reading."""
        self._row[_READING] += self.clock_us() - since_us

    def sample(self, sample_id: int, seconds_us: int) -> None:
        """Compare a sample's time with the slowest sample."""
        row, now = self._row, now_us()
        if seconds_us > row[_SLOWEST] or now - row[_SLOWEST_AT] > _LATELY_US:
            row[_SLOWEST], row[_SLOWEST_ID], row[_SLOWEST_AT] = seconds_us, sample_id, now

    def end(self, *, num_packs: int, num_samples: int, only_reads: bool = False) -> None:
        """End the begun packs. only_reads: all of the time is reading, as of samples stored as tokens."""
        row = self._row
        if row[_BEGUN]:
            spent_us = now_us() - row[_BEGUN]
            row[_BEGUN] = 0
            row[_PACKS] += num_packs
            row[_SAMPLES] += num_samples
            row[_MAKING] += spent_us
            if only_reads:
                row[_READING] = row[_MAKING]


class LoaderCounts(NamedTuple):
    """Counts of a rank's loader. fetched: of all processes, by source, or by stream of a source with several. made: of
    each worker, then of the rank itself.

    num_ready: items made by workers, and not taken yet.
    """

    fetched: dict[str, FetchCounts]
    made: list[dict[str, MakeCounts]]
    num_ready: int


class WorkerCounts(SharesTensors):
    """Counts of num_workers processes, since the beginning; a restarted worker continues in the same rows.

    The counts of packs have another row for the loader's own process. num_streams: stored datasets of all sources.
    """

    def __init__(self, num_workers: int, num_sources: int = 1, num_streams: int = 1):
        zeros = shared_zeros if num_workers else torch.zeros
        self._fetched = zeros(num_workers, num_streams, len(FetchCounts._fields), dtype=torch.int64)
        self._made = zeros(num_workers + 1, num_sources, len(MakeCounts._fields), dtype=torch.int64)

    def made_by(self, worker: int) -> NDArray[np.int64]:
        """Return the rows of a worker, -1: of the loader's process, to write: int64[num_sources, fields]."""
        rows: NDArray[np.int64] = self._made[worker].numpy()
        return rows

    def teller(self, worker: int, tallies: Sequence[FetchTally]) -> Callable[[], None]:
        """Return a function that reports fetched files to the loader; tallies and a worker call it from time to time.

        tallies: by stream.
        """
        rows = self._fetched[worker].numpy()
        at_start = _totals(tallies)
        told = rows.copy()

        def tell() -> None:
            now = told + _totals(tallies) - at_start
            if (rows != now).any():
                rows[:] = now

        for each in tallies:
            each.tell = tell
        return tell

    def fetched_by_stream(self) -> list[FetchCounts]:
        return [FetchCounts(*row) for row in self._fetched.sum(dim=0).tolist()]

    def made(self) -> list[list[MakeCounts]]:
        """Return the counts of packs of each process, by source."""
        return [[MakeCounts(*row) for row in rows] for rows in self._made.tolist()]


class FetchMeter:
    """Counts of files fetched by the loader and by workers, since the loader was made. tallies: by stream."""

    def __init__(self, tallies: Sequence[FetchTally], workers: WorkerCounts):
        self._tallies = tallies
        self._workers = workers
        self._at_start = _totals(tallies)

    @property
    def total(self) -> FetchCounts:
        return sum_counts(self.by_stream())

    def by_stream(self) -> list[FetchCounts]:
        here = (_totals(self._tallies) - self._at_start).tolist()
        return [
            sum_counts([FetchCounts(*row), of_workers])
            for row, of_workers in zip(here, self._workers.fetched_by_stream(), strict=True)
        ]


def _totals(tallies: Sequence[FetchTally]) -> NDArray[np.int64]:
    return np.array([tally.total for tally in tallies], np.int64).reshape(-1, len(FetchCounts._fields))
