"""Shards read by each node in each step. mixture + step config -> [needs] -> nodes and shards of steps.

The simulation calls the code of real runs: the mixture for the packs of a step, the planner for the packs of each group
of ranks and the shards of their samples, and the plan for the shuffle blocks fetched ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...plan.assign import count_spilled, home_nodes, pack_costs
from ...plan.cursor import Cursor
from ...plan.kernels.deal import PAD
from ...plan.mixture import Step
from ...plan.next_use import NextUse, Places, place, served_nodes
from ...plan.packing import PackRange
from ...plan.planner import EnteredBlocks, StepConfig, StepPlanner, deal_to_groups
from ...plan.source_ranges import SourceBlock, SourceRanges
from ...plan.windows import WindowedMixture
from .sources import Sources

STRETCH_SEGMENTS = 1 << 20  # looked at together
EVERY_NODE = -1  # serves a block, if groups of ranks span nodes

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """Shuffle block, at the first step with packs of the block: the fetching node, and the block's shards.

    source: its number.
    """

    step: int
    block: SourceBlock
    node: int
    source: int
    shards: _Numbers
    following: _Numbers  # those of the block after it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNeeds:
    """Needs of consecutive steps. Steps count from the start of the simulation; shards count across all sources.

    steps, nodes, shards: int64[n], one for each shard that a node reads in a step, by step and node. entered: in the
    order of steps. begins: whether loaders begin anew with the first step, as they do with each epoch. imbalance:
    float64[num_steps], cost of the busiest group of ranks over the mean. num_spilled: packs read on another node than
    the one that serves their canonical node. num_segments: samples, and pieces of them.
    """

    first: int
    num_steps: int
    begins: bool
    steps: _Numbers
    nodes: _Numbers
    shards: _Numbers
    entered: Sequence[Entered]
    imbalance: NDArray[np.float64]
    num_spilled: int
    num_segments: int


class Needs:
    """The needs of the steps of a mixture on the nodes of config.world."""

    def __init__(self, mixture: WindowedMixture, config: StepConfig):
        self.mixture = mixture
        self.config = config
        self._planner = StepPlanner(mixture, config)
        self._blocks = EnteredBlocks(mixture, global_batch=config.global_batch)
        world = config.world
        ranks = np.arange(world.world_size)
        pairs = np.stack([ranks // world.replication, np.repeat(np.arange(world.num_nodes), world.nodes)], axis=1)
        self._groups, self._nodes = np.unique(pairs, axis=0).T  # groups of ranks, and the nodes that each is on
        counts = [len(plan.samples_per_shard) for plan in mixture.plans.values()]
        self._first_shards = np.cumsum([0, *counts])
        self.num_shards = int(self._first_shards[-1])

    def walk(self, cursor: Cursor, num_steps: int, *, first: int = 0) -> Iterator[StepNeeds]:
        """Yield the needs of the next num_steps steps, some steps at a time, also of later epochs.

        Fewer steps if the sources have no packs left. first: number of the first step.
        """
        waiting: list[Step] = []
        begins = cursor.step == 0
        plans = self.mixture.plans
        per_pack = max(
            plan.epoch_size / self.mixture.plan_of(name, at).num_packs(at.epoch)
            for name, plan in plans.items()
            for at in [cursor.sources[name]]
        )
        per_stretch = max(1, int(STRETCH_SEGMENTS / per_pack) // self.config.global_batch)
        for number in range(num_steps):
            step = self.mixture.step(cursor, global_batch=self.config.global_batch)
            if not step.num_packs:
                break
            cursor = step.after
            is_short = step.num_packs < self.config.global_batch
            if not (is_short and self.config.drop_last):
                waiting.append(step)
            if waiting and (step.ends_epoch or len(waiting) >= per_stretch or number == num_steps - 1):
                yield self._stretch(waiting, first, begins)
                first += len(waiting)
                waiting, begins = [], step.ends_epoch
        if waiting:
            yield self._stretch(waiting, first, begins)

    def _stretch(self, stretch: Sequence[Step], first: int, begins: bool) -> StepNeeds:
        ranges = SourceRanges.joined([step.ranges for step in stretch])
        packs = self.mixture.packs(ranges)
        dealt = deal_to_groups(packs, self.mixture, global_batch=self.config.global_batch, world=self.config.world)
        steps, nodes, shards = self._reads(packs, dealt)
        return StepNeeds(
            first=first,
            num_steps=len(stretch),
            begins=begins,
            steps=first + steps,
            nodes=nodes,
            shards=shards,
            entered=[
                self._entered(first + number, block)
                for number, _, block in sorted(self._blocks.entered(stretch, ranges))
            ],
            imbalance=_imbalance(packs, dealt),
            num_spilled=self._spilled(packs, dealt),
            num_segments=len(packs.lengths),
        )

    def _reads(self, packs: PackRange, dealt: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Step, node and shard of each reading, each once."""
        segments = self._planner.locate(packs)
        sources = np.repeat(packs.sources, np.diff(packs.offsets)) if len(self.mixture.names) > 1 else 0
        shards = segments.shard_ids + self._first_shards[sources]
        num_nodes, found = self.config.world.num_nodes, []
        num_of_pack = np.diff(packs.offsets)
        group_of_pack = np.empty(len(packs), np.int64)
        of_dealt = np.broadcast_to(np.arange(dealt.shape[1])[:, None], dealt.shape)
        group_of_pack[dealt[dealt != PAD]] = of_dealt[dealt != PAD]
        step_of_pack = np.arange(len(packs)) // self.config.global_batch
        firsts = np.searchsorted(self._groups, np.arange(dealt.shape[1]))
        lasts = np.append(firsts[1:], len(self._groups)) - 1
        for copy in range(int((lasts - firsts).max()) + 1):  # of the nodes that a group is on, one after another
            node_of_group = self._nodes[np.minimum(firsts + copy, lasts)]
            keys = (step_of_pack * num_nodes + node_of_group[group_of_pack]) * self.num_shards
            found.append(np.repeat(keys, num_of_pack) + shards)
        unique = np.unique(np.concatenate(found))
        steps_and_nodes, shards = np.divmod(unique, self.num_shards)
        return *np.divmod(steps_and_nodes, num_nodes), shards

    def _entered(self, step: int, entered: SourceBlock) -> Entered:
        source, epoch, node, block = entered
        plan, world = self.mixture.plans[source], self.config.world
        home = home_nodes(np.array(node), nodes=world.group_nodes, num_canonical_nodes=plan.num_canonical_nodes)
        number = self.mixture.names.index(source)
        offset = self._first_shards[number]
        return Entered(
            step=step,
            block=entered,
            source=number,
            node=int(home) if len(world.group_nodes) == world.num_nodes else EVERY_NODE,
            shards=plan.shards_of_block(epoch, node, block) + offset,
            following=plan.shards_of_block(epoch, node, block + 1) + offset,
        )

    def _spilled(self, packs: PackRange, dealt: _Numbers) -> int:
        of_groups = np.moveaxis(dealt, 1, 0).reshape(dealt.shape[1], -1)
        return count_spilled(
            packs,
            of_groups,
            nodes=self.config.world.group_nodes,
            num_canonical_nodes=self.mixture.num_canonical_nodes,
        )


def _imbalance(packs: PackRange, dealt: _Numbers) -> NDArray[np.float64]:
    costs = np.append(pack_costs(packs), 0)  # PAD is the last
    work = costs[dealt].sum(axis=2)
    imbalance: NDArray[np.float64] = work.max(axis=1) / work.mean(axis=1)
    return imbalance


# When a node needs the shards of a source next, as the loaders on it would tell its cache. blocks entered -> times.


class SimulatedOutlook:
    """Foretells as loader/blocks_ahead.py does.

    margin_steps: how long a block that was left counts as in use. nodes: ranks of each node that can serve canonical
    nodes of its own (see World.group_nodes); this is number `node`. limit_bytes: of the source's cache.
    """

    def __init__(
        self, sources: Sources, name: str, node: int, *, nodes: Sequence[int], limit_bytes: int, margin_steps: int
    ):
        plan = sources.plans[name]
        self._name = name
        self._margin = margin_steps
        self._restarts = sources.mixture.schedule is None  # loaders begin anew with each epoch
        self._serves = served_nodes(node, nodes=nodes, num_canonical_nodes=plan.num_canonical_nodes)
        self._next_use = NextUse(plan, serves=self._serves, sizes=sources.shards[name].stored, limit_bytes=limit_bytes)
        self._entered: list[tuple[int, SourceBlock]] = []
        self._passing: list[int] = []  # steps with which blocks are let go
        self._places: Places | None = None
        self.since = -1  # a shard that was used in a later step is in use, whatever is foretold

    def changes(self, entered: Sequence[tuple[int, SourceBlock]]) -> list[int]:
        """Take in blocks that are entered from here on, by step; the steps with which what is foretold changes."""
        self._entered += [
            (step, block) for step, block in entered if block.source == self._name and self._serves[block.node]
        ]
        begun = [step for step, _ in self._entered]
        return sorted({*self._passing, *begun, *(step + self._margin for step in begun)})

    def move_to(self, step: int) -> None:
        """Stand at a step."""
        while self._entered and self._entered[0][0] <= step:
            begun, block = self._entered.pop(0)
            if self._enter(block, until=begun + self._margin):
                self.since = begun - 1
        if self._places is not None and self._places.pass_to(step):
            self.since = step - 1
        self._passing = [each for each in self._passing if each > step]

    def times(self) -> NDArray[np.float64]:
        """Epochs until each shard of the source is needed, inf where it is not: float64[num_shards]."""
        places = self._places or Places(len(self._serves), epoch=0)
        found: NDArray[np.float64] = self._next_use.times(places.held, places.now).astype(np.float64)
        return found

    def _enter(self, block: SourceBlock, *, until: int) -> bool:
        """Come to a block; whether loaders begin anew there."""
        begins = self._places is None or (self._restarts and block.epoch > self._places.epoch)
        if self._places is None or begins:
            self._places = Places(len(self._serves), epoch=block.epoch)
        self._places.enter(block.node, place(block.epoch, block.block), until=until)
        self._passing.append(until)
        return begins
