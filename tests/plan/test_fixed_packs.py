"""Packs that are made once: each epoch has the same ones, in another order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig

from ..strategies import examples
from .test_pack_plan import PlanCase, plan_cases

pytestmark = pytest.mark.usefixtures("long_epochs")


def fixed(case: PlanCase) -> PlanCase:
    return case._replace(order=dataclasses.replace(case.order, reshuffle=False))


def packs_of(plan: PackPlan, epoch: int) -> list[tuple[int, ...]]:
    found = plan.packs(epoch, 0, plan.num_packs(epoch))
    return [tuple(found.sample_ids[a:b]) for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


@examples(15)
@given(case=plan_cases(overlongs=("drop", "truncate", "split", "keep")))
def test_every_epoch_has_the_packs_of_the_first(case: PlanCase) -> None:
    plan = fixed(case).plan()
    first = packs_of(plan, 0)
    assert first == packs_of(case.plan(), 0)
    assert plan.num_packs(3) == len(first)
    assert sorted(packs_of(plan, 3)) == sorted(first)


@examples(15)
@given(case=plan_cases())
def test_packs_of_a_later_epoch_are_the_same_however_they_are_read(case: PlanCase) -> None:
    case = fixed(case)
    whole = packs_of(case.plan(), 2)
    few = case.plan(kept_segments=1)
    assert [packs_of_range(few, 2, first) for first in range(len(whole))] == whole


def packs_of_range(plan: PackPlan, epoch: int, number: int) -> tuple[int, ...]:
    return tuple(plan.packs(epoch, number, number + 1).sample_ids)


def test_epochs_differ_in_the_order_of_blocks_and_of_packs_in_them() -> None:
    order = OrderConfig(reshuffle=False, num_canonical_nodes=2, shuffle_block_size=64)
    plan = PackPlan(np.full(1024, 30), [256] * 4, order=order, packing=PackingConfig(packing_length=100))
    epochs = [packs_of(plan, epoch) for epoch in range(4)]
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 4
    assert len({epoch[0] for epoch in epochs}) > 1


def test_blocks_tell_the_shards_of_the_packs_that_are_read() -> None:
    order = OrderConfig(reshuffle=False, num_canonical_nodes=1, shuffle_block_size=64)
    plan = PackPlan(np.full(1024, 30), [64] * 16, order=order, packing=PackingConfig(packing_length=100))
    for number in range(plan.num_packs(1)):
        ((_, _, node, block),) = plan.blocks(1, np.array([number]))
        shards = plan.shards_of_block(1, node, block)
        assert {*(plan.packs(1, number, number + 1).sample_ids // 64).tolist()} <= {*shards.tolist()}
    assert not len(plan.shards_of_block(1, 0, 16))
    assert [plan.blocks(1, np.array([number]))[0][3] for number in (0, plan.num_packs(1) - 1)] == [0, 15]


def test_packs_in_stored_order_stay_in_it() -> None:
    order = OrderConfig(reshuffle=False, shuffle=False)
    plan = PackPlan(np.full(64, 30), [64], order=order, packing=PackingConfig(packing_length=100))
    assert packs_of(plan, 0) == packs_of(plan, 5)


def test_plans_whose_packs_are_made_anew_have_the_fingerprint_that_they_had() -> None:
    def fingerprint(order: OrderConfig) -> str:
        return PackPlan(np.full(8, 3), [8], order=order, packing=PackingConfig(packing_length=10)).fingerprint

    assert fingerprint(OrderConfig()) == fingerprint(OrderConfig(reshuffle=True))
    assert fingerprint(OrderConfig(reshuffle=False)) != fingerprint(OrderConfig())
