"""The figures of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFigures:
    """What one node downloads from the store: shards, those of them that it had before, and bytes; and from peers."""

    node: int
    num_downloads: int
    num_again: int
    download_bytes: int
    num_from_peers: int = 0
    peer_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Figures of each step that was looked at, each an array of as many values.

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
    """What a cluster does with a plan. Of a long run some steps are looked at, and their figures scaled to all.

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
    that loaders start their workers is in neither. requests_per_s, peak_requests_per_s: of
    all nodes, on the average and in the busiest step.

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
        """What the caches of a node need together."""
        return sum(self.least_cache_limits.values())

    @property
    def is_sampled(self) -> bool:
        return self.num_steps_seen < self.num_steps
