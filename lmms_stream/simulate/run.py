"""A run on a cluster, simulated: datasets + cluster -> [this] -> figures. No shard is read.

A run of many samples is not looked at step by step: windows of one round through the shuffle blocks are, evenly spread
over the epoch, each after another round that says what the nodes have by then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..plan.ahead import in_whole_steps, items_ahead, packs_ahead
from ..plan.assign import check_global_batch, num_steps
from ..plan.cursor import Cursor
from ..plan.planner import StepConfig
from ..plan.weights import Weights
from ..storage.room import least_cache_limit
from .cluster import Cluster
from .figures import NodeFigures, Series, Simulation
from .kernels import wait_for_links
from .memory import worker_bytes
from .needs import Needs
from .replay import Downloads, Replay
from .sources import Datasets, Sources

MAX_SAMPLES = 1 << 26  # of a run that is looked at step by step
NO_WAIT = 0.01  # of the time: a link with which steps wait no longer is fast enough

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Which steps are simulated: those of `epochs` epochs (with weights: of the sources' max_epochs), or max_steps.

    max_samples: as many are looked at step by step; of a run with more, windows.
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
class _Window:
    """Steps [first, stop) that are counted, after those from `warm` on."""

    warm: int
    first: int
    stop: int


def simulate(
    dataset: Datasets,
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
    """What a cluster does with packs of a dataset, or of several by name, from their indexes and lengths alone.

    weights, max_epochs, global_batch, drop_last: as PackedLoader takes them. epochs: simulated one after another, each
    node keeping its cache; max_steps: at most so many steps. max_samples: see Steps. Raises ConfigError for what a
    loader refuses too, LengthsError for a dataset without lengths index.
    """
    sources = Sources.of(dataset, weights=weights, max_epochs=max_epochs)
    steps = Steps(
        global_batch=global_batch, drop_last=drop_last, epochs=epochs, max_steps=max_steps, max_samples=max_samples
    )
    return simulate_sources(sources, cluster, steps)


def simulate_sources(sources: Sources, cluster: Cluster, steps: Steps) -> Simulation:
    """The same, of sources that are open."""
    config = _step_config(sources, cluster, steps)
    started = time.monotonic()
    total = _count_steps(sources, steps)
    counted_s = time.monotonic() - started
    started = time.monotonic()
    needs = Needs(sources.mixture, config)
    list(needs.walk(sources.mixture.start(), 1))
    planned_s = time.monotonic() - started
    ahead = packs_ahead(config, num_workers=cluster.num_workers, num_items=_items_ahead(sources, cluster, config))
    windows = _windows(sources, steps, total)
    downloads = _look(sources, cluster, needs, windows, steps_ahead=ahead * cluster.num_nodes // steps.global_batch)
    return _Measured(sources, cluster, config, downloads, total).figures(
        samples_ahead=ahead, planned_s=planned_s, counted_s=counted_s
    )


def _step_config(sources: Sources, cluster: Cluster, steps: Steps) -> StepConfig:
    check_global_batch(steps.global_batch, cluster.world.num_groups)
    config = StepConfig(global_batch=steps.global_batch, world=cluster.world, drop_last=steps.drop_last)
    if not sources.fills:
        return config
    longest = max(plan.packing.packing_length for plan in sources.plans.values())
    return in_whole_steps(config, packing_length=longest)


def _items_ahead(sources: Sources, cluster: Cluster, config: StepConfig) -> int:
    return items_ahead(config, num_workers=cluster.num_workers, reads_media=sources.reads_media)


def _count_steps(sources: Sources, steps: Steps) -> int:
    """Steps of the run; ConfigError where it has no end."""
    mixture = sources.mixture
    if mixture.schedule is None:
        packs = [sum(plan.num_packs(epoch) for plan in sources.plans.values()) for epoch in range(steps.epochs)]
    elif (left := mixture.packs_left(mixture.start())) is not None:
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


def _windows(sources: Sources, steps: Steps, total: int) -> list[_Window]:
    """What is looked at: all, or rounds through the blocks."""
    plans = sources.plans.values()
    in_epoch = sum(plan.num_packs(0) for plan in plans) / sources.num_samples
    num_seen = total * steps.global_batch / in_epoch
    if num_seen <= steps.max_samples:
        return [_Window(warm=0, first=0, stop=total)]
    if steps.epochs > 1:
        raise ConfigError(
            f"{steps.epochs} epochs of {sources.num_samples} samples are more than max_samples {steps.max_samples}, and "
            "what a cache keeps from one to the next is not known from windows: simulate one epoch, or raise "
            f"max_samples to {math.ceil(num_seen)}"
        )
    per_round = sum(
        plan.num_canonical_nodes * min(plan.order.shuffle_block_size, plan.num_samples // plan.num_canonical_nodes)
        for plan in plans
    )
    length = max(1, math.ceil(per_round * in_epoch / steps.global_batch))
    count = max(1, int(steps.max_samples / (2 * length * steps.global_batch / in_epoch)))
    if 2 * length * count >= total:
        return [_Window(warm=0, first=0, stop=total)]
    firsts = np.linspace(0, total - length, count).astype(np.int64).tolist()
    return [_Window(warm=max(0, first - length), first=first, stop=first + length) for first in firsts]


def _look(
    sources: Sources, cluster: Cluster, needs: Needs, windows: list[_Window], *, steps_ahead: int
) -> list[Downloads]:
    """The downloads of each window; its steps count through the windows."""
    found = []
    seen = 0
    mixture = sources.mixture
    for window in windows:
        replay = Replay(
            sources.all_shards,
            num_nodes=cluster.num_nodes,
            steps_ahead=steps_ahead,
            with_following=cluster.cache is None,
            limit_bytes=cluster.cache_bytes,
        )
        batch = needs.config.global_batch
        cursor: Cursor = mixture.skip(mixture.start(), window.warm, global_batch=batch)
        if window.first > window.warm:
            warmed = replay.run(needs.walk(cursor, window.first - window.warm))
            cursor = mixture.skip(cursor, window.first - window.warm, global_batch=batch)
            del warmed
        first = window.first - window.warm
        counted = replay.run(needs.walk(cursor, window.stop - window.first, first=first))
        shift = seen - first
        found.append(replace(counted, steps=counted.steps + shift, released=counted.released + shift))
        seen += len(counted.reads)
    return found


class _Measured:
    """Downloads of windows, as figures of the whole run."""

    def __init__(
        self, sources: Sources, cluster: Cluster, config: StepConfig, downloads: list[Downloads], num_steps: int
    ):
        self._sources, self._cluster, self._config = sources, cluster, config
        self._downloads, self._num_steps = downloads, num_steps
        self._steps = np.concatenate([each.steps for each in downloads])
        self._nodes = np.concatenate([each.nodes for each in downloads])
        self._released = np.concatenate([each.released for each in downloads])
        self._again = np.concatenate([each.again for each in downloads])
        shards = np.concatenate([each.shards for each in downloads])
        self._shard_ids = shards
        self._bytes = sources.all_shards.loaded[shards]
        self._requests = sources.all_shards.requests[shards]
        self._reads = np.concatenate([each.reads for each in downloads])
        self._seen = len(self._reads)
        self._scale = num_steps / self._seen

    def figures(self, *, samples_ahead: int, planned_s: float, counted_s: float) -> Simulation:
        sources, cluster = self._sources, self._cluster
        waits = self._waits(cluster.bytes_per_s, latency_s=cluster.latency_s)
        total_s = self._num_steps * cluster.step_time_s + waits[0] + waits[1:].sum() * self._scale
        nodes = self._of_nodes()
        requests = np.bincount(self._steps, weights=self._requests, minlength=self._seen)
        durations = waits + cluster.step_time_s
        first_bytes = self._by_node(self._steps == 0).max(initial=0)
        copies = np.bincount(self._shard_ids[~self._again], minlength=len(sources.all_shards.stored))
        num_downloads = sum(each.num_downloads for each in nodes)
        num_bytes = sum(each.download_bytes for each in nodes)
        num_requests = float(requests.sum()) * self._scale
        to_first = (sources.index_bytes + float(first_bytes)) / cluster.bytes_per_s + cluster.latency_s
        return Simulation(
            num_nodes=cluster.num_nodes,
            num_ranks=cluster.world.world_size,
            num_canonical_nodes=sources.mixture.num_canonical_nodes,
            num_samples=sources.num_samples,
            num_shards=len(sources.all_shards.stored),
            dataset_bytes=int(sources.all_shards.stored.sum()),
            num_steps=self._num_steps,
            num_steps_seen=self._seen,
            total_s=total_s,
            num_downloads=num_downloads,
            download_bytes=num_bytes,
            bytes_of_busiest_node=max(each.download_bytes for each in nodes),
            copies=float(copies.sum()) / max(1, int(np.count_nonzero(copies))),
            num_shared_shards=round(int(np.count_nonzero(copies > 1)) * self._scale),
            num_again=sum(each.num_again for each in nodes),
            num_asked_only=round(sum(each.asked_only for each in self._downloads) * self._scale)
            if self._scale == 1
            else 0,
            least_cache_bytes=self._least_cache(samples_ahead),
            live_bytes=max(each.live_bytes for each in self._downloads),
            mean_bandwidth=num_bytes / cluster.num_nodes / total_s,
            needed_bandwidth=self._needed_bandwidth(),
            wait_s=float(waits[1:].sum()) * self._scale,
            wait_share=float(waits[1:].sum()) * self._scale / total_s,
            first_wait_s=float(waits[0]),
            requests_per_s=num_requests / total_s,
            peak_requests_per_s=float((requests[1:] / durations[1:]).max(initial=0.0)),
            request_dollars=num_requests / 1000 * cluster.request_price,
            egress_dollars=num_bytes / 1e9 * cluster.egress_price,
            worker_bytes=self._worker_bytes(),
            first_batch_warm_s=planned_s,
            first_batch_cold_s=planned_s + counted_s + to_first,
            imbalance=float(np.mean(np.concatenate([each.imbalance for each in self._downloads]))),
            num_spilled=round(sum(each.num_spilled for each in self._downloads) * self._scale),
            nodes=nodes,
            series=self._series(waits),
        )

    def _waits(self, bytes_per_s: float, *, latency_s: float) -> NDArray[np.float64]:
        """Seconds before each step."""
        starts, waits = np.zeros(self._seen), np.zeros(self._seen)
        wait_for_links(
            self._steps, self._nodes, self._released, self._bytes, bytes_per_s, latency_s, self._cluster.step_time_s,
            np.zeros(self._cluster.num_nodes), starts, waits,
        )  # fmt: skip
        return waits

    def _needed_bandwidth(self) -> float:
        """Bytes a second of each link with which steps after the first wait less than NO_WAIT of the time."""
        time_s = self._seen * self._cluster.step_time_s

        def is_enough(bytes_per_s: float) -> bool:
            return float(self._waits(bytes_per_s, latency_s=0.0)[1:].sum()) <= NO_WAIT * time_s

        high = max(1.0, float(self._by_node(np.ones(len(self._steps), bool)).max(initial=0)) / time_s)
        low = high / 2
        while not is_enough(high):
            low, high = high, 2 * high
        while high > 1.02 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high

    def _by_node(self, here: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Bytes of some downloads, of each node."""
        num_nodes = self._cluster.num_nodes
        return np.bincount(self._nodes[here], weights=self._bytes[here], minlength=num_nodes)

    def _of_nodes(self) -> tuple[NodeFigures, ...]:
        num_nodes = self._cluster.num_nodes
        columns = (
            np.bincount(self._nodes, minlength=num_nodes),
            np.bincount(self._nodes[self._again], minlength=num_nodes),
            self._by_node(np.ones(len(self._nodes), bool)),
        )
        scaled = [np.rint(column * self._scale).astype(np.int64).tolist() for column in columns]
        return tuple(
            NodeFigures(node=node, num_downloads=count, num_again=again, download_bytes=num_bytes)
            for node, (count, again, num_bytes) in enumerate(zip(*scaled, strict=True))
        )

    def _least_cache(self, packs: int) -> int:
        """Of all sources together."""
        total = 0
        for name, plan in self._sources.plans.items():
            total += least_cache_limit(
                self._sources.shards[name].stored,
                plan.samples_per_shard,
                zip_bytes=self._sources.zip_bytes[name],
                block=plan.order.shuffle_block_size,
                num_canonical_nodes=plan.num_canonical_nodes,
                num_nodes=self._cluster.world.num_group_nodes,
                samples_ahead=packs * plan.num_samples // plan.num_packs(0),
            )
        return total

    def _worker_bytes(self) -> int:
        return worker_bytes(
            self._sources.mixture,
            num_items=_items_ahead(self._sources, self._cluster, self._config),
            packs_per_item=self._config.packs_per_item,
            makes_batches=not self._sources.fills,
        )

    def _series(self, waits: NDArray[np.float64]) -> Series:
        num_nodes = self._cluster.num_nodes
        cells = np.bincount(
            self._steps * num_nodes + self._nodes, weights=self._bytes, minlength=self._seen * num_nodes
        ).reshape(self._seen, num_nodes)
        return Series(
            step=np.arange(self._seen),
            node_bytes=cells.max(axis=1).astype(np.int64),
            mean_bytes=cells.mean(axis=1),
            wait_s=waits,
            shards=self._reads,
            imbalance=np.concatenate([each.imbalance for each in self._downloads]),
        )
