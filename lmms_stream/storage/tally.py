"""How many objects were on this node and how many were downloaded, counted where they are fetched."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple


class FetchCounts(NamedTuple):
    """Objects that were on this node, those that were downloaded from the store, and the bytes that came for these.

    from_peers, peer_bytes: the same of those that came from other nodes. peer_failures: how often one of these did not
    answer, or gave what is not valid.
    """

    hits: int = 0
    misses: int = 0
    num_bytes: int = 0
    from_peers: int = 0
    peer_bytes: int = 0
    peer_failures: int = 0


class FetchTally:
    """What the threads of one process fetched. There is no lock: a fork could copy it while it is held."""

    def __init__(self) -> None:
        self._of_threads: dict[int, FetchCounts] = {}  # each thread writes its own

    def add(self, **counts: int) -> None:
        """Add to some of the counts, by their names in FetchCounts."""
        thread = threading.get_ident()
        self._of_threads[thread] = sum_counts([self._of_threads.get(thread, FetchCounts()), FetchCounts(**counts)])

    @property
    def total(self) -> FetchCounts:
        return sum_counts(list(self._of_threads.values()))


def sum_counts(counts: Sequence[FetchCounts]) -> FetchCounts:
    return FetchCounts(*(sum(column) for column in zip(*counts, strict=True))) if counts else FetchCounts()
