"""Plan a reader's work in each step. mixture + cursor -> [planner] -> (work, cursor after it); arithmetic only.

A reader is a worker of a group of ranks. A step is dealt to the groups (see assign), and the packs of a group, its
batches, go to its workers in turn. Steps are planned several at a time, at a lower cost per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..types import PackSegments, World
from .assign import assign_steps, deal_lists, nodes_of_packs
from .cursor import Cursor, WindowCursor
from .kernels.deal import PAD
from .lane_cursor import LaneAfter
from .mixture import Mixture, Step
from .order import shards_of
from .packing import PackRange
from .source_ranges import SourceBlock, SourceRanges
from .windows import SortedPacks, WindowedMixture

STRETCH_PACKS = 1024  # packs of successive global batches to plan together at first
MAX_STRETCH_SEGMENTS = 1 << 18  # maximum segments to plan together later on: 6 MiB, and 6 MiB more for a moment
_NOTHING = np.empty(0, np.int64)
NO_SEGMENTS = PackSegments(*[_NOTHING] * 6)
NO_BOUNDS = np.zeros(2, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Division of a step's packs among ranks and workers.

    drop_last: drop a short last step, instead of filling the step with pad packs. packs_per_item: number of successive
    batches of a rank for a worker: a divisor or a multiple of micro_batches. packs_per_work: maximum packs per Work.
    """

    global_batch: int
    world: World
    drop_last: bool = False
    packs_per_item: int = 1
    packs_per_work: int = 1

    @property
    def micro_batches(self) -> int:
        """Batches of a rank in a step."""
        return self.global_batch // self.world.num_groups


class Work(NamedTuple):
    """Packs of a source for some micro-batches of a step.

    step: counted from the first planned cursor. Pack p holds segments [bounds[p], bounds[p + 1]). Pad packs have no
    source and no segments. patches: of each pack, for its media tower; empty if no source has media. For random draws:
    epochs, of each pack in its source, and repeats, of each segment; empty without repeats (see PackRange).
    """

    source: str
    step: int
    micro_batches: Sequence[int]
    bounds: NDArray[np.int64] = NO_BOUNDS
    segments: PackSegments = NO_SEGMENTS
    patches: Sequence[int] = ()
    epochs: Sequence[int] = ()
    repeats: Sequence[int] = ()


After = Cursor | LaneAfter  # position of training after a step, or of a lane after a pack


class Planned(NamedTuple):
    """A work with its position.

    after: the cursor after the step, with the last batch of a rank's step; in lanes the state of the pack's lane.
    entered: shuffle blocks of the step's packs; a block that several steps of a stretch share is named with the first
    step. num_dropped_packs: packs of a dropped short last step, whose work is empty.
    """

    work: Work
    after: After | None = None
    entered: Sequence[SourceBlock] = ()
    num_dropped_packs: int = 0


class _ReaderStep(NamedTuple):
    """A step, its number, the cursor before it, and the rank's batches that the reader makes: int64[n], n >= 1."""

    number: int
    before: Cursor
    step: Step
    mine: NDArray[np.int64]


class StepPlanner:
    """Plans the packs that worker `worker` of num_workers makes, for the group of ranks in config.world."""

    def __init__(self, mixture: Mixture, config: StepConfig, *, worker: int = 0, num_workers: int = 1):
        self.mixture = mixture
        self.config = config
        self._worker = worker
        self._num_workers = num_workers
        sizes = [plan.samples_per_shard for plan in mixture.plans.values()]
        self._first_ids = [np.cumsum(samples) - samples for samples in sizes]
        self._window: tuple[WindowCursor, int, NDArray[np.bool_], SortedPacks] | None = None  # the last, see _in_window
        self._blocks = EnteredBlocks(mixture, global_batch=config.global_batch)

    def plan(self, cursor: Cursor) -> Iterator[Planned]:
        """Yield the work from a cursor to the end of the epoch (with weights: of all sources), step by step."""
        for stretch in self._stretches(cursor):
            last = stretch[-1]
            if not self.config.drop_last or last.step.num_packs == self.config.global_batch:
                yield from self._plan_stretch(stretch)
                continue
            if len(stretch) > 1:
                yield from self._plan_stretch(stretch[:-1])
            if not last.mine[0]:  # only the reader of the first batch reports it
                yield Planned(Work("", last.number, []), last.step.after, num_dropped_packs=last.step.num_packs)

    def _stretches(self, cursor: Cursor) -> Iterator[list[_ReaderStep]]:
        """Yield the steps with batches of the reader, several at a time."""
        config = self.config
        num_items = max(1, config.micro_batches // config.packs_per_item)  # per step
        steps_per_item = max(1, config.packs_per_item // config.micro_batches)
        batches = np.arange(config.micro_batches).reshape(num_items, -1)
        most, at_once = self._stretch_packs(cursor), STRETCH_PACKS
        stretch: list[_ReaderStep] = []
        for number in count():
            step = self.mixture.turns(cursor, global_batch=config.global_batch)
            if not step.num_packs:
                break
            before, cursor = cursor, step.after
            first = (self._worker - number // steps_per_item * num_items) % self._num_workers
            if first < num_items:
                mine = batches[first :: self._num_workers].ravel()
                stretch.append(_ReaderStep(number, before, step, mine))
            if step.ends_epoch:
                break
            is_in_window = step.window is not None or before.window is not None  # perhaps to the middle of the step
            ends_window = is_in_window and step.after.window is None
            if stretch and (ends_window or len(stretch) * config.global_batch >= at_once):
                yield stretch
                stretch = []
                at_once = min(2 * at_once, most)  # the first batch comes soon, and later ones cost less
        if stretch:
            yield stretch

    def _stretch_packs(self, cursor: Cursor) -> int:
        """Return the maximum packs of successive global batches to plan together."""
        plans = self.mixture.plans
        per_pack = max(
            plan.epoch_size / max(1, self.mixture.plan_of(name, at).num_packs(at.epoch))
            for name, plan in plans.items()
            for at in [cursor.sources[name]]
        )
        most = max(STRETCH_PACKS, int(MAX_STRETCH_SEGMENTS / max(1.0, per_pack)))
        world = self.config.world
        return most * world.num_groups // world.group_nodes[world.group_node]  # only packs of this node are made

    def _plan_stretch(self, stretch: Sequence[_ReaderStep]) -> Iterator[Planned]:
        ranges, packs, of_group = self._of_group(stretch)
        mine = [of_step[each.mine] for of_step, each in zip(of_group, stretch, strict=True)]
        numbers = np.concatenate(mine)
        packs = packs.take(numbers[numbers != PAD])
        works = self._works(stretch, packs, [int(np.count_nonzero(of_step != PAD)) for of_step in mine])
        entered = self._entered(stretch, ranges)
        last_batch = self.config.micro_batches - 1
        for each, (*others, last) in zip(stretch, works, strict=True):
            for work in others:
                yield Planned(work)
            after = each.step.after if last.micro_batches[-1] == last_batch else None
            yield Planned(last, after, entered.get(each.number, ()))

    def _of_group(self, stretch: Sequence[_ReaderStep]) -> tuple[SourceRanges, PackRange, NDArray[np.int64]]:
        """Return the ranges of steps, the packs on the group's node, and the positions of the group's packs.

        Positions: int64[num_steps, micro_batches], PAD without a pack. Packs of other nodes are not made.
        """
        ranges = SourceRanges.joined([each.step.ranges for each in stretch])
        packs, steps = self._on_node(stretch, ranges)
        nodes, node = self.config.world.group_nodes, self.config.world.group_node
        dealt = deal_lists(
            packs,
            steps,
            num_lists=len(stretch),
            ranks=nodes[node],
            packs_per_rank=self.config.micro_batches,
        )
        return ranges, packs, dealt[:, self.config.world.group - sum(nodes[:node])]

    def _on_node(self, stretch: Sequence[_ReaderStep], ranges: SourceRanges) -> tuple[PackRange, NDArray[np.int64]]:
        """Return the packs on the group's node, and for each the number in `stretch` of its step."""
        batch = self.config.global_batch
        steps = np.arange(ranges.num_packs) // batch
        windows = [each.step.window for each in stretch if each.step.window is not None]
        if len(windows) == len(stretch):
            turns = (np.array([[window.num_done] for window in windows]) + np.arange(batch)).ravel()
            turns = turns[turns < windows[0].num_packs]  # the last step may be short
            is_here, packs = self._in_window(windows[0])
            return packs.take(turns[is_here[turns]]), steps[is_here[turns]]
        chosen = None
        if len(self.config.world.group_nodes) > 1:
            chosen = np.flatnonzero(self._are_here(self.mixture.canonical_nodes(ranges)))
            steps = steps[chosen]
        if any(each.before.window is not None for each in stretch):
            # After a change of global_batch a window ends in the middle of a step.
            of_steps = [self.mixture.step(each.before, global_batch=batch) for each in stretch]
            ranges = SourceRanges.joined([each.ranges for each in of_steps])
        return self.mixture.packs(ranges, chosen), steps

    def _in_window(self, window: WindowCursor) -> tuple[NDArray[np.bool_], SortedPacks]:
        """Return whether the group's node reads each turn of a window, and the packs of the turns' canonical nodes."""
        mixture, first = self.mixture, window.num_done % self.config.global_batch  # after a change of global_batch
        assert isinstance(mixture, WindowedMixture)
        if self._window is None or self._window[:2] != (window.begin, first):
            nodes = mixture.turns_of_window(window)[1]
            is_here = np.append(np.zeros(first, bool), self._are_here(nodes[first:]))
            made = np.zeros(mixture.num_canonical_nodes, bool)
            made[nodes[is_here]] = True  # a full node passes packs on
            packs = mixture.window_packs(window, None if made.all() else made)
            self._window = window.begin, first, is_here, packs
        return self._window[2:]

    def _are_here(self, canonical_nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the group's node reads each pack of successive steps. canonical_nodes: of the packs."""
        world, num_canonical_nodes = self.config.world, self.mixture.num_canonical_nodes
        found = nodes_of_packs(
            canonical_nodes,
            global_batch=self.config.global_batch,
            nodes=world.group_nodes,
            num_canonical_nodes=num_canonical_nodes,
        )
        is_here: NDArray[np.bool_] = found == world.group_node
        return is_here

    def _works(self, stretch: Sequence[_ReaderStep], packs: PackRange, counts: Sequence[int]) -> Iterator[list[Work]]:
        """Yield the works of each step, by batch. packs: the reader's, of all steps; counts: packs of each step."""
        segments = self.locate(packs)
        sources, bounds = packs.sources.tolist(), packs.offsets.tolist()
        patches = () if packs.patches is None else packs.patches.tolist()
        epochs = () if packs.epochs is None else packs.epochs.tolist()
        repeats = () if packs.repeats is None else packs.repeats.tolist()
        first = 0
        for each, num_packs in zip(stretch, counts, strict=True):
            works = []
            micro_batches = each.mine.tolist()
            begin, end = first, first + num_packs
            while first < end:
                stop, limit = first + 1, min(end, first + self.config.packs_per_work)
                while stop < limit and sources[stop] == sources[first]:
                    stop += 1
                at = slice(bounds[first], bounds[stop])
                works.append(
                    Work(
                        self.mixture.names[sources[first]],
                        each.number,
                        micro_batches[first - begin : stop - begin],
                        packs.offsets[first : stop + 1] - bounds[first],
                        PackSegments(*[values[at] for values in segments]),
                        patches[first:stop],
                        epochs[first:stop],
                        repeats[at],
                    )
                )
                first = stop
            works += [Work("", each.number, [batch]) for batch in micro_batches[num_packs:]]  # pad packs are the last
            yield works

    def locate(self, packs: PackRange) -> PackSegments:
        """Return the segments of packs, each with its sample's shard, index in the shard and tokens."""
        shard_ids, indices, expected = (np.empty_like(packs.sample_ids) for _ in range(3))
        sources = np.repeat(packs.sources, np.diff(packs.offsets))
        by_source, plans = np.argsort(sources, kind="stable"), [*self.mixture.plans.values()]
        numbers, begins = np.unique(sources[by_source], return_index=True)
        for number, here in zip(numbers.tolist(), np.split(by_source, begins[1:]), strict=False):
            sample_ids, first_ids = packs.sample_ids[here], self._first_ids[number]
            shard_ids[here] = shards_of(sample_ids, first_ids)
            indices[here] = sample_ids - first_ids[shard_ids[here]]
            expected[here] = plans[number].lengths[sample_ids]
        return PackSegments(packs.sample_ids, packs.starts, packs.lengths, shard_ids, indices, expected)

    def _entered(self, stretch: Sequence[_ReaderStep], ranges: SourceRanges) -> dict[int, list[SourceBlock]]:
        """Return the shuffle blocks of the stretch's packs, by the number of the first step with packs of the block.

        Of several short epochs in a step, only the blocks of the first and last epoch: all read the same shards.
        """
        entered: dict[int, list[SourceBlock]] = {}
        for at, _, block in self._blocks.entered([each.step for each in stretch], ranges):
            entered.setdefault(stretch[at].number, []).append(block)
        short = {name for name, plan in self.mixture.plans.items() if plan.short is not None}
        for number, blocks in entered.items() if short else ():
            epochs: dict[str, list[int]] = {}
            for source, epoch, _, _ in blocks:
                epochs.setdefault(source, []).append(epoch)
            ends = {source: {min(each), max(each)} for source, each in epochs.items()}
            entered[number] = [each for each in blocks if each.source not in short or each.epoch in ends[each.source]]
        return entered


class EnteredBlocks:
    """The shuffle blocks that successive steps enter. All blocks of a window are in use from its first step on."""

    def __init__(self, mixture: Mixture, *, global_batch: int):
        self._mixture, self._global_batch = mixture, global_batch
        self._window: int | None = None  # first step of the last window

    def entered(self, steps: Sequence[Step], ranges: SourceRanges) -> list[tuple[int, int, SourceBlock]]:
        """Return the number of the step in `steps`, the position of the first pack, and the block.

        ranges: of the steps. Positions count from the first step, in a window from its first turn.
        """
        mixture = self._mixture
        if not any(step.window for step in steps):
            return [(position // self._global_batch, position, block) for position, block in mixture.blocks(ranges)]
        assert isinstance(mixture, WindowedMixture)
        found = []
        for number, step in enumerate(steps):
            if step.window is None or step.window.step != self._window:
                turns = step.ranges if step.window is None else mixture.turns_of_window(step.window)[0]
                found += [(number, position, block) for position, block in mixture.blocks(turns)]
                self._window = step.window and step.window.step
        return found


def deal_to_groups(packs: PackRange, mixture: Mixture, *, global_batch: int, world: World) -> NDArray[np.int64]:
    """Return the packs of each group in successive steps: int64[num_steps, groups, micro_batches], PAD if none."""
    return assign_steps(
        packs,
        global_batch=global_batch,
        nodes=world.group_nodes,
        num_canonical_nodes=mixture.num_canonical_nodes,
    )


# How far loader workers are ahead of the step at hand. step config + workers -> items and packs; arithmetic only.

PREFETCH_PACKS = 32  # shards are requested this many packs before a worker reads them
MAX_ITEMS_AHEAD = 32
MAX_MEDIA_ITEMS_AHEAD = 4  # a pack of 8192 tokens of images is 150 MB of patches
TOKENS_PER_FILL = 1 << 17  # tokens of packs whose rows are one piece of memory: one call fills many short packs
TOKENS_PER_ITEM = 1 << 19  # of steps that are handed over together: an item costs both processes half a millisecond
MAX_STEPS_PER_ITEM = 4


def in_whole_steps(steps: StepConfig, *, packing_length: int, is_limited: bool) -> StepConfig:
    """Return the config for workers that only fetch packs: they hand over whole steps of a rank, several short steps.

    packing_length: the longest. is_limited: the cache holds only some shards, and workers look only a step ahead.
    """
    num_steps = TOKENS_PER_ITEM // (steps.micro_batches * packing_length)
    num_steps = 1 if is_limited else max(1, min(MAX_STEPS_PER_ITEM, num_steps))
    return replace(
        steps,
        packs_per_item=num_steps * steps.micro_batches,
        packs_per_work=max(1, TOKENS_PER_FILL // packing_length),
    )


def items_ahead(steps: StepConfig, *, num_workers: int, reads_media: bool) -> int:
    """Return the items that each worker prepares: the items of a step, up to a maximum for memory."""
    of_step = steps.micro_batches // steps.packs_per_item
    most = MAX_MEDIA_ITEMS_AHEAD if reads_media else MAX_ITEMS_AHEAD
    return min(most, max(2, -(-of_step // max(1, num_workers))))


def steps_ahead(steps: StepConfig, *, num_workers: int) -> int:
    """Return the maximum steps that a worker plans ahead of the step being handed out."""
    of_worker = (
        PREFETCH_PACKS + (items_ahead(steps, num_workers=num_workers, reads_media=False) + 1) * steps.packs_per_item
    )
    return -(-of_worker * max(1, num_workers) // steps.micro_batches) + 1


def steps_asked_ahead(steps: StepConfig, *, num_workers: int, num_items: int) -> int:
    """Return the number of steps after a rank's current step whose shards its workers have requested.

    Workers have num_items items each, and request PREFETCH_PACKS more packs before they make the next item. Items go to
    workers in turn: the last worker's items, begun or whole, are the furthest.
    """
    whole, rest = divmod(PREFETCH_PACKS, steps.packs_per_item)
    items = (whole + (num_items if num_workers else 0)) * max(1, num_workers)
    begun = steps.packs_per_item * (max(1, num_workers) - 1) + rest if rest else 0
    return (items * steps.packs_per_item + begun) // steps.micro_batches


def packs_ahead(steps: StepConfig, *, num_workers: int, num_items: int) -> int:
    """Return the packs that all workers of the largest node look ahead together. num_items: items ahead per worker."""
    of_worker = PREFETCH_PACKS + (num_items + 1) * steps.packs_per_item
    return of_worker * max(1, num_workers) * max(steps.world.group_nodes)
