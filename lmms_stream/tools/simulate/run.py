"""A run on a cluster, simulated: datasets + cluster -> [this] -> figures. No shard is read.

A run of many samples is simulated in windows: rounds through the shuffle blocks, evenly spread over the epoch. Each
window follows another round, to fill the nodes' caches.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...checks import shown_bytes
from ...errors import ConfigError
from ...plan.assign import check_global_batch, num_steps
from ...plan.planner import StepConfig, in_whole_steps, items_ahead, packs_ahead, steps_ahead, steps_asked_ahead
from ...plan.source_ranges import Weights
from .cluster import Cluster, shown_bandwidth
from .measured import Simulation, WindowTimes
from .needs import Needs, SimulatedOutlook
from .replay import Cache, Downloads, Replay
from .sources import COMPARED, Datasets, Sources

MAX_SAMPLES = 1 << 25  # of a run that is looked at step by step


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps to simulate: `epochs` epochs (with weights: the sources' max_epochs), or max_steps.

    max_samples: limit for a simulation of every step; longer runs are simulated in windows.
    """

    global_batch: int
    drop_last: bool = False
    epochs: int = 1
    max_steps: int | None = None
    max_samples: int = MAX_SAMPLES

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepWindow:
    """Counted steps [first, stop), after warmup steps from `warm` on. weight: number of steps represented by each."""

    warm: int
    first: int
    stop: int
    weight: float = 1.0


def simulate(
    dataset: Datasets | Sources,
    cluster: Cluster,
    *,
    global_batch: int,
    weights: Weights | Mapping[int, Weights] | None = None,
    max_epochs: Mapping[str, int] | None = None,
    drop_last: bool = False,
    epochs: int = 1,
    max_steps: int | None = None,
    max_samples: int = MAX_SAMPLES,
) -> Simulation:
    """Simulate a cluster that reads packs of a dataset, or of several by name, from their indexes and lengths.

    dataset: or sources that are described only, as `describe` returns them, with weights and max_epochs of their own.
    weights, max_epochs, global_batch, drop_last: as PackedLoader takes them. epochs: simulated one after another, each
    node keeping its cache; max_steps: at most so many steps. max_samples: see Steps. Raises ConfigError for what a
    loader refuses too, LengthsError for a dataset without lengths index.
    """
    if isinstance(dataset, Sources):
        sources = replace(
            dataset,
            weights=dataset.weights if weights is None else weights,
            max_epochs=dataset.max_epochs if max_epochs is None else max_epochs,
        )
    else:
        sources = Sources.of(dataset, weights=weights, max_epochs=max_epochs)
    steps = Steps(
        global_batch=global_batch, drop_last=drop_last, epochs=epochs, max_steps=max_steps, max_samples=max_samples
    )
    return simulate_sources(sources, cluster, steps)


def simulate_sources(sources: Sources, cluster: Cluster, steps: Steps) -> Simulation:
    """Simulate a run on opened sources; see `simulate`."""
    is_limited = any(limit is not None for limit in sources.limits_on(cluster).values())
    if cluster.peers and is_limited:
        raise ConfigError(
            "what peers still have under a cache limit is not simulated: leave out peers (--no-peers), or the limit"
        )
    config = _step_config(sources, cluster, steps, is_limited=is_limited)
    started = time.monotonic()
    total = _count_steps(sources, steps)
    counted_s = time.monotonic() - started
    started = time.monotonic()
    needs = Needs(sources.mixture, config)
    list(needs.walk(sources.mixture.start(), 1))
    planned_s = time.monotonic() - started
    num_items = _items_ahead(sources, cluster, config)
    limited = _step_config(sources, cluster, steps, is_limited=True)  # whose least cache is told
    ahead = packs_ahead(limited, num_workers=cluster.num_workers, num_items=_items_ahead(sources, cluster, limited))
    asked_ahead, asked_at_once = (
        steps_asked_ahead(config, num_workers=cluster.num_workers, num_items=items) for items in (num_items, 0)
    )
    taken_ahead = num_items * config.packs_per_item * max(1, cluster.num_workers) // config.micro_batches
    windows = _windows(sources, steps, total)
    downloads = _look(sources, cluster, config, windows, asked_ahead=asked_ahead, asked_at_once=asked_at_once)
    weights = np.repeat([each.weight for each in windows], [len(each.reads) for each in downloads])
    measured = WindowTimes(sources, cluster, downloads, weights, taken_ahead=taken_ahead)
    return measured.figures(config, num_steps=total, packs_ahead=ahead, planned_s=planned_s, counted_s=counted_s)


def _step_config(sources: Sources, cluster: Cluster, steps: Steps, *, is_limited: bool) -> StepConfig:
    """Step config of the loaders; see in_whole_steps."""
    check_global_batch(steps.global_batch, cluster.world.num_groups)
    config = StepConfig(global_batch=steps.global_batch, world=cluster.world, drop_last=steps.drop_last)
    if not sources.fills:
        return config
    longest = max(length for plan in sources.plans.values() for length in plan.packing.lengths)
    return in_whole_steps(config, packing_length=longest, is_limited=is_limited)


def _items_ahead(sources: Sources, cluster: Cluster, config: StepConfig) -> int:
    return items_ahead(config, num_workers=cluster.num_workers, reads_media=sources.reads_media)


def _count_steps(sources: Sources, steps: Steps) -> int:
    """Number of steps of the run; ConfigError for a run without end."""
    mixture = sources.mixture
    if mixture.schedule is None:
        packs = mixture.packs_of_epochs(mixture.start(), steps.epochs, global_batch=steps.global_batch)
    elif (left := mixture.packs_left(mixture.start(), global_batch=steps.global_batch)) is not None:
        packs = [left]
    elif steps.max_steps is None:
        raise ConfigError("sources with weights and without max_epochs have no end: say how many steps with max_steps")
    else:
        return steps.max_steps
    counts = [num_steps(global_batch=steps.global_batch, num_packs=n, drop_last=steps.drop_last) for n in packs]
    found = min(sum(counts), steps.max_steps or sum(counts))
    if not found:
        raise ConfigError(
            f"{sum(packs)} packs make no step of global_batch {steps.global_batch}: lower it, or leave drop_last out"
        )
    return found


def _windows(sources: Sources, steps: Steps, total: int) -> list[_StepWindow]:
    """Windows to simulate: all steps, or rounds through the blocks."""
    plans = sources.plans.values()
    in_epoch = sum(plan.num_packs(0) for plan in plans) / sources.epoch_size
    num_seen = total * steps.global_batch / in_epoch
    if num_seen <= steps.max_samples:
        return [_StepWindow(warm=0, first=0, stop=total)]
    if steps.epochs > 1:
        raise ConfigError(
            f"{steps.epochs} epochs of {sources.epoch_size} samples are more than max_samples {steps.max_samples}, "
            "and a simulation of windows cannot know what a cache keeps from one epoch to the next: simulate one "
            f"epoch, or raise max_samples to {math.ceil(num_seen)}"
        )
    per_round = sum(
        plan.num_canonical_nodes * min(plan.order.shuffle_block_size, plan.epoch_size // plan.num_canonical_nodes)
        for plan in plans
    )
    length = max(1, math.ceil(per_round * in_epoch / steps.global_batch))
    count = max(3, int(steps.max_samples / (2 * length * steps.global_batch / in_epoch)))
    if 2 * length * count >= total:
        return [_StepWindow(warm=0, first=0, stop=total)]
    firsts = np.linspace(0, total - length, count).astype(np.int64).tolist()
    # The first round and the last, where nodes run short, are like no other: they stand for themselves.
    weights = [1.0, *[(total / length - 2) / (count - 2)] * (count - 2), 1.0]
    return [
        _StepWindow(warm=max(0, first - length), first=first, stop=first + length, weight=weight)
        for first, weight in zip(firsts, weights, strict=True)
    ]


def _caches(sources: Sources, cluster: Cluster, needs: Needs) -> dict[int, Cache]:
    """Caches with a limit, by number of the source."""
    group_nodes = cluster.world.group_nodes
    mixture, batch = sources.mixture, needs.config.global_batch
    margin = steps_ahead(needs.config, num_workers=cluster.num_workers)
    margin += mixture.steps_of_window(mixture.start(), global_batch=batch)
    found, first = {}, 0
    for number, (name, limit) in enumerate(sources.limits_on(cluster).items()):
        sizes = sources.shards[name].stored
        if limit is not None:
            outlooks = [
                SimulatedOutlook(
                    sources, name, node * len(group_nodes) // cluster.num_nodes,
                    nodes=group_nodes, limit_bytes=limit, margin_steps=margin,
                )
                for node in range(cluster.num_nodes)
            ]  # fmt: skip
            found[number] = Cache(sizes, first, limit_bytes=limit, outlooks=outlooks)
        first += len(sizes)
    return found


def _look(
    sources: Sources,
    cluster: Cluster,
    config: StepConfig,
    windows: list[_StepWindow],
    *,
    asked_ahead: int,
    asked_at_once: int,
) -> list[Downloads]:
    """Downloads of each window; steps are numbered across windows."""
    found = []
    seen = 0
    mixture = sources.walked
    needs = Needs(mixture, config)
    batch = config.global_batch
    at, step = mixture.start(), 0  # how far turns are taken: of a long run that takes its time
    for window in windows:
        replay = Replay(
            sources.all_shards,
            caches=_caches(sources, cluster, needs),
            num_nodes=cluster.num_nodes,
            steps_ahead=asked_ahead,
            steps_at_once=asked_at_once,
            peers=cluster.peers,
        )
        at = mixture.skip(at, window.warm - step, global_batch=batch)
        cursor, step = at, window.warm
        if window.first > window.warm:
            replay.run(needs.walk(cursor, window.first - window.warm))
            cursor = mixture.skip(cursor, window.first - window.warm, global_batch=batch)
        first = window.first - window.warm
        counted = replay.run(needs.walk(cursor, window.stop - window.first, first=first))
        shift = seen - first
        shifted = {name: getattr(counted, name) + shift for name in ("steps", "released", "at_hand")}
        found.append(replace(counted, **shifted))
        seen += len(counted.reads)
    return found


# The same run with other settings, side by side, and what to change. sources + cluster -> [this] -> simulations.

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
    """Return the change to make, in a line; other canonical nodes are simulated if these do not divide among nodes."""
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
