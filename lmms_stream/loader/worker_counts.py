"""What loader workers fetched, as their loader reads it: memory that they share, a row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..processes.shared_tensors import SharesTensors, shared_zeros
from ..storage.tally import FetchCounts, FetchTally, sum_counts


class WorkerCounts(SharesTensors):
    """Counts of num_workers processes, since the beginning; a worker that is started again goes on in its row."""

    def __init__(self, num_workers: int):
        zeros = shared_zeros if num_workers else torch.zeros
        self._rows = zeros(num_workers, len(FetchCounts._fields), dtype=torch.int64)

    def teller(self, worker: int, tallies: Sequence[FetchTally]) -> Callable[[], None]:
        """What a worker calls now and then, to let its loader know what it fetched since this call."""
        row = self._rows[worker].numpy()
        at_start = _total(tallies)
        told, last = row.copy(), at_start

        def tell() -> None:
            nonlocal last
            now = _total(tallies)
            if now != last:
                row[:] = told + now - at_start
                last = now

        return tell

    @property
    def total(self) -> FetchCounts:
        return FetchCounts(*self._rows.sum(dim=0).tolist())


class FetchMeter:
    """What a loader fetched since it was made: by itself, and by its workers."""

    def __init__(self, tallies: Sequence[FetchTally], workers: WorkerCounts):
        self._tallies = tallies
        self._workers = workers
        self._at_start = _total(tallies)

    @property
    def total(self) -> FetchCounts:
        here = [now - before for now, before in zip(_total(self._tallies), self._at_start, strict=True)]
        return sum_counts([FetchCounts(*here), self._workers.total])


def _total(tallies: Sequence[FetchTally]) -> FetchCounts:
    return sum_counts([tally.total for tally in tallies])
