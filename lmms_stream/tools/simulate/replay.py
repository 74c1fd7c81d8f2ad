"""Downloads of the nodes, step by step. needs + shards + cache -> [replay] -> downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...plan.next_use import NOW
from ...plan.source_ranges import SourceBlock
from .links import use_needed_last
from .needs import EVERY_NODE, Entered, SimulatedOutlook, StepNeeds
from .sources import ShardCosts

_LATER = 1 << 62  # a step beyond the end of every run
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloads:
    """Downloads, ordered by the step with the need: int64[n] each. released: step of the request. at_hand: first step
    at which the download has full priority.

    again: bool[n], repeated downloads of a shard by the same node. from_peers: bool[n], downloads from another node.
    live_bytes: peak bytes in use on one node, counting each shard from its first step to its last. asked_only: number
    of shards requested by a node with their block and never read; the node may or may not have fetched the shards by
    the next block. reads: int64[num_steps], shards read by all nodes. begins: bool[num_steps], loaders restart at the
    step. imbalance: float64[num_steps].
    """

    steps: _Numbers
    nodes: _Numbers
    shards: _Numbers
    released: _Numbers
    at_hand: _Numbers
    again: NDArray[np.bool_]
    from_peers: NDArray[np.bool_]
    live_bytes: int
    asked_only: int
    reads: _Numbers
    begins: NDArray[np.bool_]
    imbalance: NDArray[np.float64]
    num_spilled: int
    num_segments: int


class Cache:
    """Cache of each node for the shards [first, stop) of a source, with at most limit_bytes.

    outlooks: one outlook per node, to choose the shards to evict.
    """

    def __init__(self, sizes: _Numbers, first: int, *, limit_bytes: int, outlooks: Sequence[SimulatedOutlook]):
        self._sizes, self._first, self._limit, self._outlooks = sizes, first, limit_bytes, outlooks
        self._used_at = np.zeros((len(outlooks), len(sizes)), np.int32)  # of held shards
        self._is_held = np.zeros((len(outlooks), len(sizes)), bool)
        self._used = [0] * len(outlooks)

    def use(self, stretch: StepNeeds, entered: Sequence[tuple[int, SourceBlock]], missed: NDArray[np.bool_]) -> None:
        """Read the shards of a stretch in order; set `missed` for the reads of this source with a download."""
        is_here = (stretch.shards >= self._first) & (stretch.shards < self._first + len(self._sizes))
        here = np.flatnonzero(is_here)
        here = here[np.argsort(stretch.nodes[here], kind="stable")]
        cuts = np.searchsorted(stretch.nodes[here], np.arange(len(self._outlooks) + 1)).tolist()
        for node, outlook in enumerate(self._outlooks):
            mine = here[cuts[node] : cuts[node + 1]]
            steps, shards = stretch.steps[mine], stretch.shards[mine] - self._first
            missed[mine] = self._use_on(node, outlook, entered, steps, shards)

    def _use_on(
        self,
        node: int,
        outlook: SimulatedOutlook,
        entered: Sequence[tuple[int, SourceBlock]],
        steps: _Numbers,
        shards: _Numbers,
    ) -> NDArray[np.bool_]:
        """Return bool[n]: reads of a node with a download, given the evictions from its cache."""
        missed = np.empty(len(steps), bool)
        changes = [step for step in outlook.changes(entered) if not len(steps) or step <= steps[-1]]
        cuts = np.searchsorted(steps, changes).tolist()
        for step, begin, end in zip([-1, *changes], [0, *cuts], [*cuts, len(steps)], strict=True):
            if step >= 0:
                outlook.move_to(step)
            if begin == end:
                continue
            here = slice(begin, end)
            self._used[node] = use_needed_last(
                steps[here], shards[here], self._sizes, self._limit, self._used_at[node], self._is_held[node],
                self._victims(node, outlook, shards[here]), outlook.since, self._used[node], missed[here],
            )  # fmt: skip
        return missed

    def _victims(self, node: int, outlook: SimulatedOutlook, shards: _Numbers) -> _Numbers:
        """Shards in a node's cache without a current need, in order of eviction."""
        held, new = self._is_held[node], np.unique(shards)
        if self._used[node] + int(self._sizes[new[~held[new]]].sum()) <= self._limit:
            return np.empty(0, np.int64)  # there is room for all
        times = outlook.times()
        found = np.flatnonzero(held & (times > NOW))
        victims: _Numbers = found[np.lexsort((self._used_at[node, found], -times[found]))]
        return victims


class Replay:
    """Simulation of the nodes' caches during steps, one cache per source.

    caches: caches with a limit, by number of the source. steps_ahead: number of steps between a worker's request for
    shards and their use; steps_at_once: the same at the start, before the first batch. Without a limit, a block's
    shards are also requested with the previous block. peers: nodes download shards from other nodes.
    """

    def __init__(
        self,
        shards: ShardCosts,
        *,
        caches: Mapping[int, Cache],
        num_nodes: int,
        steps_ahead: int,
        steps_at_once: int,
        peers: bool = False,
    ):
        num_shards = len(shards.stored)
        self._shards = shards
        self._num_nodes = num_nodes
        self._steps_ahead, self._steps_at_once = steps_ahead, steps_at_once
        self._caches = caches
        # Steps counted from 1, 0: never. With many nodes and shards, most pairs stay untouched and use no memory.
        self._first_use = np.zeros((num_nodes, num_shards), np.int32)
        self._last_use = np.zeros((num_nodes, num_shards), np.int32)
        self._last_use_anywhere = np.zeros(num_shards, np.int64)
        self._asked = np.full(num_shards, -1, np.int64)  # step of the request of a shard by its block
        self._at_hand = np.full(num_shards, _LATER, np.int64)  # first step with full priority
        self._home = np.full(num_shards, EVERY_NODE, np.int64)
        self._begun = -steps_ahead  # first step of the current loaders
        self._is_anywhere = np.zeros(num_shards, bool) if peers else None
        self._is_asked = np.zeros((num_nodes, num_shards), bool)
        self._followed: set[tuple[str, int]] = set()  # sources and canonical nodes with a started block

    def run(self, stretches: Iterable[StepNeeds]) -> Downloads:
        """Return the downloads of some steps, starting from the current caches."""
        found: list[tuple[NDArray[np.generic], ...]] = []
        reads, begins, imbalance, spilled, segments = [], [], [], 0, 0
        for stretch in stretches:
            if stretch.begins:
                self._begun = stretch.first
                self._followed.clear()
            self._ask(stretch.entered)
            found.append(self._read(stretch))
            reads.append(np.bincount(stretch.steps - stretch.first, minlength=stretch.num_steps))
            begins.append(np.arange(stretch.num_steps) < stretch.begins)  # the first, if any
            imbalance.append(stretch.imbalance)
            spilled += stretch.num_spilled
            segments += stretch.num_segments
        steps, nodes, shards, released, at_hand, again, from_peers = (
            np.concatenate(column) for column in zip(*found, strict=True)
        )
        return Downloads(
            steps=steps, nodes=nodes, shards=shards, released=released, at_hand=at_hand, again=again,
            from_peers=from_peers,
            live_bytes=self._live_bytes(),
            asked_only=sum(
                int(np.count_nonzero(first_use[is_asked] == 0))
                for is_asked, first_use in zip(self._is_asked, self._first_use, strict=True)
            ),
            reads=np.concatenate(reads), begins=np.concatenate(begins), imbalance=np.concatenate(imbalance),
            num_spilled=spilled, num_segments=segments,
        )  # fmt: skip

    def _ask(self, entered: Iterable[Entered]) -> None:
        """Request the shards of each block at the start of the block, for the workers of a node."""
        for each in entered:
            nodes = slice(None) if each.node == EVERY_NODE else each.node
            is_limited = each.source in self._caches
            canonical_node = each.block.source, each.block.node
            both = (
                (each.shards, each.step),
                (each.following, each.step if canonical_node in self._followed else _LATER),
            )
            self._followed.add(canonical_node)
            for shards, at_hand in both[:1] if is_limited else both:
                is_recent = self._is_recent(shards, each.step)
                self._asked[shards] = np.where(is_recent, self._asked[shards], each.step)
                self._at_hand[shards] = np.where(is_recent, np.minimum(self._at_hand[shards], at_hand), at_hand)
                self._home[shards] = each.node
                self._is_asked[nodes, shards] = True

    def _is_recent(self, shards: _Numbers, step: int) -> NDArray[np.bool_]:
        """Whether shards were requested with the previous block of the same epoch: without a read since the request."""
        asked = self._asked[shards]
        recent: NDArray[np.bool_] = (asked >= 0) & (self._last_use_anywhere[shards] <= asked) & (asked <= step)
        return recent

    def _read(self, stretch: StepNeeds) -> tuple[NDArray[np.generic], ...]:
        """Downloads of a stretch, in the columns of Downloads."""
        steps, nodes, shards = stretch.steps, stretch.nodes, stretch.shards
        new = np.flatnonzero(self._first_use[nodes, shards] == 0)[::-1]
        self._last_use[nodes, shards] = self._last_use_anywhere[shards] = steps + 1  # the last one counts
        self._first_use[nodes[new], shards[new]] = steps[new] + 1
        missed = self._first_use[nodes, shards] == steps + 1
        entered = [(each.step, each.block) for each in stretch.entered]
        for cache in self._caches.values():
            cache.use(stretch, entered, missed)
        steps, nodes, shards = steps[missed], nodes[missed], shards[missed]
        asked = self._asked[shards]
        is_asked = (asked >= 0) & ((self._home[shards] == nodes) | (self._home[shards] == EVERY_NODE))
        released, at_hand = (
            self._when_asked(np.minimum(steps, np.where(is_asked, each, steps)))
            for each in (asked, self._at_hand[shards])
        )
        again = self._first_use[nodes, shards] <= steps
        if self._is_anywhere is None:
            return steps, nodes, shards, released, at_hand, again, np.zeros(len(steps), bool)
        needed, given = share(steps, shards, released, self._is_anywhere)
        self._is_anywhere[shards] = True
        return needed, nodes, shards, released, np.minimum(at_hand, needed), again, given

    def _when_asked(self, steps: _Numbers) -> _Numbers:
        """Steps at which loaders request the shards first needed at `steps`."""
        asked: _Numbers = np.maximum(steps - self._steps_ahead, self._begun)
        asked[(asked == self._begun) & (steps - self._steps_at_once > self._begun)] += 1
        return asked

    def _live_bytes(self) -> int:
        """Peak bytes on one node, counting each shard from its first to its last use."""
        most = 0
        for node in range(self._num_nodes):
            shards = np.flatnonzero(self._first_use[node])
            if not len(shards):
                continue
            changes = np.concatenate([self._first_use[node, shards], self._last_use[node, shards] + 1])
            sizes = self._shards.stored[shards]
            order = np.argsort(changes, kind="stable")
            live = np.cumsum(np.concatenate([sizes, -sizes])[order])
            last = np.append(changes[order][1:] != changes[order][:-1], True)  # after all changes of a step
            most = max(most, int(live[last].max(initial=0)))
        return most


def share(
    steps: _Numbers, shards: _Numbers, released: _Numbers, is_anywhere: NDArray[np.bool_]
) -> tuple[_Numbers, NDArray[np.bool_]]:
    """For nodes with shared shards: steps with a need for each download, and downloads from a peer.

    steps, shards, released: int64[n], one entry per download. is_anywhere: bool[num_shards], shards already on some
    node. One node fetches a shard from storage, for the first step of any node with a need. Nodes with a request
    before this step take turns, to model a fetch by the node with a free link.
    """
    if not len(steps):
        return steps, np.zeros(0, bool)
    soonest = np.full(len(is_anywhere), np.iinfo(np.int64).max)
    np.minimum.at(soonest, shards, steps)
    is_late = released > soonest[shards]
    order = np.lexsort((is_late, shards))
    begins = np.flatnonzero(np.diff(shards[order], prepend=-1))
    in_time = np.add.reduceat((~is_late[order]).astype(np.int64), begins)
    fetched = order[begins + shards[order[begins]] % in_time]
    given = np.ones(len(steps), bool)
    given[fetched[~is_anywhere[shards[fetched]]]] = False
    return np.where(given, steps, soonest[shards]), given
