"""Packs dealt by two costs: that of their tokens, and that of the tower of their media."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.plan.assign import PAD, assign, assign_steps, count_spilled, home_nodes, pack_costs
from lmms_stream.plan.lengths import Lengths, hash_lengths
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig, PackRange
from numpy.typing import NDArray

from ..strategies import MediaSamples, chat_lengths, examples, media_samples, pack_range
from .test_assign import StepCase, divisors, equal_nodes

GLOBAL_BATCH = 64
LIMIT = 4096
MAX_IMBALANCE = 1.05


@st.composite
def media_steps(draw: st.DrawFn, *, short: bool = False) -> StepCase:
    """A step some of whose packs have patches, from few to more than any count of pixels gives."""
    global_batch = draw(st.integers(1, 24))
    num_packs = draw(st.integers(1, global_batch)) if short else global_batch
    num_canonical_nodes = draw(st.integers(1, 12))
    lengths = st.lists(st.integers(1, 4096), min_size=1, max_size=6)
    nodes = st.integers(0, num_canonical_nodes - 1)
    patches = draw(
        st.lists(st.just(0) | st.integers(0, 200) | st.integers(0, 1 << 40), min_size=num_packs, max_size=num_packs)
    )
    patches[draw(st.integers(0, num_packs - 1))] += 4
    packs = pack_range(
        draw(st.lists(lengths, min_size=num_packs, max_size=num_packs)),
        draw(st.lists(nodes, min_size=num_packs, max_size=num_packs)),
        patches,
    )
    return StepCase(packs, global_batch, num_canonical_nodes)


any_step = media_steps() | media_steps(short=True)


@examples(80)
@given(case=any_step)
def test_each_pack_is_read_once_and_ranks_get_equal_counts(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        dealt = case.dealt(world_size, num_nodes)
        assert dealt.shape == (world_size, case.global_batch // world_size)
        assert sorted(dealt[dealt != PAD]) == list(range(len(case.packs)))
        for ranks in np.split(np.count_nonzero(dealt != PAD, axis=1), num_nodes):
            assert ranks.max() - ranks.min() <= 1
        assert np.all(np.diff((dealt == PAD).astype(int), axis=1) >= 0)


@examples(80)
@given(case=any_step)
def test_packs_go_to_the_nodes_to_which_packs_without_media_go(case: StepCase) -> None:
    text = case._replace(packs=dataclasses.replace(case.packs, patches=None))
    for world_size, num_nodes in case.worlds():
        found, expected = (np.split(each.dealt(world_size, num_nodes), num_nodes) for each in (case, text))
        for mine, wanted in zip(found, expected, strict=True):
            assert sorted(mine.ravel()) == sorted(wanted.ravel())


def parts(packs: PackRange, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """The parts of a node's costs that each pack has, of tokens' and of the tower's: float64[num_packs, 2].

    ranks: the packs of each rank of the node.
    """
    assert packs.patches is not None
    mine = ranks[ranks != PAD]
    costs = pack_costs(packs), packs.patches
    return np.stack([each / max(1, each[mine].sum()) for each in costs], axis=1)


@examples(80)
@given(case=any_step)
def test_each_rank_reads_first_what_costs_most_of_both_together(case: StepCase) -> None:
    for world_size, num_nodes in case.worlds():
        for ranks in np.split(case.dealt(world_size, num_nodes), num_nodes):
            costs = parts(case.packs, ranks).sum(axis=1)
            for numbers in ranks:
                assert np.all(np.diff(costs[numbers[numbers != PAD]]) <= 1e-6)


@examples(60)
@given(case=media_steps())
def test_no_swap_of_two_packs_would_help_the_busiest_rank_of_a_node(case: StepCase) -> None:
    """As far as it is busy at all: half a percent above the mean is as good as equal."""
    for world_size, num_nodes in case.worlds():
        for ranks in np.split(case.dealt(world_size, num_nodes), num_nodes):
            of_packs = parts(case.packs, ranks)
            costs = of_packs[ranks].sum(axis=1)
            mean = costs.mean(axis=0)
            best = float((costs - mean).max())
            if best <= mean.max() / 200 + 1e-6 or len(ranks) == 1:
                continue
            busiest = int((costs - mean).max(axis=1).argmax())
            swapped = [best]
            for other in set(range(len(ranks))) - {busiest}:
                for here in range(ranks.shape[1]):
                    for there in range(ranks.shape[1]):
                        tried = ranks[[busiest, other]].copy()
                        tried[0, here], tried[1, there] = tried[1, there], tried[0, here]
                        swapped.append(float((of_packs[tried].sum(axis=1) - mean).max()))
            assert min(swapped) >= best - 1e-6


@examples(80)
@given(case=any_step)
def test_patches_that_are_all_zero_change_nothing(case: StepCase) -> None:
    none = case._replace(packs=dataclasses.replace(case.packs, patches=None))
    zero = case._replace(packs=dataclasses.replace(case.packs, patches=np.zeros(len(case.packs), np.int64)))
    for world_size, num_nodes in case.worlds():
        assert np.array_equal(zero.dealt(world_size, num_nodes), none.dealt(world_size, num_nodes))


@examples(40)
@given(first=any_step, data=st.data())
def test_a_step_is_dealt_alike_alone_and_among_steps_with_media_and_without(
    first: StepCase, data: st.DataObject
) -> None:
    """Of several steps that are dealt together, those without media are dealt as text alone is."""
    batch, num_packs = first.global_batch, len(first.packs)
    with_media = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    whole = np.arange(batch) % num_packs  # the first step's packs again, as full steps
    assert first.packs.patches is not None
    numbers = np.concatenate([*[whole] * len(with_media), np.arange(num_packs)])
    packs = first.packs.take(numbers)
    assert packs.patches is not None
    packs.patches[: len(with_media) * batch] *= np.repeat(with_media, batch)
    for world_size in divisors(batch):
        settings: Any = {
            "global_batch": batch,
            "nodes": (world_size,),
            "num_canonical_nodes": first.num_canonical_nodes,
        }
        together = assign_steps(packs, **settings)
        for number, (dealt, has_media) in enumerate(zip(together, [*with_media, True], strict=True)):
            alone = packs.take(np.arange(number * batch, min((number + 1) * batch, len(packs))))
            if not has_media:
                alone = dataclasses.replace(alone, patches=None)
            here = np.where(dealt == PAD, PAD, dealt - number * batch)
            assert np.array_equal(here, assign(alone, **settings))


def plan_of(samples: MediaSamples, *, canonical_nodes: int = 8, seed: int = 0) -> PackPlan:
    has_media = bool(samples.patches.any())
    index = Lengths(
        lengths=samples.lengths,
        content_hash=hash_lengths(samples.lengths),
        patches=samples.patches if has_media else None,
        patches_hash=hash_lengths(samples.patches) if has_media else "",
    )
    order = OrderConfig(seed=seed, num_canonical_nodes=canonical_nodes, shuffle_block_size=2000)
    packing = PackingConfig(packing_length=LIMIT, overlong="drop")
    return PackPlan(index, [500] * (len(samples.lengths) // 500), order=order, packing=packing)


@cache
def mixture_of(name: str) -> Mixture:
    """Texts, samples with one image and samples with ten: in one dataset, or in three that are mixed by weights."""
    parts = {str(images): media_samples(4000, num_images=images, limit=LIMIT, seed=7) for images in (0, 1, 10)}
    if name == "one dataset":
        return Mixture({"all": plan_of(MediaSamples(*map(np.concatenate, zip(*parts.values(), strict=True))))})
    plans = {name: plan_of(samples) for name, samples in parts.items()}
    return Mixture(plans, weights={"0": 0.4, "1": 0.3, "10": 0.3})


def full_steps(mixture: Mixture, *, count: int) -> Iterator[PackRange]:
    cursor = mixture.start()
    for _ in range(count):
        step = mixture.step(cursor, global_batch=GLOBAL_BATCH)
        if step.num_packs < GLOBAL_BATCH:
            return
        yield mixture.packs(step.ranges)
        cursor = step.after


def imbalances(packs: PackRange, dealt: NDArray[np.int64]) -> tuple[float, float]:
    """max / mean over ranks of tokens' cost and of the tower's."""
    assert packs.patches is not None
    loads = [costs[dealt].sum(axis=1) for costs in (pack_costs(packs), packs.patches)]
    return float(loads[0].max() / loads[0].mean()), float(loads[1].max() / loads[1].mean())


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", ["one dataset", "three datasets"])
def test_ranks_do_alike_work_of_both_kinds_when_one_pack_has_ten_images_and_another_none(
    name: str, world_size: int
) -> None:
    found, in_order = [], []
    for packs in full_steps(mixture_of(name), count=20):
        dealt = assign(packs, global_batch=GLOBAL_BATCH, nodes=(world_size,), num_canonical_nodes=8)
        found.append(imbalances(packs, dealt))
        in_order.append(imbalances(packs, np.arange(GLOBAL_BATCH).reshape(world_size, -1)))
        assert packs.patches is not None
        if name == "three datasets":
            assert packs.patches.min() == 0 < packs.patches.max()
    assert len(found) >= 10
    assert np.max(found) <= MAX_IMBALANCE, np.max(found, axis=0)
    assert np.mean(found, axis=0)[1] - 1 < (np.mean(in_order, axis=0)[1] - 1) / 8


@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("name", ["one dataset", "three datasets"])
def test_on_two_nodes_the_ranks_of_each_do_alike_work_on_what_its_canonical_nodes_hold(
    name: str, world_size: int
) -> None:
    """What a node has to do follows from where packs are at home, as it does without media."""
    settings: Any = {"nodes": equal_nodes(world_size, 2), "num_canonical_nodes": 8}
    for packs in full_steps(mixture_of(name), count=20):
        dealt = assign(packs, global_batch=GLOBAL_BATCH, **settings)
        text = dataclasses.replace(packs, patches=None)
        of_text = assign(text, global_batch=GLOBAL_BATCH, **settings)
        assert count_spilled(packs, dealt, **settings) == count_spilled(packs, of_text, **settings)
        for ranks in np.split(dealt, 2):
            assert max(imbalances(packs, ranks)) <= MAX_IMBALANCE, name
        homes = home_nodes(packs.canonical_nodes, **settings)
        room = GLOBAL_BATCH // 2
        for node, ranks in enumerate(np.split(dealt, 2)):
            assert np.count_nonzero(homes[ranks] == node) == min(room, np.count_nonzero(homes == node))


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "digest"),
    [
        (2, 1, "cdd06bebb8cabbe2"),
        (8, 1, "f255a3e32e8ada31"),
        (8, 2, "d50ff08b3a1877df"),
        (16, 4, "ab878b3056b53a57"),
    ],
)
def test_packs_without_media_are_dealt_as_they_were(world_size: int, num_nodes: int, digest: str) -> None:
    """By the digests of what was dealt before patches were known, on several nodes since each deals its own packs."""
    lengths = chat_lengths(20_000, limit=LIMIT, seed=2)
    order = OrderConfig(num_canonical_nodes=8, shuffle_block_size=2000)
    plan = PackPlan(lengths, [500] * 40, order=order, packing=PackingConfig(packing_length=LIMIT))
    dealt = assign_steps(
        plan.packs(0, 0, plan.num_packs(0)),
        global_batch=GLOBAL_BATCH,
        nodes=equal_nodes(world_size, num_nodes),
        num_canonical_nodes=8,
    )
    assert hashlib.blake2b(dealt.tobytes(), digest_size=8).hexdigest() == digest
