"""Settings of downloads to this node (attempts, time, threads, disk space), and their counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checks import check_fields, parse_bytes
from ..errors import ConfigError
from .retry import DEFAULT_RETRY, Retry


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchConfig:
    """Settings for fetching shards to this node."""

    attempts: int = (
        DEFAULT_RETRY.attempts
    )  # attempts per object; attempts during an outage of the store are not counted
    # seconds after which a missing shard is an error; also the longest wait for throttling and outages
    timeout_s: float = DEFAULT_RETRY.timeout_s
    threads: int = 4  # concurrent downloads per process
    ahead: int = 64  # maximum shards fetched ahead of reading, per process
    # disk space for the dataset's shards on this node, in bytes or "500mb", "1.5gb" (default: no limit)
    cache_limit: int | str | None = None
    # whether nodes of a run take shards from each other: each shard is downloaded from the store once
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
    """Number of objects found on this node, number of objects downloaded from the store, and downloaded bytes.

    from_peers, peer_bytes: objects and bytes from other nodes. peer_failures: number of missing or invalid answers of
    other nodes. num_requests: requests to the store for these objects, num_retries of them after a failed request.
    throttled_ms: pauses because the store throttled or was unwell, summed over threads. num_evicted: files deleted
    under cache_limit.
    """

    hits: int = 0
    misses: int = 0
    num_bytes: int = 0
    from_peers: int = 0
    peer_bytes: int = 0
    peer_failures: int = 0
    num_requests: int = 0
    num_retries: int = 0
    throttled_ms: int = 0
    num_evicted: int = 0


class FetchTally:
    """Fetch counts of the threads of a process, without a lock: a fork could copy a held lock.

    tell: called after each addition, in any thread.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], None] = _nobody
        self._of_threads: dict[int, FetchCounts] = {}  # each thread writes only the thread's own counts

    def add(self, **counts: int) -> None:
        """Add to some of the counts, by the names in FetchCounts."""
        thread = threading.get_ident()
        self._of_threads[thread] = sum_counts([self._of_threads.get(thread, FetchCounts()), FetchCounts(**counts)])
        self.tell()

    @property
    def total(self) -> FetchCounts:
        return sum_counts(list(self._of_threads.values()))


def _nobody() -> None:
    """Tell nobody."""


def sum_counts(counts: Sequence[FetchCounts]) -> FetchCounts:
    return FetchCounts(*(sum(column) for column in zip(*counts, strict=True))) if counts else FetchCounts()
