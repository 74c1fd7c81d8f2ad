"""What the nodes download, step by step. needs + shards + cache -> [replay] -> downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ...plan.next_use import NOW
from ...plan.source_ranges import SourceBlock
from .needs import EVERY_NODE, Entered, SimulatedOutlook, StepNeeds
from .sources import ShardCosts

_LATER = 1 << 62  # a step that never comes
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloads:
    """Each download, by the step that needs it: int64[n] each. released: the step with which it is requested; at_hand:
    that from which on it gives way to no other.

    again: bool[n], of a shard that the node had before. from_peers: bool[n], that another node gave. live_bytes: the
    most that a node has in use at once, counting each shard from its first step to its last. asked_only: shards that a
    node asks for with their block and never reads, so that it may have fetched them or not when it comes to the next.
    reads: int64[num_steps], shards that all nodes read. begins: bool[num_steps], loaders begin anew with the step.
    imbalance: float64[num_steps].
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
    """What each node keeps of the shards [first, stop) of a source, in at most limit_bytes.

    outlooks: of each node, which say what its cache lets go of.
    """

    def __init__(self, sizes: _Numbers, first: int, *, limit_bytes: int, outlooks: Sequence[SimulatedOutlook]):
        self._sizes, self._first, self._limit, self._outlooks = sizes, first, limit_bytes, outlooks
        self._used_at = np.zeros((len(outlooks), len(sizes)), np.int32)  # of what is held
        self._is_held = np.zeros((len(outlooks), len(sizes)), bool)
        self._used = [0] * len(outlooks)

    def use(self, stretch: StepNeeds, entered: Sequence[tuple[int, SourceBlock]], missed: NDArray[np.bool_]) -> None:
        """Read the shards of a stretch, in turn, and fill in which readings of this source download them."""
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
        """Which readings of a node download, by what its cache lets go of."""
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
        """The shards that a node holds and does not need now, in the order in which they give way."""
        held, new = self._is_held[node], np.unique(shards)
        if self._used[node] + int(self._sizes[new[~held[new]]].sum()) <= self._limit:
            return np.empty(0, np.int64)  # there is room for all
        times = outlook.times()
        found = np.flatnonzero(held & (times > NOW))
        victims: _Numbers = found[np.lexsort((self._used_at[node, found], -times[found]))]
        return victims


class Replay:
    """The caches of nodes while steps are read, one of each source.

    caches: of each source, by its number, where its cache has a limit. steps_ahead: by how many steps workers ask for
    shards before they are needed; steps_at_once: as they begin, before they have made anything. Without a limit a
    block's shards are requested with the block before it, too. peers: nodes take shards from those that have them.
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
        # Steps counted from 1, 0 for none: of many nodes and shards, most pairs are never touched and take no memory.
        self._first_use = np.zeros((num_nodes, num_shards), np.int32)
        self._last_use = np.zeros((num_nodes, num_shards), np.int32)
        self._last_use_anywhere = np.zeros(num_shards, np.int64)
        self._asked = np.full(num_shards, -1, np.int64)  # the step that a shard is requested with, by its block
        self._at_hand = np.full(num_shards, _LATER, np.int64)  # and that from which on it gives way to no other
        self._home = np.full(num_shards, EVERY_NODE, np.int64)
        self._begun = -steps_ahead  # the step that loaders began with
        self._is_anywhere = np.zeros(num_shards, bool) if peers else None
        self._is_asked = np.zeros((num_nodes, num_shards), bool)
        self._followed: set[tuple[str, int]] = set()  # sources and canonical nodes of which loaders have begun a block

    def run(self, stretches: Iterable[StepNeeds]) -> Downloads:
        """What is downloaded in some steps, from what was there before."""
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
        """Workers of a node request the shards of a block when they come to it."""
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
        """Whether shards were requested with the block before, and not in an earlier epoch: nobody read them yet."""
        asked = self._asked[shards]
        recent: NDArray[np.bool_] = (asked >= 0) & (self._last_use_anywhere[shards] <= asked) & (asked <= step)
        return recent

    def _read(self, stretch: StepNeeds) -> tuple[NDArray[np.generic], ...]:
        """The downloads of a stretch, as Downloads has them."""
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
        """The steps with which loaders ask for what these ones begin to need."""
        asked: _Numbers = np.maximum(steps - self._steps_ahead, self._begun)
        asked[(asked == self._begun) & (steps - self._steps_at_once > self._begun)] += 1
        return asked

    def _live_bytes(self) -> int:
        """The most bytes that a node has between their first and their last use."""
        most = 0
        for node in range(self._num_nodes):
            shards = np.flatnonzero(self._first_use[node])
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
    """Of downloads by nodes that give each other shards: the steps that need them, and which a peer gives.

    steps, shards, released: of each, int64[n]. is_anywhere: bool[num_shards], which a node has already. One node
    fetches a shard from the store, and the first step of any node that needs it waits for that; of those that ask for
    it before that step each has its turn, as the one whose link is free does.
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


# The compiled loops of the simulation's caches.


@njit(cache=True, nogil=True)
def use_needed_last(
    steps: _Numbers,
    shards: _Numbers,
    sizes: _Numbers,
    limit: int,
    used_at: NDArray[np.int32],
    held: NDArray[np.bool_],
    victims: _Numbers,
    since: int,
    used: int,
    missed: NDArray[np.bool_],
) -> int:
    """Read shards on a node whose cache holds `limit` bytes while what is foretold stays the same; the bytes it holds.

    steps, shards: of each reading, in turn. used_at: int32[num_shards], the step in which each was read last. held:
    bool[num_shards]. victims: those that are not needed now, in the order in which they give way; one that was read
    after step `since`, which is before all of steps, stays. Where none is left, what was read least recently gives way.
    used: bytes in the cache. missed: whether each reading downloads, which is filled in.
    """
    at = 0
    for number in range(len(shards)):
        shard = shards[number]
        missed[number] = not held[shard]
        if missed[number]:
            while used + sizes[shard] > limit:
                while at < len(victims) and (not held[victims[at]] or used_at[victims[at]] > since):
                    at += 1
                gone = victims[at] if at < len(victims) else -1
                if gone < 0:
                    for other in range(len(sizes)):
                        if held[other] and (gone < 0 or used_at[other] < used_at[gone]):
                            gone = other
                if gone < 0:
                    break
                held[gone] = False
                used -= sizes[gone]
            held[shard] = True
            used += sizes[shard]
        used_at[shard] = steps[number]
    return used
