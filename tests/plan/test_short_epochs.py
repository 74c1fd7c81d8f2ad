"""Epochs of few samples, which are packed many at a time, have the packs of epochs that are packed one by one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import CursorError
from lmms_stream.plan import short_epochs
from lmms_stream.plan.cursor import Cursor, SourceCursor
from lmms_stream.plan.kernels.short_epochs import (
    STATE_WORDS,
    EpochPacks,
    Rules,
    SourceFacts,
    begin_stream,
    pack_epochs,
    seeded_words,
    shuffle,
)
from lmms_stream.plan.lengths import Lengths, hash_lengths
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig, PackRange
from lmms_stream.plan.source_ranges import SourceRange

from ..strategies import STRATEGIES, examples, order_configs, seeds, shard_sizes


@examples(100)
@given(words=st.lists(seeds(), min_size=1, max_size=7), size=st.integers(0, 300))
def test_compiled_streams_give_the_numbers_of_numpy(words: list[int], size: int) -> None:
    entropy, state, shuffled = np.array(words, np.uint64), np.empty(STATE_WORDS, np.uint64), np.arange(size)
    generated = np.empty(4, np.uint64)
    begin_stream(entropy, state)
    shuffle(state, shuffled)
    assert np.array_equal(shuffled, np.random.default_rng(words).permutation(size))
    seeded_words(entropy, generated)
    assert np.array_equal(generated, np.random.SeedSequence(words).generate_state(4, np.uint64))


@st.composite
def plan_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of plans, with every strategy and policy, fixed packs, and samples with media."""
    sizes = draw(shard_sizes().filter(any))
    limit = draw(st.sampled_from([8, 100, 1000]))
    rng = np.random.default_rng(draw(seeds()))
    packing = PackingConfig(
        packing_length=limit,
        strategy=draw(st.sampled_from(STRATEGIES)),
        window=draw(st.sampled_from([4, 70, 1000])),
        overlong=draw(st.sampled_from(["drop", "truncate", "split"])),
        max_samples_per_pack=draw(st.none() | st.integers(1, 5)),
    )
    lengths = rng.integers(1, int(limit * draw(st.sampled_from([0.2, 1, 3]))) + 2, size=sum(sizes)).astype(np.uint32)
    patches = rng.integers(0, 3, size=sum(sizes)).astype(np.uint32) if draw(st.booleans()) else None
    index = Lengths(lengths=lengths, content_hash=hash_lengths(lengths), patches=patches, patches_hash="media")
    order = draw(order_configs())
    order = OrderConfig(
        seed=order.seed, shuffle=order.shuffle, num_canonical_nodes=order.num_canonical_nodes,
        shuffle_block_size=order.shuffle_block_size, reshuffle=draw(st.booleans()),
    )  # fmt: skip
    return {"lengths": index, "samples_per_shard": sizes, "order": order, "packing": packing}


def long_plan(**settings: Any) -> PackPlan:
    """A plan whose epochs are packed one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_epochs, "MAX_SAMPLES", 0)
        plan = PackPlan(**settings, kept_segments=1 << 20)  # which a mixture does not change
        assert plan.short is None
        return plan


def content(packs: PackRange) -> list[list[int] | None]:
    return [None if values is None else values.tolist() for values in astuple(packs)]


@examples(60, many=3000)
@given(settings=plan_settings(), epoch=st.sampled_from([0, 1, 3, 700, 40_000, (1 << 32) - 1, 1 << 40]))
def test_short_epochs_have_the_packs_counts_nodes_and_blocks_of_long_ones(settings: dict[str, Any], epoch: int) -> None:
    short, long = PackPlan(**settings), long_plan(**settings)
    assert short.short is not None
    for each in (epoch, epoch + 1):
        num_packs = long.num_packs(each)
        assert short.num_packs(each) == num_packs
        assert short.num_tokens(each) == long.num_tokens(each)
        assert content(short.packs(each, 0, num_packs)) == content(long.packs(each, 0, num_packs))
        numbers = np.arange(num_packs)[1::2]
        assert content(short.take(each, numbers)) == content(long.take(each, numbers))
        assert short.canonical_nodes(each, numbers).tolist() == long.canonical_nodes(each, numbers).tolist()
        blocks = long.blocks(each, numbers)
        assert short.blocks(each, numbers) == blocks
        for _, _, node, block in blocks:
            assert short.shards_of_block(each, node, block).tolist() == long.shards_of_block(each, node, block).tolist()
    counts = [long.num_packs(epoch + number) for number in range(5)]
    assert short.num_packs_of_epochs(epoch, epoch + 5) == sum(counts)
    both = np.repeat([epoch, epoch + 1], counts[:2])
    numbers = np.concatenate([np.arange(count) for count in counts[:2]])
    taken = content(short.take(both, numbers))
    halves = [short.packs(epoch + at, 0, counts[at]) for at in (0, 1)]
    assert taken[0] == [*halves[0].sample_ids.tolist(), *halves[1].sample_ids.tolist()]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Settings of the plans of sources, and of their mixture."""
    sources = {name: draw(plan_settings()) for name in "abc"[: draw(st.integers(1, 3))]}
    shares = st.fixed_dictionaries({name: st.sampled_from([0.2, 1, 7]) for name in sources})
    weights: Any = draw(st.none() | shares)
    if weights is not None and draw(st.booleans()):
        weights = {0: weights, draw(st.integers(1, 20)): draw(shares)}
    max_epochs = {} if weights is None else draw(st.dictionaries(st.sampled_from([*sources]), st.integers(1, 9)))
    return sources, {"weights": weights, "max_epochs": max_epochs}


def has_packs(settings: Mapping[str, Any]) -> bool:
    return long_plan(**settings).num_packs(0) > 0


@examples(24, many=1500)
@given(case=mixtures(), global_batch=st.sampled_from([1, 3, 40]), data=st.data())
def test_mixtures_of_short_epochs_take_the_steps_of_long_ones(
    case: tuple[dict[str, dict[str, Any]], dict[str, Any]], global_batch: int, data: st.DataObject
) -> None:
    sources = {name: settings for name, settings in case[0].items() if has_packs(settings)}
    if len(sources) < len(case[0]):
        return
    short = Mixture({name: PackPlan(**settings) for name, settings in sources.items()}, **case[1])
    long = Mixture({name: long_plan(**settings) for name, settings in sources.items()}, **case[1])
    cursor = short.start()
    for _ in range(9):
        steps = [mixture.step(cursor, global_batch=global_batch) for mixture in (short, long)]
        assert steps[0] == steps[1]
        packs = [mixture.packs(steps[0].ranges) for mixture in (short, long)]
        assert content(packs[0]) == content(packs[1])
        assert short.packs_left(cursor) == long.packs_left(cursor)
        cursor = Cursor.from_dict(steps[0].after.to_dict())
    for num_steps in (1, 19, 60):
        skipped = [mixture.skip(cursor, num_steps, global_batch=global_batch) for mixture in (short, long)]
        assert skipped[0] == skipped[1]
    name = data.draw(st.sampled_from([*sources]))
    epoch = cursor.sources[name].epoch + data.draw(st.integers(0, 3))
    pack = SourceRange(name, epoch, 0, 1)
    assert short.step_of(cursor, pack, global_batch=global_batch, num_steps=50) == long.step_of(
        cursor, pack, global_batch=global_batch, num_steps=50
    )


@pytest.mark.parametrize("weights", [None, {"x": 1.0}])
@pytest.mark.parametrize("lengths", [[300, 500, 700], [300, 200, 150], [300, 300, 300]])
def test_a_million_steps_of_three_samples_are_skipped_at_once(
    lengths: list[int], weights: dict[str, float] | None
) -> None:
    """Their epochs are not packed one by one: one epoch shows the pack counts of all."""
    order, packing = OrderConfig(seed=1), PackingConfig(packing_length=400, overlong="truncate")
    plan = PackPlan(np.array(lengths), [3], order=order, packing=packing)
    mixture = Mixture({"x": plan}, weights=weights)
    cursor = mixture.skip(mixture.start(), 10**6, global_batch=1)
    assert cursor.sources["x"].epoch == 10**6 // plan.num_packs(0)
    assert plan.short is not None
    assert plan.short.num_runs == 0


def test_a_plan_of_few_samples_keeps_a_limited_number_of_epochs() -> None:
    plan = PackPlan(
        np.array([3, 9, 4, 6, 5, 7, 2]),
        [7],
        order=OrderConfig(shuffle_block_size=3),
        packing=PackingConfig(packing_length=10),
    )
    mixture = Mixture({"x": plan}, weights={"x": 1.0})
    mixture.skip(mixture.start(), 10**6, global_batch=1)
    assert plan.short is not None
    assert plan.short.num_runs <= short_epochs.MAX_RUNS


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of epochs in each run of short epochs that a test packs."""
    counts: list[int] = []

    def noted(facts: SourceFacts, rules: Rules, first: int, count: int) -> EpochPacks:
        counts.append(count)
        packs: EpochPacks = pack_epochs(facts, rules, first, count)
        return packs

    monkeypatch.setattr(short_epochs, "pack_epochs", noted)
    return counts


def plans_of_three_samples(num_plans: int, *, canonical_nodes: int = 1) -> dict[str, PackPlan]:
    packing = PackingConfig(packing_length=4096)
    orders = [OrderConfig(seed=seed, num_canonical_nodes=canonical_nodes) for seed in range(num_plans)]
    return {f"{order.seed}": PackPlan(np.array([3000, 2500, 9]), [3], order=order, packing=packing) for order in orders}


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Check that arrays take at most so many more bytes at any moment; compiled code is loaded before."""
    warm_up = Mixture(
        {"x": PackPlan(np.full(9, 300), [9], order=OrderConfig(), packing=PackingConfig(packing_length=512))}
    )
    warm_up.skip(warm_up.step(warm_up.start(), global_batch=1).after, 9, global_batch=1)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= num_bytes
    finally:
        tracemalloc.stop()


def test_many_sources_of_few_samples_take_little_memory(packed: list[int]) -> None:
    """Equal pack counts are one number a source, and the shards of a block are found without packs."""
    plans = plans_of_three_samples(100)
    with limited_memory(8 << 20):
        mixture = Mixture(plans, weights=dict.fromkeys(plans, 1.0))
        assert all(plan.shards_of_block(0, 0, 0).tolist() == [0] for plan in plans.values())
    assert set(packed) == {1}
    assert len(packed) <= len(plans) + 1
    with limited_memory(20 << 20):
        mixture.skip(mixture.start(), 10**5, global_batch=1)
    even = Mixture(plans)
    with limited_memory(8 << 20):
        even.skip(even.start(), 10**5, global_batch=1)


@pytest.mark.parametrize(("canonical_nodes", "num_shards"), [(1024, 1), (1, 4000)])
def test_a_run_of_short_epochs_is_limited_in_nodes_and_shards(
    canonical_nodes: int, num_shards: int, packed: list[int]
) -> None:
    """Each epoch looks at all canonical nodes and shards, however few samples there are."""
    sizes = [3] + [0] * (num_shards - 1)
    order = OrderConfig(num_canonical_nodes=canonical_nodes)
    plan = PackPlan(np.array([300, 300, 300]), sizes, order=order, packing=PackingConfig(packing_length=512))
    assert plan.packs(0, 0, 1).sample_ids.size == 1
    assert max(packed) * max(canonical_nodes, num_shards) <= short_epochs.RUN_SEGMENTS


def test_packs_of_many_epochs_are_counted_once_in_little_memory(packed: list[int]) -> None:
    lengths = np.array([3, 9, 4, 6, 5, 7, 2])
    order, packing = OrderConfig(shuffle_block_size=3), PackingConfig(packing_length=10)
    plan = PackPlan(lengths, [7], order=order, packing=packing, kept_segments=1 << 12)
    with limited_memory(350_000):
        num_packs = plan.num_packs_of_epochs(0, 50_000)
    num_runs = len(packed)
    assert num_runs > short_epochs.MAX_RUNS
    assert plan.num_packs_of_epochs(0, 50_000) == num_packs
    assert len(packed) <= num_runs + 1
    parts = [plan.num_packs_of_epochs(first, first + 2500) for first in range(0, 50_000, 2500)]
    assert sum(parts) == num_packs


@pytest.mark.parametrize("reshuffle", [True, False])
def test_epochs_from_two_to_the_32_on_have_the_packs_of_long_ones(reshuffle: bool) -> None:
    """Their numbers are two words of a random stream's key."""
    settings: dict[str, Any] = {
        "lengths": np.random.default_rng(0).integers(1, 60, 40),
        "samples_per_shard": [10, 0, 25, 5],
        "order": OrderConfig(seed=3, num_canonical_nodes=2, shuffle_block_size=9, reshuffle=reshuffle),
        "packing": PackingConfig(packing_length=64),
    }
    short, long = PackPlan(**settings), long_plan(**settings)
    for epoch in ((1 << 32) - 1, 1 << 32, (1 << 40) + 7):
        num_packs = long.num_packs(epoch)
        assert content(short.packs(epoch, 0, num_packs)) == content(long.packs(epoch, 0, num_packs))


def test_a_cursor_with_an_epoch_that_is_no_int64_is_damaged() -> None:
    saved = Cursor(sources={"x": SourceCursor("plan", epoch=1 << 63)}).to_dict()
    with pytest.raises(CursorError, match=r"damaged .*9223372036854775808 is out of range.*use another checkpoint"):
        Cursor.from_dict(saved)
