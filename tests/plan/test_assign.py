from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.plan.assign import LINEAR_COST, PAD, assign, check_global_batch, count_spilled, num_steps, pack_costs
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import MAX_LENGTH, PackingConfig, PackRange
from numpy.typing import NDArray

from ..strategies import chat_lengths, examples, pack_range


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def equal_nodes(world_size: int, num_nodes: int) -> tuple[int, ...]:
    """Ranks of each of some nodes of one size."""
    return (world_size // num_nodes,) * num_nodes


class StepCase(NamedTuple):
    packs: PackRange
    global_batch: int
    num_canonical_nodes: int

    def worlds(self) -> list[tuple[int, int]]:
        """(world size, nodes) of every machine that can share the global batch."""
        sizes = divisors(self.global_batch)
        return [(world_size, num_nodes) for world_size in sizes for num_nodes in divisors(world_size)]

    def dealt(self, world_size: int, num_nodes: int) -> NDArray[np.int64]:
        return assign(
            self.packs,
            global_batch=self.global_batch,
            nodes=equal_nodes(world_size, num_nodes),
            num_canonical_nodes=self.num_canonical_nodes,
        )


@st.composite
def step_cases(draw: st.DrawFn, *, short: bool) -> StepCase:
    """A full step, or with `short` one at an epoch's end, which may have no packs at all."""
    global_batch = draw(st.integers(1, 24))
    num_packs = draw(st.integers(0, global_batch - 1)) if short else global_batch
    num_canonical_nodes = draw(st.integers(1, 12))
    lengths = st.lists(st.integers(1, 4096), min_size=1, max_size=6)
    nodes = st.integers(0, num_canonical_nodes - 1)
    packs = pack_range(
        draw(st.lists(lengths, min_size=num_packs, max_size=num_packs)),
        draw(st.lists(nodes, min_size=num_packs, max_size=num_packs)),
    )
    return StepCase(packs, global_batch, num_canonical_nodes)


any_step = step_cases(short=False) | step_cases(short=True)


@examples(80)
@given(case=any_step)
def test_each_pack_is_read_once_for_any_world_size_and_number_of_nodes(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        dealt = case.dealt(world_size, num_nodes)
        assert sorted(dealt[dealt != PAD]) == list(range(len(case.packs)))


@examples(80)
@given(case=any_step)
def test_every_rank_gets_the_same_number_of_packs_and_pads_only_in_a_short_step(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        dealt = case.dealt(world_size, num_nodes)
        assert dealt.shape == (world_size, case.global_batch // world_size)
        assert dealt.dtype == np.int64
        assert np.count_nonzero(dealt == PAD) == case.global_batch - len(case.packs)


@examples(80)
@given(case=any_step)
def test_each_rank_reads_its_costly_packs_first_and_pads_last(case: StepCase) -> None:
    costs = np.append(pack_costs(case.packs), 0)  # the cost of PAD, which is the last entry
    for world_size, num_nodes in case.worlds():
        for numbers in case.dealt(world_size, num_nodes):
            assert np.all(np.diff(costs[numbers]) <= 0)
            assert np.all(np.diff((numbers == PAD).astype(int)) >= 0)


@examples(80)
@given(case=any_step)
def test_packs_stay_on_the_node_of_their_canonical_node_as_far_as_counts_allow(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        room = case.global_batch // num_nodes
        homes = [int(node) * num_nodes // case.num_canonical_nodes for node in case.packs.canonical_nodes]
        for node, ranks in enumerate(np.split(case.dealt(world_size, num_nodes), num_nodes)):
            at_home = sum(homes[number] == node for number in ranks.ravel() if number != PAD)
            assert at_home == min(homes.count(node), room)


def test_a_whole_round_of_canonical_nodes_never_leaves_home() -> None:
    num_canonical_nodes, rounds = 8, 3
    packs = pack_range([[100]] * 24, list(range(num_canonical_nodes)) * rounds)
    dealt = assign(packs, global_batch=24, nodes=(2,) * 4, num_canonical_nodes=num_canonical_nodes)
    for node, ranks in enumerate(np.split(dealt, 4)):
        assert set(packs.canonical_nodes[ranks.ravel()]) == {2 * node, 2 * node + 1}


@examples(40)
@given(case=any_step)
def test_the_same_step_is_dealt_the_same_again(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        assert np.array_equal(case.dealt(world_size, num_nodes), case.dealt(world_size, num_nodes))


@pytest.mark.parametrize("linear_cost", [0, LINEAR_COST])
def test_ranks_do_more_alike_work_than_when_packs_are_dealt_in_order(linear_cost: int) -> None:
    lengths = chat_lengths(20_000, limit=4096, seed=2)
    plan = PackPlan(lengths, [20_000], order=OrderConfig(), packing=PackingConfig(packing_length=4096))
    world_size, global_batch = 8, 64
    in_order: list[float] = []
    by_cost: list[float] = []
    for step in range(plan.num_packs(0) // global_batch):
        packs = plan.packs(0, step * global_batch, (step + 1) * global_batch)
        costs = pack_costs(packs, linear_cost=linear_cost)
        dealt = assign(packs, global_batch=global_batch, nodes=(world_size,), linear_cost=linear_cost)
        for imbalances, work in (
            (in_order, costs.reshape(world_size, -1).sum(axis=1)),
            (by_cost, costs[dealt].sum(axis=1)),
        ):
            imbalances.append(float(work.max() / work.mean()))
    assert len(by_cost) > 20
    assert all(ours <= in_turn for ours, in_turn in zip(by_cost, in_order, strict=True))
    assert np.mean(by_cost) - 1 < (np.mean(in_order) - 1) / 4


@examples(80)
@given(case=any_step)
def test_the_next_costliest_pack_goes_to_the_least_busy_rank_with_room(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        for ranks in np.split(case.dealt(world_size, num_nodes), num_nodes):
            work = pack_costs(case.packs)
            if not (ranks == PAD).any():
                work -= work[ranks].min()  # what all packs of the node have in common cannot be balanced
            costs = work.tolist()
            expected: list[list[int]] = [[] for _ in ranks]
            for number in sorted(set(ranks.ravel().tolist()) - {PAD}, key=lambda number: (-costs[number], number)):
                with_room = [members for members in expected if len(members) < ranks.shape[1]]
                min(with_room, key=lambda members: sum(costs[member] for member in members)).append(number)
            assert [[number for number in rank if number != PAD] for rank in ranks.tolist()] == expected


@examples(60)
@given(data=st.data(), ranks=st.sampled_from([1, 2, 4, 8]), per_rank=st.integers(1, 8), has_media=st.booleans())
def test_packs_of_any_length_are_each_dealt_once(
    data: st.DataObject, ranks: int, per_rank: int, has_media: bool
) -> None:
    lengths = st.sampled_from([1, 1 << 20, 1 << 29, 1 << 30, MAX_LENGTH])
    packs = data.draw(st.lists(lengths.map(lambda length: [length]), min_size=1, max_size=ranks * per_rank))
    made = pack_range(packs, [0] * len(packs), [*range(1, len(packs) + 1)] if has_media else None)
    dealt = assign(made, global_batch=ranks * per_rank, nodes=(ranks,))
    assert sorted(dealt[dealt != PAD].tolist()) == list(range(len(packs)))


def test_the_cost_of_a_pack_is_the_sum_over_its_segments() -> None:
    packs = pack_range([[3, 4], [10], []], [0, 0, 0])
    assert pack_costs(packs, linear_cost=2).tolist() == [9 + 6 + 16 + 8, 100 + 20, 0]
    assert pack_costs(packs).tolist() == [25 + 7 * LINEAR_COST, 100 + 10 * LINEAR_COST, 0]
    assert pack_costs(pack_range([], [])).tolist() == []


@pytest.mark.parametrize(("global_batch", "world_size"), [(10, 4), (3, 8), (0, 1), (-8, 4)])
def test_a_global_batch_that_ranks_cannot_share_equally_is_refused(global_batch: int, world_size: int) -> None:
    message = (
        rf"^global_batch {global_batch} cannot be shared equally by {world_size} ranks: "
        rf"make it a multiple of {world_size}$"
    )
    with pytest.raises(ConfigError, match=message):
        check_global_batch(global_batch, world_size)
    with pytest.raises(ConfigError, match=message):
        assign(pack_range([], []), global_batch=global_batch, nodes=(world_size,))


@examples(60)
@given(num_packs=st.integers(0, 500), global_batch=st.integers(1, 40))
def test_steps_cover_all_packs_or_all_full_steps(num_packs: int, global_batch: int) -> None:
    steps = num_steps(global_batch=global_batch, num_packs=num_packs)
    assert (steps - 1) * global_batch < num_packs <= steps * global_batch
    full = num_steps(global_batch=global_batch, num_packs=num_packs, drop_last=True)
    assert full * global_batch <= num_packs < (full + 1) * global_batch


def chat_plan(*, canonical_nodes: int) -> PackPlan:
    return PackPlan(
        chat_lengths(6000, limit=512, seed=2),
        [100] * 60,
        order=OrderConfig(num_canonical_nodes=canonical_nodes, shuffle_block_size=1000),
        packing=PackingConfig(packing_length=512),
    )


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_before_the_tail_a_node_reads_the_shards_of_its_own_canonical_nodes_alone(num_nodes: int) -> None:
    plan = chat_plan(canonical_nodes=4)
    order = EpochOrder(plan.samples_per_shard, config=plan.order, epoch=0)
    own: list[set[int]] = [set() for _ in range(num_nodes)]
    for canonical in range(4):
        for block in range(order.num_blocks(canonical)):
            own[canonical * num_nodes // 4] |= set((order.block(canonical, block) // 100).tolist())
    packs = plan.packs(0, 0, plan.num_packs(0))
    node_of_pack = packs.canonical_nodes
    last_full_round = min(int(np.flatnonzero(node_of_pack == canonical)[-1]) for canonical in range(4)) // 16 * 16
    assert last_full_round > plan.num_packs(0) * 0.9
    for first in range(0, last_full_round, 16):
        step = plan.packs(0, first, first + 16)
        nodes = equal_nodes(8, num_nodes)
        dealt = assign(step, global_batch=16, nodes=nodes, num_canonical_nodes=4)
        assert count_spilled(step, dealt, nodes=nodes, num_canonical_nodes=4) == 0
        for rank, mine in enumerate(dealt):
            ids = [step.sample_ids[step.offsets[p] : step.offsets[p + 1]] for p in mine]
            assert set((np.concatenate(ids) // 100).tolist()) <= own[rank * num_nodes // 8]


@examples(30)
@given(
    first_step=st.integers(0, 40),
    world=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (12, 4)]),
)
def test_from_any_step_the_global_batch_is_the_same_for_every_world(first_step: int, world: tuple[int, int]) -> None:
    mixture = Mixture({"x": chat_plan(canonical_nodes=4)})
    cursor = mixture.skip(mixture.start(), first_step, global_batch=12)
    step = mixture.step(mixture.adopt(Cursor.from_dict(cursor.to_dict())), global_batch=12)
    assert step.ranges[0].first == 12 * first_step
    packs = mixture.packs(step.ranges)
    dealt = assign(packs, global_batch=12, nodes=equal_nodes(*world), num_canonical_nodes=4)
    assert sorted(dealt.ravel().tolist()) == list(range(12))
