"""How shards come to this node: attempts, time, downloads at once, room."""

from __future__ import annotations

from dataclasses import dataclass

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
