"""How many objects were on this node and how many were downloaded, counted where they are fetched."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple


class FetchCounts(NamedTuple):
    """Objects that were on this node, those that were downloaded, and the bytes that came for these."""

    hits: int = 0
    misses: int = 0
    num_bytes: int = 0


class FetchTally:
    """What the threads of one process fetched. There is no lock: a fork could copy it while it is held."""

    def __init__(self) -> None:
        self._of_threads: dict[int, FetchCounts] = {}  # each thread writes its own

    def add(self, *, hits: int = 0, misses: int = 0, num_bytes: int = 0) -> None:
        thread = threading.get_ident()
        old = self._of_threads.get(thread, FetchCounts())
        self._of_threads[thread] = FetchCounts(old.hits + hits, old.misses + misses, old.num_bytes + num_bytes)

    @property
    def total(self) -> FetchCounts:
        return sum_counts(list(self._of_threads.values()))


def sum_counts(counts: Sequence[FetchCounts]) -> FetchCounts:
    return FetchCounts(*(sum(column) for column in zip(*counts, strict=True))) if counts else FetchCounts()
