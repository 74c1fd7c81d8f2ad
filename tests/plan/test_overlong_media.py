"""Samples with media that are longer than a pack: dropped and counted, never cut; in plans and in lanes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import CursorError, PackingError
from lmms_stream.plan.cursor import Cursor, SourceCursor
from lmms_stream.plan.lane_cursor import CarriedPacks, LaneState
from lmms_stream.plan.lengths import Lengths as PlanLengths
from lmms_stream.plan.lengths import hash_lengths
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import Overlong, PackingConfig, pack
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.types import World

from ..strategies import STRATEGIES, Lengths, PackingCase, chat_lengths, examples, packing_cases
from .test_lanes import LaneCase, content, lane_cases, small_case, take, through_json

pytestmark = pytest.mark.usefixtures("long_epochs")

CUTTING: tuple[Overlong, ...] = ("truncate", "split")


def media_of(lengths: Lengths, *, seed: int = 1) -> Lengths:
    """Patches of every other sample or so, many of them longer than a pack."""
    draws = np.random.default_rng(seed)
    patches: Lengths = np.where(draws.random(len(lengths)) < 0.5, draws.integers(1, 5000, len(lengths)), 0)
    return patches


@pytest.mark.parametrize("overlong", ["drop", *CUTTING])
@examples(60)
@given(data=st.data())
def test_overlong_samples_with_media_are_in_no_pack_and_counted_apart(overlong: Overlong, data: st.DataObject) -> None:
    case: PackingCase = data.draw(packing_cases(overlong=overlong))
    patches = media_of(case.lengths)
    limit = case.config.packing_length
    packs = pack(case.lengths, config=case.config, seed=case.seed, patches=patches)
    too_long = case.lengths > limit
    assert packs.num_overlong == np.count_nonzero(too_long)
    assert packs.num_overlong_media == np.count_nonzero(too_long & (patches > 0))
    kept = np.flatnonzero(~too_long | ((patches == 0) & (overlong != "drop")))
    assert sorted(set(packs.order.tolist())) == kept.tolist()
    # The packs are those that the samples which are kept have by themselves.
    alone = pack(case.lengths[kept], config=case.config, seed=case.seed)
    assert np.array_equal(kept[alone.order], packs.order)
    assert np.array_equal(alone.offsets, packs.offsets)
    assert packs.num_tokens == alone.num_tokens
    if packs.pieces is not None:
        assert not np.any(packs.pieces[patches[packs.order] > 0])


def test_an_overlong_sample_with_media_is_an_error_where_overlong_ones_are() -> None:
    with pytest.raises(PackingError, match="1 of 3 samples are longer than packing_length 10"):
        pack(np.array([5, 11, 3]), config=PackingConfig(packing_length=10), patches=np.array([0, 4, 0]))


def media_plan(*, overlong: Overlong = "split", patches: Lengths | None = None) -> PackPlan:
    case = small_case(overlong=overlong)
    return case._replace(patches=media_of(case.lengths) if patches is None else patches).plan()


@pytest.mark.parametrize("overlong", CUTTING)
def test_a_plan_counts_what_is_dropped_and_has_the_patches_of_its_packs(overlong: Overlong) -> None:
    plan = media_plan(overlong=overlong)
    assert plan.index.patches is not None
    has_media = np.asarray(plan.index.patches) > 0
    too_long = plan.lengths > 1024
    packs = plan.packs(0, 0, plan.num_packs(0))
    assert (plan.num_overlong(0), plan.num_overlong_media(0)) == (
        int(np.count_nonzero(too_long)), int(np.count_nonzero(too_long & has_media)),
    )  # fmt: skip
    assert plan.num_overlong_media(0) > 0
    assert sorted(set(packs.sample_ids.tolist())) == np.flatnonzero(~(too_long & has_media)).tolist()
    assert packs.patches is not None
    for number, patches in enumerate(packs.patches.tolist()):
        ids = packs.sample_ids[packs.offsets[number] : packs.offsets[number + 1]]
        assert patches == np.asarray(plan.index.patches)[ids].sum()
    assert packs.starts[np.isin(packs.sample_ids, np.flatnonzero(has_media))].max() == 0


def test_counts_that_are_kept_tell_overlong_media_where_there_are_media() -> None:
    case = small_case()
    for patches, num_columns in ((None, 3), (media_of(case.lengths), 4)):
        cache: dict[str, Lengths] = {}
        index = case._replace(patches=patches).plan().index
        for _ in range(2):
            plan = PackPlan(index, case.sizes, order=case.order, packing=case.packing, counts_cache=cache)
            plan.num_packs(0)
            (counts,) = cache.values()
            assert counts.shape[1] == num_columns
            assert plan.num_overlong_media(0) == counts[:, 3:].sum()


def test_a_cursor_is_not_taken_by_a_plan_of_other_patches() -> None:
    plan, other = media_plan(), media_plan(patches=media_of(small_case().lengths, seed=2))
    text = small_case().plan()
    assert len({plan.fingerprint, other.fingerprint, text.fingerprint}) == 3
    index = PlanLengths(lengths=text.index.lengths, content_hash=hash_lengths(text.index.lengths))
    again = PackPlan(index, text.samples_per_shard, order=text.order, packing=text.packing)
    assert again.fingerprint == text.fingerprint
    cursor = Cursor(sources={"data": SourceCursor(plan=plan.fingerprint)})
    with pytest.raises(CursorError, match="they differ in the lengths index"):
        cursor.check_plans({"data": other.fingerprint})


def test_works_say_the_patches_of_their_packs_and_those_of_texts_say_none() -> None:
    plan = media_plan()
    config = StepConfig(global_batch=8, world=World(), packs_per_work=3)
    mixture = Mixture({"data": plan})
    packs = plan.packs(0, 0, plan.num_packs(0))
    assert packs.patches is not None
    told: list[int] = []
    for planned in StepPlanner(mixture, config).plan(mixture.start()):
        work = planned.work
        if work.source:
            assert len(work.patches) == len(work.micro_batches) == len(work.bounds) - 1
            told += work.patches
    assert sorted(told) == sorted(packs.patches.tolist())
    mixture = Mixture({"data": small_case().plan()})
    assert all(not planned.work.patches for planned in StepPlanner(mixture, config).plan(mixture.start()))


@st.composite
def media_lane_cases(draw: st.DrawFn) -> LaneCase:
    """Lanes of samples with and without media; the first sample fits, so that not every sample is dropped."""
    case = draw(lane_cases())
    return case._replace(patches=media_of(case.lengths, seed=draw(st.integers(0, 1 << 32))))


@examples(75, many=1200)
@given(case=media_lane_cases())
def test_lanes_pack_samples_with_media_as_the_plan_does(case: LaneCase) -> None:
    for number in range(case.order.num_canonical_nodes or 1):
        lane = case.lane(number)
        for epoch in range(2):
            expected = case.plan_packs(number, epoch)
            if not expected:
                break
            assert take(lane, len(expected)) == expected


@pytest.mark.parametrize("overlong", ["drop", *CUTTING])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lane_with_media_can_be_stopped_after_every_pack(strategy: str, overlong: Overlong) -> None:
    case = small_case(strategy=strategy, overlong=overlong)
    patches = media_of(case.lengths)
    case = case._replace(patches=patches)
    expected = case.plan_packs(1, 0) + case.plan_packs(1, 1)
    state = None
    for each in expected:
        lane = case.lane(1, state)
        found = lane.next_pack()
        assert content(found) == each
        assert found.patches.tolist() == patches[found.sample_ids].tolist()
        state = through_json(lane.state)


def test_the_state_of_a_lane_says_nothing_of_patches_where_there_are_none() -> None:
    case = small_case()
    states = []
    for patches in (None, np.zeros(len(case.lengths), np.int64), media_of(case.lengths)):
        lane = case._replace(patches=patches).lane(0)
        lane.next_pack()
        states.append(lane.state.to_dict())
    assert json.dumps(states[0]) == json.dumps(states[1])
    assert "patches" not in states[0]["carried"]
    assert len(states[2]["carried"]["patches"]) == len(states[2]["carried"]["samples"]) > 0


def test_a_damaged_list_of_patches_is_refused() -> None:
    carried = CarriedPacks(sizes=(2,), firsts=(0,), samples=(0, 1), expected=(3, 4), patches=(0, 8))
    saved = LaneState(carried=carried).to_dict()
    assert LaneState.from_dict(saved).carried == carried
    for wrong in ([8], [0, -1], [0, 1 << 32], "x"):
        with pytest.raises(CursorError, match="the saved lane state is damaged"):
            LaneState.from_dict(saved | {"carried": saved["carried"] | {"patches": wrong}})


def test_plans_of_texts_alone_have_the_fingerprint_that_they_had() -> None:
    lengths = chat_lengths(700, limit=2000, seed=3)
    case = small_case()
    plan = PackPlan(lengths, case.sizes, order=case.order, packing=case.packing)
    zeros = dataclasses.replace(plan.index, patches_hash="")
    assert PackPlan(zeros, case.sizes, order=case.order, packing=case.packing).fingerprint == plan.fingerprint
    assert plan.fingerprint.split("-")[1] == GOLDEN


GOLDEN = "0fa7a0c9f009f823"  # before plans knew of patches
