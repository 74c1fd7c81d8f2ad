from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.lane_cursor import LaneAfter, LaneCursor
from lmms_stream.plan.lanes import Lane, LanePlanner
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import Planned, StepConfig, StepPlanner, Work
from lmms_stream.plan.source_ranges import SourceBlock
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.types import World
from numpy.typing import NDArray

from ..strategies import Lengths, chat_lengths, examples

SHARDS = {"a": [40], "b": [70, 0, 80], "c": [1] * 90}
Pack = tuple[str, tuple[tuple[int, int, int], ...]]  # source; sample id, start and length of each segment


def make_plan(shards: list[int], *, seed: int, canonical_nodes: int) -> PackPlan:
    return PackPlan(
        chat_lengths(sum(shards), limit=600, seed=seed),
        shards,
        order=OrderConfig(seed=seed, num_canonical_nodes=canonical_nodes, shuffle_block_size=64),
        packing=PackingConfig(packing_length=512, overlong="split"),
    )


PLANS = {name: make_plan(shards, seed=n, canonical_nodes=n + 1) for n, (name, shards) in enumerate(SHARDS.items())}


class Case(NamedTuple):
    mixture: WindowedMixture
    cursor: Cursor
    config: StepConfig  # of rank 0
    num_workers: int
    num_steps: int

    def readers(self) -> list[list[StepPlanner]]:
        """The planners of the workers of each group of ranks."""
        found = []
        for group in range(self.config.world.num_groups):
            world = replace(self.config.world, rank=group * self.config.world.replication)
            config = StepConfig(
                global_batch=self.config.global_batch,
                world=world,
                drop_last=self.config.drop_last,
                packs_per_item=self.config.packs_per_item,
                packs_per_work=self.config.packs_per_work,
            )
            found.append(
                [
                    StepPlanner(self.mixture, config, worker=worker, num_workers=self.num_workers)
                    for worker in range(self.num_workers)
                ]
            )
        return found

    def planned(self, planner: StepPlanner) -> list[Planned]:
        """What a reader has to do in the first num_steps steps."""
        found = []
        for each in planner.plan(self.cursor):
            if each.work.step >= self.num_steps:
                break
            found.append(each)
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = draw(st.lists(st.sampled_from(sorted(PLANS)), min_size=1, unique=True))
    weights = draw(st.none() | st.fixed_dictionaries({name: st.integers(1, 5) for name in names}))
    balance: str | int = draw(st.sampled_from(["deal", "window", "across_sources"]) | st.sampled_from([2, 5]))
    mixture = WindowedMixture({name: PLANS[name] for name in names}, weights=weights, balance=balance)
    replication, micro_batches = (draw(st.integers(1, 3)) for _ in range(2))
    nodes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if draw(st.booleans()):
        nodes = [nodes[0]] * len(nodes)
    ranks_per_node = [ranks * replication for ranks in nodes]
    world = World(world_size=sum(ranks_per_node), ranks_per_node=ranks_per_node, replication=replication)
    global_batch = world.num_groups * micro_batches
    config = StepConfig(
        global_batch=global_batch,
        world=world,
        drop_last=draw(st.booleans()),
        packs_per_item=draw(st.sampled_from([1, micro_batches, 3 * micro_batches])),
        packs_per_work=draw(st.integers(1, 4)),
    )
    cursor = mixture.skip(mixture.start(), draw(st.integers(0, 6)), global_batch=global_batch)
    return Case(mixture, cursor, config, draw(st.integers(1, 3)), draw(st.integers(1, 16)))


def packs_of(work: Work) -> list[Pack]:
    segments = list(
        zip(
            work.segments.sample_ids.tolist(),
            work.segments.starts.tolist(),
            work.segments.lengths.tolist(),
            strict=True,
        )
    )
    bounds = work.bounds.tolist()
    return [(work.source, tuple(segments[first:stop])) for first, stop in pairwise(bounds)]


def packs_of_steps(case: Case) -> tuple[list[Counter[Pack]], list[Cursor], int]:
    """The packs of each step and the cursor after it, as the mixture has them; the packs of a step that is dropped."""
    packs_of_step: list[Counter[Pack]] = []
    cursors, cursor = [], case.cursor
    for _ in range(case.num_steps):
        step = case.mixture.step(cursor, global_batch=case.config.global_batch)
        if not step.num_packs:
            break
        cursors.append(step.after)
        if case.config.drop_last and step.num_packs < case.config.global_batch:
            return packs_of_step, cursors, step.num_packs
        found = case.mixture.packs(step.ranges)
        names = [case.mixture.names[number] for number in found.sources]
        triples = list(zip(found.sample_ids.tolist(), found.starts.tolist(), found.lengths.tolist(), strict=True))
        bounds = found.offsets.tolist()
        packs = [(name, tuple(triples[a:b])) for name, (a, b) in zip(names, pairwise(bounds), strict=True)]
        packs_of_step.append(Counter(packs))
        cursor = step.after
        if step.ends_epoch:
            break
    return packs_of_step, cursors, 0


@examples(25, many=200)
@given(case=cases())
def test_the_works_of_all_readers_are_the_packs_of_each_step_whatever_the_world(case: Case) -> None:
    expected, _, _ = packs_of_steps(case)
    found: list[Counter[Pack]] = [Counter() for _ in expected]
    for planners in case.readers():
        micro_batches: Counter[tuple[int, int]] = Counter()
        for planner in planners:
            for each in case.planned(planner):
                work = each.work
                micro_batches.update((work.step, micro_batch) for micro_batch in work.micro_batches)
                if work.source:
                    assert len(work.micro_batches) <= case.config.packs_per_work
                    found[work.step].update(packs_of(work))
        steps, batches = range(len(expected)), range(case.config.micro_batches)
        assert micro_batches == Counter((step, batch) for step in steps for batch in batches)
    assert found == expected


@pytest.mark.usefixtures("long_epochs")
def test_a_reader_makes_the_packs_of_its_own_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other nodes' blocks it knows how many packs they have, and replays none: 64 nodes cost it no more than one."""
    replayed: set[int] = set()
    block = EpochOrder.block

    def noted(order: EpochOrder, node: int, number: int) -> NDArray[np.int64]:
        replayed.add(node)
        return block(order, node, number)

    mixture = Mixture({"x": make_plan([200] * 12, seed=5, canonical_nodes=6)})
    mixture.plans["x"].count(0)
    monkeypatch.setattr(EpochOrder, "block", noted)
    for node in range(3):
        config = StepConfig(global_batch=12, world=World(rank=2 * node, world_size=6, num_nodes=3))
        replayed.clear()
        works = list(islice(StepPlanner(mixture, config).plan(mixture.start()), 20))
        assert works[-1].work.step == 9
        assert replayed <= {2 * node, 2 * node + 1}
        assert replayed


@examples(25, many=200)
@given(case=cases())
def test_the_cursor_after_each_step_comes_once_to_each_rank_with_its_last_batch(case: Case) -> None:
    expected, cursors, num_dropped = packs_of_steps(case)
    for planners in case.readers():
        after: dict[int, Cursor] = {}
        dropped = []
        for planner in planners:
            for each in case.planned(planner):
                if each.num_dropped_packs:
                    dropped.append(each.num_dropped_packs)
                    assert each.work.step == len(expected)
                    assert not each.work.micro_batches
                elif each.after is not None:
                    assert each.work.micro_batches[-1] == case.config.micro_batches - 1
                if each.after is not None:
                    assert isinstance(each.after, Cursor)
                    assert each.work.step not in after
                    after[each.work.step] = each.after
        assert [after[step] for step in sorted(after)] == cursors
        assert dropped == [num_dropped] * (num_dropped > 0)


@examples(15, many=100)
@given(case=cases())
def test_every_segment_is_located_in_its_shard(case: Case) -> None:
    for planner in case.readers()[0]:
        for each in case.planned(planner):
            source, segments = each.work.source, each.work.segments
            if source:
                first_ids = np.cumsum([0, *SHARDS[source]])
                assert np.array_equal(first_ids[segments.shard_ids] + segments.indices, segments.sample_ids)
                assert np.all(segments.indices < np.array(SHARDS[source])[segments.shard_ids])
                assert np.array_equal(segments.expected, PLANS[source].lengths[segments.sample_ids])


@examples(15, many=100)
@given(case=cases())
def test_each_shuffle_block_is_entered_with_the_first_step_that_reads_it(case: Case) -> None:
    """In a window with the first step of the window; of short epochs, which read the same shards, two are enough."""
    planner = StepPlanner(case.mixture, case.config)
    entered: set[object] = set()
    cursor = case.cursor

    def known(block: SourceBlock) -> SourceBlock:
        is_short = case.mixture.plans[block.source].is_short
        return block._replace(epoch=0) if is_short and case.mixture.balance != "deal" else block

    step = None
    for each in case.planned(planner):
        if each.num_dropped_packs:
            break
        if step is None or each.work.step > step[0]:
            taken = case.mixture.step(cursor, global_batch=case.config.global_batch)
            step, cursor = (each.work.step, taken), taken.after
        entered.update(map(known, each.entered))
        assert len(each.entered) == len(set(each.entered))
        if each.after is not None:
            assert {known(block) for _, block in case.mixture.blocks(step[1].ranges)} <= entered


LANE_ORDER = OrderConfig(num_canonical_nodes=4, shuffle_block_size=50)
LANE_PACKING = PackingConfig(packing_length=512, window=16)
LANE_LENGTHS: Lengths = chat_lengths(300, limit=512, seed=7)


def lane_planners(num_groups: int, num_workers: int, global_batch: int) -> list[LanePlanner]:
    return [
        LanePlanner(
            [100, 200],
            StepConfig(global_batch=global_batch, world=World(rank=group, world_size=num_groups)),
            source="data",
            order=LANE_ORDER,
            packing=LANE_PACKING,
            measure=LANE_LENGTHS.__getitem__,
            worker=worker,
            num_workers=num_workers,
        )
        for group in range(num_groups)
        for worker in range(num_workers)
    ]


@pytest.mark.parametrize(("num_groups", "num_workers"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_packs_of_lanes_come_from_one_lane_after_another_with_the_state_after_each(
    num_groups: int, num_workers: int
) -> None:
    global_batch, num_packs = 4, 24
    start = LaneCursor(plan="", num_lanes=4)
    found: dict[int, Planned] = {}
    each_reads = num_packs // (num_groups * num_workers)
    for reader, planner in enumerate(lane_planners(num_groups, num_workers, global_batch)):
        group = reader // num_workers
        for planned in islice(planner.plan(start), each_reads):
            work = planned.work
            batch = work.step * (global_batch // num_groups) + work.micro_batches[0]
            found[group + batch * num_groups] = planned
    assert sorted(found) == list(range(num_packs))
    lanes = [
        Lane([100, 200], order=LANE_ORDER, packing=LANE_PACKING, lane=n, measure=LANE_LENGTHS.__getitem__)
        for n in range(4)
    ]
    for number in range(num_packs):
        lane, planned = lanes[number % 4], found[number]
        pack = lane.next_pack()
        assert np.array_equal(pack.sample_ids, planned.work.segments.sample_ids)
        assert np.array_equal(planned.work.segments.expected, LANE_LENGTHS[pack.sample_ids])
        assert planned.after == LaneAfter(number % 4, lane.state)


def test_a_cursor_of_lanes_after_a_step_has_the_states_of_those_that_gave_its_packs() -> None:
    (planner,) = lane_planners(1, 1, 4)
    start = LaneCursor(plan="", num_lanes=4)
    afters = [each.after for each in islice(planner.plan(start), 4)]
    cursor = start.after_step([each for each in afters if isinstance(each, LaneAfter)], num_packs=4)
    assert (cursor.step, cursor.packs, sorted(cursor.states)) == (1, 4, [0, 1, 2, 3])
    cursor.check("", 4)
    (again,) = lane_planners(1, 1, 4)
    rest = [each.work.segments.sample_ids.tolist() for each in islice(again.plan(cursor), 5)]
    whole = [each.work.segments.sample_ids.tolist() for each in islice(lane_planners(1, 1, 4)[0].plan(start), 9)]
    assert whole[4:] == rest
