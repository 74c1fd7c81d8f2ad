"""The simulated cluster, and the prices of its store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...checks import check_fields, parse_bytes
from ...errors import ConfigError
from ...types import World

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12, "bit": 1.0}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes, resources of each node, and price of a request.

    num_workers: of each GPU's loader. bandwidth: between the store and a node, in bits ("5gbit") or bytes ("600mb") per
    second, including packet headers; None: no limit. cache: cache_limit of each source on each node, for example
    "500gb"; None: the limit of each dataset. step_time_s: seconds of a step, without waiting for batches. latency_s:
    seconds from a request to its first byte. request_price: dollars for 1000 requests; egress_price: dollars for 10**9
    bytes that leave the store. Default prices: S3 in the same region. peers: nodes take shards from other nodes with
    the shard, over another network than the store's.
    """

    num_nodes: int = 1
    gpus_per_node: int = 8
    replication: int = 1
    num_workers: int = 2
    bandwidth: str | int | None = None
    cache: str | int | None = None
    step_time_s: float = 1.0
    latency_s: float = 0.05
    request_price: float = 0.0004
    egress_price: float = 0.0
    peers: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (("num_nodes", 1), ("gpus_per_node", 1), ("num_workers", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("step_time_s", "latency_s", "request_price", "egress_price"):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (name == "step_time_s" and not value):
                raise ConfigError(f"{name} must be a number above 0, got {value}")
        _ = self.world, self.bytes_per_s, self.cache_bytes

    @property
    def world(self) -> World:
        return World(
            world_size=self.num_nodes * self.gpus_per_node, num_nodes=self.num_nodes, replication=self.replication
        )

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the link of one node."""
        return math.inf if self.bandwidth is None else parse_bandwidth(self.bandwidth)

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache is None else parse_bytes(self.cache, name="cache")


def parse_bandwidth(text: str | int) -> float:
    """Bytes a second: of "5gbit" (of 1000), or as sizes are written.

    >>> parse_bandwidth("5gbit"), parse_bandwidth("1kb")
    (625000000.0, 1024.0)
    """
    number = str(text).strip().lower().removesuffix("/s").removesuffix("ps")
    unit = next((unit for unit in _BITS if number.endswith(unit)), None)
    if unit is None:
        try:
            return float(parse_bytes(number, name="bandwidth"))
        except ConfigError:
            raise _no_bandwidth(text) from None
    try:
        found = float(number.removesuffix(unit)) * _BITS[unit] / 8
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise _no_bandwidth(text)
    return found


def _no_bandwidth(text: object) -> ConfigError:
    return ConfigError(f"bandwidth {text!r} is no amount a second: write it as 5gbit, 400mbit or 600mb (bytes)")


def parse_seconds(text: str) -> float:
    """Seconds, of "1.2s", "800ms", "2m" or a plain number; ConfigError for anything else.

    >>> parse_seconds("1.2s"), parse_seconds("800ms"), parse_seconds("3")
    (1.2, 0.8, 3.0)
    """
    number = text.strip().lower()
    unit = next((unit for unit in _SECONDS if number.endswith(unit)), "s")
    try:
        return float(number.removesuffix(unit)) * _SECONDS[unit]
    except ValueError:
        raise ConfigError(f"{text!r} is not a time: write for example 1.2s, 800ms or 2m") from None


def shown_bandwidth(bytes_per_s: float) -> str:
    """For people, in bits a second.

    >>> shown_bandwidth(625e6), shown_bandwidth(1e5)
    ('5.0 Gbit/s', '0.8 Mbit/s')
    """
    bits = 8 * bytes_per_s
    if bits >= 1e9:
        return f"{bits / 1e9:,.1f} Gbit/s"
    return f"{bits / 1e6:,.1f} Mbit/s"
