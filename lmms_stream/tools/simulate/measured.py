"""Downloads of the simulated steps -> figures of the whole run. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...plan.assign import most_served
from ...plan.mixture import Mixture
from ...plan.planner import STRETCH_PACKS, StepConfig, items_ahead
from ...storage.eviction import least_cache_limit
from .cluster import Cluster
from .links import Link, wait_for_links
from .replay import Downloads
from .sources import Sources

PAYLOAD = 1448 / 1514  # of what a link carries: a packet of 1500 bytes has 52 of TCP and IP, and 14 of Ethernet
NO_WAIT = 0.01  # of the time: a link with which steps wait no longer is fast enough

_Floats = NDArray[np.float64]


class WindowTimes:
    """The downloads of windows one after another. weights: float64[steps], how many steps each one stands for.

    taken_ahead: steps from the one at hand whose shards loaders have taken.
    """

    def __init__(
        self, sources: Sources, cluster: Cluster, downloads: list[Downloads], weights: _Floats, *, taken_ahead: int
    ):
        self._sources, self._cluster, self._downloads = sources, cluster, downloads
        self._taken_ahead = taken_ahead
        self._weights = weights
        self._seen = len(weights)
        given = np.concatenate([each.from_peers for each in downloads])
        steps, nodes, released, at_hand, again, shards = (
            np.concatenate([getattr(each, name) for each in downloads])
            for name in ("steps", "nodes", "released", "at_hand", "again", "shards")
        )
        self._given = steps[given], nodes[given], shards[given]  # from peers; the others are from the store
        self._steps, self._nodes, self._shards = steps[~given], nodes[~given], shards[~given]
        self._released, self._at_hand, self._again = released[~given], at_hand[~given], again[~given]
        self._begins = np.concatenate([each.begins for each in downloads])
        self._bytes = sources.all_shards.loaded[self._shards]
        self._imbalance = np.concatenate([each.imbalance for each in downloads])

    def figures(
        self, config: StepConfig, *, num_steps: int, packs_ahead: int, planned_s: float, counted_s: float
    ) -> Simulation:
        """planned_s, counted_s: seconds here for planning the first step, and for counting packs before."""
        sources, cluster, shards = self._sources, self._cluster, self._sources.all_shards
        waits = self._waits(cluster.bytes_per_s, latency_s=cluster.latency_s)
        wait_s = float((waits * self._weights)[1:].sum())
        total_s = num_steps * cluster.step_time_s + float(waits[0]) + wait_s
        of_steps = np.bincount(self._steps, weights=shards.requests[self._shards], minlength=self._seen)
        num_requests = float((of_steps * self._weights).sum())
        to_first = sources.index_bytes / (PAYLOAD * cluster.bytes_per_s) + cluster.latency_s + float(waits[0])
        num_bytes = sum(each.download_bytes for each in self._of_nodes)
        num_spilled = sum(
            each.num_spilled * float(weight) for each, weight in zip(self._downloads, self._of_windows, strict=True)
        )
        return Simulation(
            num_nodes=cluster.num_nodes,
            num_ranks=cluster.world.world_size,
            num_canonical_nodes=sources.mixture.num_canonical_nodes,
            num_samples=sources.num_samples,
            num_shards=len(shards.stored),
            dataset_bytes=int(shards.stored.sum()),
            num_steps=num_steps,
            num_steps_seen=self._seen,
            total_s=total_s,
            num_downloads=sum(each.num_downloads for each in self._of_nodes),
            download_bytes=num_bytes,
            bytes_of_busiest_node=max(each.download_bytes for each in self._of_nodes),
            copies=float(self._copies.sum()) / max(1, int(np.count_nonzero(self._copies))),
            num_shared_shards=int(np.count_nonzero(self._copies > 1)),
            num_again=sum(each.num_again for each in self._of_nodes),
            num_from_peers=sum(each.num_from_peers for each in self._of_nodes),
            peer_bytes=sum(each.peer_bytes for each in self._of_nodes),
            num_asked_only=sum(each.asked_only for each in self._downloads) if len(self._downloads) == 1 else None,
            least_cache_limits={
                name: sum(
                    least_cache_limit(
                        self._sources.shards[name].stored[at],
                        plan.samples_per_shard[at],
                        zip_bytes=zip_bytes,
                        block=plan.order.shuffle_block_size,
                        num_canonical_nodes=plan.num_canonical_nodes,
                        num_served=most_served(
                            nodes=self._cluster.world.group_nodes, num_canonical_nodes=plan.num_canonical_nodes
                        ),
                        samples_ahead=self._sources.mixture.samples_ahead(
                            name, packs_ahead, epoch=0, global_batch=config.global_batch
                        ),
                    )
                    for at, zip_bytes in zip(plan.stream_shards, self._sources.zip_bytes[name], strict=True)
                )
                for name, plan in self._sources.plans.items()
            },
            live_bytes=max(each.live_bytes for each in self._downloads),
            mean_bandwidth=num_bytes / cluster.num_nodes / total_s,
            needed_bandwidth=self._needed_bandwidth(),
            wait_s=wait_s,
            wait_share=wait_s / total_s,
            first_wait_s=float(waits[0]),
            requests_per_s=num_requests / total_s,
            peak_requests_per_s=float((of_steps / (waits + cluster.step_time_s)).max(initial=0.0)),
            request_dollars=num_requests / 1000 * cluster.request_price,
            egress_dollars=num_bytes / 1e9 * cluster.egress_price,
            worker_bytes=self._worker_bytes(config),
            first_batch_warm_s=planned_s,
            first_batch_cold_s=planned_s + counted_s + to_first,
            imbalance=float(np.average(self._imbalance, weights=self._weights)),
            num_spilled=round(num_spilled),
            nodes=self._of_nodes,
            series=self._series(waits),
            shard_downloads=np.bincount(self._shards, minlength=len(shards.stored)),
        )

    @property
    def _of_windows(self) -> _Floats:
        """The weight of each window."""
        firsts = np.cumsum([0, *(len(each.reads) for each in self._downloads)])[:-1]
        weights: _Floats = self._weights[firsts]
        return weights

    @cached_property
    def _copies(self) -> NDArray[np.int64]:
        """Number of nodes with a download of each shard, in the simulated steps."""
        return np.bincount(self._shards[~self._again], minlength=len(self._sources.all_shards.stored))

    def _waits(self, bytes_per_s: float, *, latency_s: float) -> _Floats:
        """Seconds before each step."""
        cluster, at_once = self._cluster, self._sources.downloads_at_once
        link = Link(
            PAYLOAD * bytes_per_s, latency_s, at_once * cluster.gpus_per_node * max(1, cluster.num_workers),
            self._sources.shards_ahead, self._taken_ahead,
        )  # fmt: skip
        return wait_for_links(
            self._steps, self._nodes, self._released, self._at_hand, self._bytes, self._begins, link=link,
            num_nodes=cluster.num_nodes, step_time_s=cluster.step_time_s,
        )  # fmt: skip

    def _needed_bandwidth(self) -> float:
        """Bytes per second of each link for waits below NO_WAIT of the time, except in the first steps of epochs."""
        time_s = self._seen * self._cluster.step_time_s

        def is_enough(bytes_per_s: float) -> bool:
            return float(self._waits(bytes_per_s, latency_s=0.0)[~self._begins].sum()) <= NO_WAIT * time_s

        high = max(1.0, float(self._by_node(self._bytes).max(initial=0)) / time_s)
        low = high / 2
        while not is_enough(high):
            low, high = high, 2 * high
        while high > 1.02 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high

    def _by_node(self, values: NDArray[np.generic], nodes: NDArray[np.int64] | None = None) -> _Floats:
        """The sum of the values of each node's downloads. nodes: of others than those from the store."""
        nodes = self._nodes if nodes is None else nodes
        return np.bincount(nodes, weights=values, minlength=self._cluster.num_nodes).astype(np.float64)

    @cached_property
    def _of_nodes(self) -> tuple[NodeFigures, ...]:
        weights = self._weights[self._steps]
        given_steps, given_nodes, given_shards = self._given
        given, stored = self._weights[given_steps], self._sources.all_shards.stored  # peers give what is decompressed
        columns = (
            self._by_node(weights), self._by_node(weights * self._again), self._by_node(weights * self._bytes),
            self._by_node(given, given_nodes), self._by_node(given * stored[given_shards], given_nodes),
        )  # fmt: skip
        rounded = [np.rint(column).astype(np.int64).tolist() for column in columns]
        return tuple(
            NodeFigures(
                node=node,
                num_downloads=count,
                num_again=again,
                download_bytes=num_bytes,
                num_from_peers=num_given,
                peer_bytes=given_bytes,
            )
            for node, (count, again, num_bytes, num_given, given_bytes) in enumerate(zip(*rounded, strict=True))
        )

    def _worker_bytes(self, config: StepConfig) -> int:
        sources = self._sources
        return worker_bytes(
            sources.mixture,
            num_items=items_ahead(config, num_workers=self._cluster.num_workers, reads_media=sources.reads_media),
            packs_per_item=config.packs_per_item,
            makes_batches=not sources.fills,
        )

    def _series(self, waits: _Floats) -> Series:
        num_nodes = self._cluster.num_nodes
        cells = np.bincount(
            self._steps * num_nodes + self._nodes, weights=self._bytes, minlength=self._seen * num_nodes
        ).reshape(self._seen, num_nodes)
        return Series(
            step=np.arange(self._seen),
            node_bytes=cells.max(axis=1).astype(np.int64),
            mean_bytes=cells.mean(axis=1),
            wait_s=waits,
            shards=np.concatenate([each.reads for each in self._downloads]),
            imbalance=self._imbalance,
        )


# How much memory of its own a loader worker takes, from the sizes of what the code keeps. Arithmetic only.

SEGMENT_BYTES = 16  # of a pack that is kept: a sample's id and its length
CARRIED_BYTES = 12  # of a sample of the window that waits, where a block is not kept whole
REPLAY_BYTES = 56  # of a sample of the block that is packed: ids, lengths, segments, packs, and what sorts them
PLANNED_BYTES = 56  # of a segment of the packs that are planned together: its sample, shard, offset and lengths
SHARD_BYTES = 3400  # of a shard's entry in the index as Python holds it, and of the arrays of orders and readers
MAPPED_SHARD_BYTES = 100  # of the arrays alone
LONG_INDEX = 3000  # shards: a longer index is a memory-mapped table (see mds/stored_index.py)
TOKEN_BYTES = 24  # of a batch: input_ids, labels and position_ids


def worker_bytes(mixture: Mixture, *, num_items: int, packs_per_item: int, makes_batches: bool) -> int:
    """Private memory of a worker beyond an interpreter with its libraries, in bytes; media are not counted.

    For each source: stored packs (see PackPlan's kept_segments), a replayed block and the index. For all sources: packs
    that are planned together and, if workers make the batches, num_items of packs_per_item packs. Shards do not count:
    they are memory-mapped, and their memory belongs to the page cache.
    """
    total = 0
    replayed = planned = 0.0
    for plan in mixture.plans.values():
        nodes = plan.num_canonical_nodes
        block = min(plan.order.shuffle_block_size, -(-plan.epoch_size // nodes))
        kept = min(plan.kept_segments, nodes * block)
        if kept < nodes * block:
            total += nodes * min(plan.packing.samples_at_once or block, block) * CARRIED_BYTES
        num_shards, num_packs = len(plan.samples_per_shard), plan.num_packs(0)
        of_shard = SHARD_BYTES if num_shards <= LONG_INDEX else MAPPED_SHARD_BYTES
        total += kept * SEGMENT_BYTES + num_shards * of_shard
        replayed = max(replayed, block * REPLAY_BYTES)
        planned = max(planned, plan.epoch_size * min(1.0, STRETCH_PACKS / num_packs) * PLANNED_BYTES)
    longest = max(plan.longest_pack for plan in mixture.plans.values())
    return round(total + replayed + planned) + makes_batches * num_items * packs_per_item * longest * TOKEN_BYTES


# The figures of a simulation.


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFigures:
    """Downloads of one node: shards from the store, repeated shards among them, and bytes; and from peers."""

    node: int
    num_downloads: int
    num_again: int
    download_bytes: int
    num_from_peers: int = 0
    peer_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Figures of the simulated steps, one array value per step.

    node_bytes: what the busiest node downloads for the step; mean_bytes: the mean of the nodes. wait_s: before it.
    shards: that nodes read, in all. imbalance: cost of the busiest rank over the mean.
    """

    step: NDArray[np.int64]
    node_bytes: NDArray[np.int64]
    mean_bytes: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    shards: NDArray[np.int64]
    imbalance: NDArray[np.float64]

    def thinned(self, num_points: int) -> Series:
        """At most so many points, each the mean of the steps from it to the next, but the sum of waits."""
        count = len(self.step)
        starts = np.unique(np.linspace(0, count, min(num_points, count), endpoint=False).astype(np.int64))
        sizes = np.diff(np.append(starts, count))

        def mean(values: NDArray[np.generic]) -> NDArray[np.float64]:
            means: NDArray[np.float64] = np.add.reduceat(values.astype(np.float64), starts) / sizes
            return means

        return Series(
            step=self.step[starts],
            node_bytes=mean(self.node_bytes).astype(np.int64),
            mean_bytes=mean(self.mean_bytes),
            wait_s=np.add.reduceat(self.wait_s, starts),
            shards=mean(self.shards).astype(np.int64),
            imbalance=mean(self.imbalance),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Figures of a plan on a cluster. For a long run, some steps are simulated and their figures scaled to all steps.

    num_downloads, download_bytes: of all nodes, from the store; num_from_peers, peer_bytes: from each other.
    bytes_of_busiest_node: from the store. copies: downloads of a shard, in the mean of those that were read;
    num_shared_shards: of those downloaded by more than one node; num_again: downloads of shards that their node had
    before. num_asked_only: shards that are asked for ahead, as a part of their block, and not read: the real downloads
    are at most so many more (None where windows were looked at). shard_downloads: of each shard, in the steps that were
    looked at, int64[num_shards].

    least_cache_limits: the cache_limit that loaders ask for, of each source, with which a node downloads no shard twice
    in an epoch, but those on a cut between canonical nodes and those of packs read away from home;
    live_bytes: the most that one node has between first and last use at once, the least that any cache could do with.
    mean_bandwidth, needed_bandwidth: bytes a second of one node's link, on the average, and without waiting after the
    first step. wait_s: of all steps but the first, which waits first_wait_s;
    that loaders start their workers is in neither. requests_per_s, peak_requests_per_s: requests of all nodes, on
    average and in the busiest step, the first step included.

    worker_bytes: private memory of a loader worker (see measured.py). first_batch_warm_s: the time that the first step
    took to plan here, its shards on the node; first_batch_cold_s: with counting packs, where they were counted here,
    and with downloads. imbalance: mean over steps of the busiest rank's cost over the mean. num_spilled: packs read on
    another node than the one that serves them.
    """

    num_nodes: int
    num_ranks: int
    num_canonical_nodes: int
    num_samples: int
    num_shards: int
    dataset_bytes: int
    num_steps: int
    num_steps_seen: int
    total_s: float
    num_downloads: int
    download_bytes: int
    bytes_of_busiest_node: int
    copies: float
    num_shared_shards: int
    num_again: int
    num_from_peers: int
    peer_bytes: int
    num_asked_only: int | None
    least_cache_limits: Mapping[str, int]
    live_bytes: int
    mean_bandwidth: float
    needed_bandwidth: float
    wait_s: float
    wait_share: float
    first_wait_s: float
    requests_per_s: float
    peak_requests_per_s: float
    request_dollars: float
    egress_dollars: float
    worker_bytes: int
    first_batch_warm_s: float
    first_batch_cold_s: float
    imbalance: float
    num_spilled: int
    nodes: tuple[NodeFigures, ...]
    series: Series
    shard_downloads: NDArray[np.int64]

    @property
    def least_cache_bytes(self) -> int:
        """Total bytes of the caches of a node."""
        return sum(self.least_cache_limits.values())

    @property
    def is_sampled(self) -> bool:
        return self.num_steps_seen < self.num_steps
