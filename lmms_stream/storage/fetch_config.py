"""Settings of downloads to this node (attempts, time, threads, disk space), and their counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checks import check_fields, parse_bytes
from ..errors import ConfigError
from .retry import DEFAULT_RETRY, Retry


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchConfig:
    """How shards come to this node."""

    attempts: int = DEFAULT_RETRY.attempts  # at each object; attempts that meet an outage of the store are not counted
    # after which a shard that has not come is an error; throttling and outages are waited out for so long
    timeout_s: float = DEFAULT_RETRY.timeout_s
    threads: int = 4  # downloads at once, of each process
    ahead: int = 64  # shards that a process fetches before it reads them, at most
    # room for the dataset's shards on this node, as bytes or "500mb", "1.5gb" (default: no limit)
    cache_limit: int | str | None = None
    # whether nodes of a run take shards from each other, so that each comes from the store once in all
    peers: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("threads", "ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        _ = self.retry, self.limit_bytes

    @property
    def retry(self) -> Retry:
        return Retry(attempts=self.attempts, timeout_s=self.timeout_s)

    @property
    def limit_bytes(self) -> int | None:
        return None if self.cache_limit is None else parse_bytes(self.cache_limit)


# Counts of the objects on this node and of downloads.


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
