"""The same run with other settings, side by side, and what to change. sources + cluster -> [this] -> simulations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..storage.sizes import shown_bytes
from .cluster import Cluster, shown_bandwidth
from .figures import Simulation
from .run import Steps, simulate_sources
from .sources import COMPARED, Sources

COUNTS = ("num_nodes", "num_workers")
OF_CLUSTER = (*COUNTS, "bandwidth", "cache")
ADVISED = ("num_canonical_nodes", "shuffle_block_size", "shard_bytes")  # packing_length is another run
WORTH = 1.1  # times fewer bytes that a setting is advised for
LIKE_THE_BEST = 1.02  # times the fewest bytes: the first of such settings is advised
LITTLE_WAIT = 0.02  # of the time that steps may wait without advice

Settings = Mapping[str, Sequence[str]]


def parse_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Settings and their values, of texts as "num_canonical_nodes=8,64"; ConfigError for anything else."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name not in (*COMPARED, *OF_CLUSTER) or not equals or not all(values.split(",")):
            raise ConfigError(
                f"{text!r} names nothing to compare: write NAME=VALUE,VALUE with one of "
                f"{', '.join((*COMPARED, *OF_CLUSTER))}"
            )
        found.setdefault(name, []).extend(values.split(","))
    return found


def compare(
    sources: Sources, cluster: Cluster, steps: Steps, *, settings: Settings
) -> Iterator[tuple[str, Simulation]]:
    """The run with each value of each setting, all others as they are; each by "name=value"."""
    for name, values in settings.items():
        for value in values:
            if name in COMPARED:
                yield f"{name}={value}", simulate_sources(sources.with_setting(name, value), cluster, steps)
            else:
                yield f"{name}={value}", simulate_sources(sources, _with_setting(cluster, name, value), steps)


def _with_setting(cluster: Cluster, name: str, value: str) -> Cluster:
    if name not in COUNTS:
        changed: dict[str, Any] = {name: value}
    elif value.isdecimal():
        changed = {name: int(value)}
    else:
        raise ConfigError(f"{name}={value} is no whole number")
    return dataclasses.replace(cluster, **changed)


def advise(
    simulation: Simulation,
    sources: Sources,
    cluster: Cluster,
    steps: Steps,
    *,
    compared: Mapping[str, Simulation],
) -> str:
    """What to change, in one line; where canonical nodes do not divide among nodes, the run is simulated with some."""
    for name, limit in sources.limits_on(cluster).items():
        least = simulation.least_cache_limits[name]
        if limit is not None and limit < least:
            of_source = f" for {name}" if len(sources.plans) > 1 else ""
            return (
                f"cache {shown_bytes(least)}{of_source}: loaders refuse less with this order, or lower "
                "shuffle_block_size or num_canonical_nodes"
            )
    best = _with_fewest_bytes(simulation, sources, cluster, steps, compared)
    if best is not None:
        name, times = best
        return f"{name}: {times:.1f} times fewer bytes"
    if simulation.wait_share > LITTLE_WAIT:
        return (
            f"bandwidth {shown_bandwidth(simulation.needed_bandwidth)} a node: steps wait {simulation.wait_share:.0%} "
            "of the time without"
        )
    return "nothing to change: shards come in time, and hardly any to more than one node"


def _with_fewest_bytes(
    simulation: Simulation, sources: Sources, cluster: Cluster, steps: Steps, compared: Mapping[str, Simulation]
) -> tuple[str, float] | None:
    """The setting of the order that downloads least, and how many times less; None where it is not worth it."""
    found = {name: each for name, each in compared.items() if name.partition("=")[0] in ADVISED}
    nodes, canonical = cluster.num_nodes, simulation.num_canonical_nodes
    shuffled = all(plan.order.shuffle for plan in sources.plans.values())
    if nodes > 1 and canonical % nodes and shuffled:
        divided = -(-canonical // nodes) * nodes
        found |= dict(compare(sources, cluster, steps, settings={"num_canonical_nodes": [str(divided)]}))
    fewest = min((each.download_bytes for each in found.values()), default=0)
    best = next((name for name, each in found.items() if each.download_bytes <= LIKE_THE_BEST * fewest), None)
    if best is None:
        return None
    times = simulation.download_bytes / max(1, found[best].download_bytes)
    return (best.replace("=", " "), times) if times > WORTH else None
