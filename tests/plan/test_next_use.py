"""When shards are needed next, against the blocks that a plan says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lmms_stream.plan.next_use import NEVER, NOW, NextUse, Places, place, served_nodes
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.sample_order import Streams
from numpy.typing import NDArray

from ..strategies import examples, order_configs, shard_sizes

EPOCHS = 3


def plan_of(sizes: list[int], config: OrderConfig, streams: Streams | None = None) -> PackPlan:
    packing = PackingConfig(packing_length=20)
    return PackPlan(np.full(sum(sizes), 5, np.uint32), sizes, order=config, packing=packing, streams=streams)


def needs_of(plan: PackPlan, *, node: int, epoch: int) -> list[NDArray[np.int64]]:
    """The shards with samples that each block of a canonical node needs, turn by turn."""
    return [
        np.array([each for each in plan.shards_of_block(epoch, node, turn) if plan.samples_per_shard[each]], np.int64)
        for turn in range(plan.order_of(epoch).num_blocks(node))
    ]


@examples(80)
@given(sizes=shard_sizes(), config=order_configs(), reshuffle=st.booleans(), is_mixed=st.booleans(), data=st.data())
def test_shards_are_needed_with_their_next_block_in_this_epoch_or_the_next(
    sizes: list[int], config: OrderConfig, reshuffle: bool, is_mixed: bool, data: st.DataObject
) -> None:
    assume(sum(sizes))
    cut = len(sizes) // 2
    parts, streams = [sum(sizes[:cut]), sum(sizes[cut:])], None
    if is_mixed and all(parts):
        reshuffle = True
        streams = Streams(("a", "b"), (cut, len(sizes) - cut), (3 * parts[0], parts[1] // 2 + 1))
    config = OrderConfig(
        seed=config.seed,
        shuffle=config.shuffle,
        num_canonical_nodes=config.num_canonical_nodes,
        shuffle_block_size=max(config.shuffle_block_size, 3 * sum(sizes) // (4 * len(sizes)) + 1),  # are not joined
        reshuffle=reshuffle,
    )
    plan = plan_of(sizes, config, streams)
    order = plan.order_of(1)
    at = [data.draw(st.integers(0, max(0, order.num_blocks(node) - 1))) for node in range(order.num_canonical_nodes)]
    places = np.array([place(1, turn) for turn in at], np.int64)
    next_use = NextUse(plan, serves=np.ones(len(at), bool), sizes=np.array(sizes), limit_bytes=None)
    found = next_use.times(places, places)
    expected = np.full(len(sizes), NEVER)
    for epoch in range(EPOCHS, 0, -1):
        for node, begun in enumerate(at):
            turns = needs_of(plan, node=node, epoch=epoch)
            for turn in reversed(range(begun if epoch == 1 else 0, len(turns))):
                is_now = epoch == 1 and turn == begun
                time = NOW if is_now else epoch - 1 + turn / len(turns)
                expected[turns[turn]] = np.minimum(expected[turns[turn]], time)
    assert np.array_equal(found == NOW, expected == NOW)
    assert found == pytest.approx(expected, abs=1e-5)


def test_blocks_that_are_still_at_hand_are_needed_now_until_they_are_passed() -> None:
    sizes = np.full(40, 10)
    plan = plan_of(sizes.tolist(), OrderConfig(num_canonical_nodes=2, shuffle_block_size=50))
    next_use = NextUse(plan, serves=np.array([True, False]), sizes=sizes, limit_bytes=None)
    places = Places(2, epoch=0)

    def now() -> list[int]:
        return [int(each) for each in np.flatnonzero(next_use.times(places.held, places.now) == NOW)]

    blocks = [sorted(plan.shards_of_block(0, 0, block).tolist()) for block in range(3)]
    places.enter(0, place(0, 0), until=7)
    places.enter(1, place(0, 1), until=7)
    assert now() == blocks[0]
    places.enter(0, place(0, 1), until=9)
    assert now() == sorted(blocks[0] + blocks[1])
    assert not places.pass_to(8)
    assert places.pass_to(9)
    assert now() == blocks[1]
    times = next_use.times(places.held, places.now)
    assert set(blocks[2]) == set(np.flatnonzero(times == times[times > NOW].min()).tolist())


def test_machines_serve_equal_shares_of_canonical_nodes_or_all_of_them() -> None:
    shares = [served_nodes(node, nodes=(1, 1), num_canonical_nodes=4).tolist() for node in range(2)]
    assert shares == [[True, True, False, False], [False, False, True, True]]
    assert served_nodes(1, nodes=(1, 1), num_canonical_nodes=3).all()


def test_shards_of_other_machines_are_never_needed_as_far_as_is_looked() -> None:
    sizes = np.full(4000, 10)
    plan = plan_of(sizes.tolist(), OrderConfig(num_canonical_nodes=64, shuffle_block_size=50))
    next_use = NextUse(plan, serves=np.arange(64) == 5, sizes=sizes, limit_bytes=1000)
    start = np.full(64, place(0, 0), np.int64)
    needed = np.flatnonzero(next_use.times(start, start) < NEVER)
    of_epochs = [
        np.unique(np.concatenate([plan.shards_of_block(epoch, 5, block) for block in range(13)])) for epoch in (0, 1, 2)
    ]
    assert needed.tolist() == np.unique(np.concatenate(of_epochs)).tolist()  # two more fill the cache


def test_the_next_uses_of_a_hundred_thousand_shards_keep_a_megabyte_an_epoch() -> None:
    """Blocks that are much smaller than shards are told some at a time."""
    sizes = np.full(100_000, 10_000)
    order = EpochOrder(sizes, config=OrderConfig(shuffle_block_size=100), epoch=0)
    assert order.num_blocks(0) * order.num_canonical_nodes == 10**7
    shards, nodes, blocks = order.pieces(25)
    assert len(shards) == 400_000
    assert len(np.unique(shards)) == 100_000
    assert (blocks % 25 == 0).all()
    assert nodes.max() == order.num_canonical_nodes - 1
