"""Nodes of any sizes: each pack of a step is read once, and every rank has the same cursor after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.plan.assign import has_equal_shares, home_nodes, most_served
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.next_use import served_nodes
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.types import World, nodes_of_ranks

from ..strategies import chat_lengths, examples

MAX_RANKS = 12
Pack = tuple[int, ...]  # its sample ids


@cache
def mixture() -> Mixture:
    plan = PackPlan(
        chat_lengths(1500, limit=512, seed=3),
        [50] * 30,
        order=OrderConfig(num_canonical_nodes=6, shuffle_block_size=300),
        packing=PackingConfig(packing_length=512),
    )
    return Mixture({"data": plan})


@st.composite
def worlds(draw: st.DrawFn, *, global_batch: int) -> World:
    """A world of up to MAX_RANKS ranks whose groups share the global batch, on nodes of any sizes."""
    replication = draw(st.sampled_from([1, 1, 1, 2, 3]))
    groups = [size for size in range(1, MAX_RANKS // replication + 1) if global_batch % size == 0]
    world_size = draw(st.sampled_from(groups)) * replication
    nodes: list[int] = []
    while sum(nodes) < world_size:
        nodes.append(draw(st.integers(1, world_size - sum(nodes))))
    return World(world_size=world_size, ranks_per_node=nodes, replication=replication)


class Stretch(NamedTuple):
    world: World
    num_steps: int
    num_workers: int


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[Stretch]]:
    """The global batch of a run, and its stretches, each on a world of its own."""
    global_batch = draw(st.sampled_from([12, 24, 40, 60]))
    stretches = [
        Stretch(draw(worlds(global_batch=global_batch)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return global_batch, stretches


def read(cursor: Cursor, stretch: Stretch, *, global_batch: int) -> tuple[list[Counter[Pack]], Cursor]:
    """The packs that all groups read in each step, and the cursor after the stretch, which all must have."""
    steps: list[Counter[Pack]] = [Counter() for _ in range(stretch.num_steps)]
    cursors = set()
    for group in range(stretch.world.num_groups):
        world = replace(stretch.world, rank=group * stretch.world.replication)
        config = StepConfig(global_batch=global_batch, world=world)
        counts = [0] * stretch.num_steps
        after = []
        for worker in range(stretch.num_workers):
            planner = StepPlanner(mixture(), config, worker=worker, num_workers=stretch.num_workers)
            for planned in planner.plan(cursor):
                if planned.work.step >= stretch.num_steps:
                    break
                counts[planned.work.step] += len(planned.work.micro_batches)
                if planned.after is not None:
                    assert isinstance(planned.after, Cursor)
                    after.append(planned.after)
                ids, bounds = planned.work.segments.sample_ids, planned.work.bounds.tolist()
                if planned.work.source:
                    steps[planned.work.step].update(tuple(ids[first:stop].tolist()) for first, stop in pairwise(bounds))
        assert counts == [global_batch // stretch.world.num_groups] * stretch.num_steps
        cursors.add(str(max(after, key=lambda each: each.step).to_dict()))
        last = max(after, key=lambda each: each.step)
    assert len(cursors) == 1
    return steps, last


@examples(75, many=800)
@given(run=runs())
def test_each_pack_of_each_step_is_read_once_on_nodes_of_any_sizes_and_resumed_on_others(
    run: tuple[int, list[Stretch]],
) -> None:
    global_batch, stretches = run
    one = Stretch(World(), sum(each.num_steps for each in stretches), 1)
    expected, end = read(mixture().start(), one, global_batch=global_batch)
    cursor, steps = mixture().start(), []
    for stretch in stretches:
        found, cursor = read(cursor, stretch, global_batch=global_batch)
        steps += found
    assert steps == expected
    assert cursor.to_dict() == end.to_dict()
    assert all(count == 1 for step in steps for count in step.values())


@examples(100, many=3000)
@given(nodes=st.lists(st.integers(1, 6), min_size=1, max_size=6), num_canonical_nodes=st.integers(1, 48))
def test_nodes_serve_canonical_nodes_in_proportion_to_their_ranks(
    nodes: Sequence[int], num_canonical_nodes: int
) -> None:
    homes = home_nodes(  # the definition: canonical node c is at home where rank floor(c * ranks / C) is
        served_nodes(0, nodes=(1,), num_canonical_nodes=num_canonical_nodes).nonzero()[0],
        nodes=nodes,
        num_canonical_nodes=num_canonical_nodes,
    ).tolist()
    rank_nodes = [node for node, ranks in enumerate(nodes) for _ in range(ranks)]
    assert homes == [rank_nodes[c * len(rank_nodes) // num_canonical_nodes] for c in range(num_canonical_nodes)]
    served = [served_nodes(node, nodes=nodes, num_canonical_nodes=num_canonical_nodes) for node in range(len(nodes))]
    assert max(int(each.sum()) for each in served) == most_served(nodes=nodes, num_canonical_nodes=num_canonical_nodes)
    if has_equal_shares(nodes=nodes, num_canonical_nodes=num_canonical_nodes):
        assert sum(each.astype(int) for each in served).tolist() == [1] * num_canonical_nodes  # type: ignore[union-attr]
        assert [int(each.sum()) for each in served] == [
            num_canonical_nodes * ranks // len(rank_nodes) for ranks in nodes
        ]
    else:
        assert all(each.all() for each in served)


@examples(100, many=2000)
@given(data=st.data(), nodes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_rank_knows_its_node_and_equal_nodes_have_one_form(data: st.DataObject, nodes: list[int]) -> None:
    rank = data.draw(st.integers(0, sum(nodes) - 1))
    world = World(rank=rank, world_size=sum(nodes), ranks_per_node=nodes)
    assert (world.nodes, world.num_nodes) == (tuple(nodes), len(nodes))
    before = [node for node, ranks in enumerate(nodes) for _ in range(ranks)]
    assert world.node == before[rank]
    assert world.is_first_of_node == (rank == 0 or before[rank - 1] != before[rank])
    assert nodes_of_ranks([nodes[node] for node in before]) == tuple(nodes)
    if len(set(nodes)) == 1:
        assert world == World(rank=rank, world_size=sum(nodes), num_nodes=len(nodes))
    environments = [
        {
            "RANK": str(each), "WORLD_SIZE": str(sum(nodes)), "LOCAL_WORLD_SIZE": str(nodes[before[each]]),
            "LOCAL_RANK": str(each - before.index(before[each])), "GROUP_WORLD_SIZE": str(len(nodes)),
            "GROUP_RANK": str(before[each]),
        }
        for each in range(sum(nodes))
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environments[rank].items():
            patch.setenv(name, value)
        found = World.detect()
    assert found.is_first_of_node == world.is_first_of_node
    if len(nodes) < 3 or len(set(nodes)) == 1:
        assert found == world
    else:
        assert found.is_guess or found.nodes == (nodes[before[rank]],) * len(nodes)


def test_worlds_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks_per_node \(8, 3\) must name .* and 12 ranks \(world_size\) in all"):
        World(world_size=12, ranks_per_node=(8, 3))
    with pytest.raises(ConfigError, match=r"on 3 nodes \(num_nodes\)"):
        World(world_size=12, ranks_per_node=(8, 4), num_nodes=3)
    with pytest.raises(ConfigError, match="choose a divisor of 12 as num_nodes, or give ranks_per_node"):
        World(world_size=12, num_nodes=5)
    with pytest.raises(ConfigError, match="ranks do not agree on the ranks of their nodes: LOCAL_WORLD_SIZE is 2 at"):
        nodes_of_ranks([1, 2, 1])
    guess = {"RANK": "7", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in guess.items():
            patch.setenv(name, value)
        with pytest.raises(ConfigError, match=r"this node \d of 12.*initialize torch.distributed before the first"):
            World.detect().refuse_guess()
