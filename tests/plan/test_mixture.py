from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.plan.block_packs import MIXED_SEGMENTS
from lmms_stream.plan.cursor import Cursor, SourceCursor
from lmms_stream.plan.lengths import Lengths
from lmms_stream.plan.mixture import Mixture, Step
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan, own_seeds
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.source_ranges import SourceRange
from lmms_stream.plan.windows import WindowedMixture
from numpy.typing import NDArray

from ..rounds import rounds
from ..strategies import chat_lengths, examples

Reads = list[tuple[str, int, int]]  # (source, epoch, pack)


def make_plan(num_samples: int, *, seed: int = 0, canonical_nodes: int = 1) -> PackPlan:
    return PackPlan(
        chat_lengths(num_samples, limit=512, seed=seed),
        [num_samples],
        order=OrderConfig(seed=seed, num_canonical_nodes=canonical_nodes, shuffle_block_size=64),
        packing=PackingConfig(packing_length=512),
    )


PLANS = {"a": make_plan(40), "b": make_plan(150, seed=1, canonical_nodes=2), "c": make_plan(90, seed=2)}
FOURTH = make_plan(90, seed=3)


def reads(step: Step) -> Reads:
    return [(part.source, part.epoch, pack) for part in step.ranges for pack in range(part.first, part.stop)]


def run(mixture: Mixture, cursor: Cursor, num_steps: int, *, global_batch: int) -> tuple[list[Reads], Cursor]:
    steps = []
    for _ in range(num_steps):
        step = mixture.step(cursor, global_batch=global_batch)
        steps.append(reads(step))
        cursor = step.after
    return steps, cursor


def run_to_end(mixture: Mixture, cursor: Cursor, *, global_batch: int) -> tuple[list[Reads], Cursor]:
    steps = []
    for _ in range(10_000):
        step = mixture.step(cursor, global_batch=global_batch)
        steps.append(reads(step))
        cursor = step.after
        if step.ends_epoch:
            return steps, cursor
    raise AssertionError("the end never comes")


def assert_nothing_lost_or_repeated(steps: list[Reads]) -> None:
    """Each source's packs come in order, epoch after epoch, without a gap."""
    expected = dict.fromkeys(PLANS, (0, 0))
    for source, epoch, pack in (read for step in steps for read in step):
        at = expected[source]
        if at[1] == PLANS[source].num_packs(at[0]):
            at = (at[0] + 1, 0)
        assert (epoch, pack) == at
        expected[source] = (epoch, pack + 1)


PACK = 512  # tokens of a full pack


@cache
def tokens_of(source: str, epoch: int, pack: int) -> int:
    return int(PLANS.get(source, FOURTH).packs(epoch, pack, pack + 1).lengths.sum())


@examples(40)
@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 10), min_size=1),
    global_batch=st.integers(1, 24),
)
def test_weights_hold_to_within_one_pack_after_every_step(weights: dict[str, float], global_batch: int) -> None:
    mixture = Mixture(PLANS, weights=weights)
    steps, _ = run(mixture, mixture.start(), 12, global_batch=global_batch)
    assert_nothing_lost_or_repeated(steps)
    total = sum(map(Fraction, weights.values()))
    had: Counter[str] = Counter()
    for step in steps:
        assert len(step) == global_batch
        for read in step:
            had[read[0]] += tokens_of(*read)
        for name, weight in weights.items():
            assert abs(had[name] - had.total() * Fraction(weight) / total) <= PACK
        assert set(had) <= set(weights)


def assert_weights_hold(
    plans: dict[str, PackPlan], schedule: Mapping[int, Mapping[str, float]], *, global_batch: int, num_steps: int
) -> list[Reads]:
    """Over the whole run, within one pack after every step; the steps."""
    mixture = Mixture(plans, weights=schedule)
    steps, _ = run(mixture, mixture.start(), num_steps, global_batch=global_batch)
    had: Counter[str] = Counter()
    due: dict[str, Fraction] = dict.fromkeys(plans, Fraction(0))
    for number, step in enumerate(steps):
        weights = schedule[max(first for first in schedule if first <= number)]
        tokens = [tokens_of(*read) for read in step]
        for (source, _, _), num_tokens in zip(step, tokens, strict=True):
            had[source] += num_tokens
        for name, weight in weights.items():
            due[name] += sum(tokens) * Fraction(weight) / sum(map(Fraction, weights.values()))
        assert all(abs(had[name] - due[name]) <= PACK for name in due)
    return steps


@examples(30)
@given(
    schedule=st.dictionaries(
        st.integers(1, 9), st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1), max_size=3
    ),
    global_batch=st.integers(1, 16),
)
def test_a_schedule_neither_loses_nor_repeats_and_holds_the_weights_over_the_whole_run(
    schedule: dict[int, dict[str, int]], global_batch: int
) -> None:
    full = {0: {"a": 1, "b": 1, "c": 1}} | schedule
    assert_nothing_lost_or_repeated(assert_weights_hold(PLANS, full, global_batch=global_batch, num_steps=12))


def drawn_mixture(random: Random) -> tuple[dict[str, PackPlan], dict[int, dict[str, float]]]:
    """Sources of full, nearly empty or very different packs, of any packing_length; weights of up to 6 phases."""
    plans = {}
    for name in "abcdefghi"[: random.randint(2, 9)]:
        size, length = random.choice([1, 2, 5, 40, 300]), random.choice([64, 256, 1024])
        longest = max(2, random.choice([3, length // 8, length // 2, length]))
        lengths = np.random.default_rng(random.randrange(1 << 32)).integers(1, longest + 1, size)
        packing = PackingConfig(packing_length=length, max_samples_per_pack=random.choice([None, None, 1, 2]))
        plans[name] = PackPlan(lengths, [size], order=OrderConfig(), packing=packing)
    schedule = {
        first: {name: random.choice([1, 1, 2, 5, 0.1, 30, 0]) for name in plans if random.random() < 0.9} | {"a": 1.0}
        for first in {0, *(random.randint(1, 40) for _ in range(random.choice([0, 0, 5])))}
    }
    return plans, schedule


@pytest.mark.parametrize("seed", range(rounds(4, 200)))
def test_random_mixtures_have_their_shares_of_a_plain_count_of_tokens_to_within_a_pack(seed: int) -> None:
    random = Random(seed)
    plans, schedule = drawn_mixture(random)
    mixture = Mixture(plans, weights=schedule)
    cursor, global_batch = mixture.start(), random.randint(1, 8)
    had, due = dict.fromkeys(plans, 0), dict.fromkeys(plans, Fraction(0))
    for number in range(60):
        step = mixture.step(cursor, global_batch=global_batch)
        cursor = step.after
        weights = schedule[max(first for first in schedule if first <= number)]
        total = sum(map(Fraction, weights.values()))
        for part in step.ranges:
            tokens = int(plans[part.source].packs(part.epoch, part.first, part.stop).lengths.sum())
            had[part.source] += tokens
            for name, weight in weights.items():
                due[name] += tokens * Fraction(weight) / total
        assert max(abs(had[name] - due[name]) for name in plans) <= max(plan.longest_pack for plan in plans.values())


def orders(mixture: Mixture, cursor: Cursor) -> dict[str, list[int]]:
    """Return the samples of the first pack of each source in the next steps."""
    found: dict[str, list[int]] = {}
    for _ in range(4):
        step = mixture.step(cursor, global_batch=2)
        for part in step.ranges:
            packs = mixture.packs([part._replace(stop=part.first + 1)])
            found.setdefault(part.source, packs.sample_ids.tolist())
        cursor = step.after
    return found


def test_a_source_keeps_the_stream_of_the_seed_that_it_began_with() -> None:
    def plans(names: str) -> dict[str, PackPlan]:
        return {name: make_plan(90) for name in names}

    new = Mixture(own_seeds(plans("ab")))
    cursor = new.start()
    assert len({plan.fingerprint for plan in [make_plan(90), *new.plans.values()]}) == 3
    of_new = orders(new, cursor)
    assert of_new["a"] != of_new["b"]
    common = Mixture(plans("ab"))
    old = replace(common.start(), shares="")
    resumed = Mixture(own_seeds(plans("ab")))
    assert orders(resumed, resumed.adopt(old)) == orders(common, old)
    joined = Mixture(own_seeds(plans("abc")))
    at = joined.adopt(old).sources
    assert [at[name].plan for name in "ab"] == [old.sources[name].plan for name in "ab"]
    assert at["c"].plan not in {at["a"].plan, new.plans["a"].fingerprint}
    alone = Mixture(own_seeds(plans("b")))
    assert alone.start().sources["b"].plan == make_plan(90).fingerprint
    assert alone.adopt(cursor).sources["b"] == cursor.sources["b"]


def test_a_renamed_source_is_named_although_its_seed_is_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"a": 90, "b": 150}
    few = Mixture(own_seeds({"b": make_plan(150)}))
    both = Mixture(own_seeds({name: make_plan(size) for name, size in sizes.items()}))
    for before, named, others in ((both, "c", {"a": 90}), (few, "c", {"a": 90}), (both, "c", {}), (few, "c", {})):
        cursor = before.skip(before.start(), 3, global_batch=4)
        now = {**others, named: 150}
        caplog.clear()
        renamed = Mixture(own_seeds({name: make_plan(size) for name, size in now.items()})).adopt(cursor)
        assert renamed.sources["c"].packs == 0
        (said,) = caplog.messages
        assert said == (
            "source 'c' begins at its first pack, and the state's source 'b' has the same samples: name it 'b' to "
            "continue there"
        )
        kept = Mixture(own_seeds({name: make_plan(size) for name, size in (others | {"b": 150}).items()})).adopt(cursor)
        assert kept.sources["b"] == cursor.sources["b"]


UNEVEN = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1, 2, 7, 100, 204, 662, 855]), min_size=1)


@examples(60)
@given(first=UNEVEN, schedule=st.dictionaries(st.integers(1, 9), UNEVEN, max_size=3), global_batch=st.integers(1, 4))
@example(
    first={"a": 855, "c": 7, "d": 204},
    schedule={2: {"a": 3, "b": 662, "c": 100, "d": 2}, 5: {"a": 1, "b": 2, "c": 1, "d": 100}},
    global_batch=2,
)
def test_very_uneven_weights_that_change_hold_to_within_one_pack(
    first: dict[str, int], schedule: dict[int, dict[str, int]], global_batch: int
) -> None:
    assert_weights_hold(PLANS | {"d": FOURTH}, {0: first} | schedule, global_batch=global_batch, num_steps=12)


def test_small_shares_that_change_at_every_step_add_up() -> None:
    weights = {step: {"a": 0.90, "b": 0.10} if step % 2 else {"a": 0.91, "b": 0.09} for step in range(200)}
    assert_nothing_lost_or_repeated(assert_weights_hold(PLANS, weights, global_batch=4, num_steps=200))


def test_a_phase_whose_sources_have_ended_passes_on_and_nothing_is_left_unread() -> None:
    total = {name: plan.num_packs(0) for name, plan in PLANS.items()}
    for weights in (
        {0: {"a": 1}, 1000: {"b": 1}},  # the first phase ends before its steps do
        {0: {"b": 1}, 2: {"a": 1}},  # the last phase ends, and the first has packs left
        {0: {"a": 1}, 3: {"c": 1}, 5: {"b": 1, "a": 3}},
    ):
        named = {name for shares in weights.values() for name in shares}
        mixture = Mixture(PLANS, weights=weights, max_epochs=dict.fromkeys(named, 1))
        cursor = mixture.start()
        left = mixture.packs_left(cursor)
        steps, cursor = run_to_end(mixture, cursor, global_batch=8)
        assert_nothing_lost_or_repeated(steps)
        had = Counter(source for step in steps for source, _, _ in step)
        assert had == {name: total[name] for name in named}
        assert left == sum(had.values())
        assert (mixture.packs_left(cursor), mixture.step(cursor, global_batch=8).num_packs) == (0, 0)
        assert all(len(step) == 8 for step in steps[:-1])


def test_what_a_source_that_ends_lacked_falls_to_the_others() -> None:
    mixture = Mixture(PLANS, weights={"a": 1, "b": 3, "c": 1}, max_epochs={"a": 1})
    steps, cursor = run(mixture, mixture.start(), 40, global_batch=5)
    assert_nothing_lost_or_repeated(steps)
    assert sum(cursor.sources[name].credit for name in "bc") == 0
    after = Counter(source for step in steps[30:] for source, _, _ in step)
    assert "a" not in after
    assert abs(after["b"] - 37.5) < 2


@pytest.mark.parametrize("global_batch", [1, 5, 16, 1000])
def test_without_weights_an_epoch_holds_each_source_once_evenly_interleaved(global_batch: int) -> None:
    mixture = Mixture(PLANS)
    cursor = mixture.start()
    for epoch in (0, 1):
        sizes = {name: plan.num_packs(epoch) for name, plan in PLANS.items()}
        total = sum(sizes.values())
        assert mixture.packs_left(cursor) == total
        steps, cursor = run_to_end(mixture, cursor, global_batch=global_batch)
        had = Counter[str]()
        for step in steps:
            had.update(source for source, _, _ in step)
            for name, size in sizes.items():
                assert abs(had[name] - Fraction(size * sum(had.values()), total)) < 1
        assert had == sizes
        assert len(steps) == -(-total // global_batch)
        assert sorted(read for reads_ in steps for read in reads_) == [
            (name, epoch, pack) for name, size in sizes.items() for pack in range(size)
        ]
    assert all(at == SourceCursor(plan=PLANS[name].fingerprint, epoch=2) for name, at in cursor.sources.items())


@examples(30)
@given(
    weights=st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1),
    stops=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_a_cursor_through_json_goes_on_as_if_nothing_had_happened(
    weights: dict[str, float] | None, stops: list[int]
) -> None:
    expected, _ = run(Mixture(PLANS, weights=weights), Mixture(PLANS, weights=weights).start(), 13, global_batch=7)
    found: list[Reads] = []
    cursor = Mixture(PLANS, weights=weights).start()
    for stop in [*stops, 13 - sum(stops)]:
        mixture = Mixture(PLANS, weights=weights)
        cursor = mixture.adopt(Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))))
        steps, cursor = run(mixture, cursor, stop, global_batch=7)
        found += steps
    assert found == expected


def test_without_weights_a_run_resumed_at_an_epoch_shares_its_steps_as_the_run_before() -> None:
    """Shares are the packs of the sources' epochs, and epochs have different numbers of packs."""
    plans = {}
    for seed, name, num_samples in ((2, "a", 95), (3, "b", 93)):
        lengths = np.random.default_rng(12 + seed).integers(20, 60, num_samples)
        order = OrderConfig(seed=seed, num_canonical_nodes=1, shuffle_block_size=8)
        packing = PackingConfig(packing_length=100, window=8)
        plans[name] = PackPlan(Lengths(lengths=lengths, content_hash=name), [num_samples], order=order, packing=packing)
    assert len({plans["a"].num_packs(epoch) for epoch in range(5)}) == 3
    mixture = Mixture(plans)
    cursor = mixture.start()
    for _ in range(5):
        resumed, _ = run_to_end(Mixture(plans), cursor, global_batch=3)
        steps, cursor = run_to_end(mixture, cursor, global_batch=3)
        assert steps == resumed


def test_a_source_that_is_added_or_left_out_for_a_while_loses_nothing() -> None:
    two = Mixture({name: PLANS[name] for name in "ab"}, weights={"a": 1, "b": 2})
    first, cursor = run(two, two.start(), 4, global_batch=9)
    three = Mixture(PLANS, weights={"a": 1, "b": 1, "c": 1})
    second, cursor = run(three, three.adopt(cursor), 4, global_batch=9)
    had = Counter[str]()
    for read in (read for step in second for read in step):
        had[read[0]] += tokens_of(*read)
    assert all(abs(tokens - had.total() / 3) <= 2 * PACK for tokens in had.values())
    again, cursor = run(two, two.adopt(cursor), 3, global_batch=9)
    last, _ = run(three, three.adopt(cursor), 3, global_batch=9)
    assert_nothing_lost_or_repeated(first + second + again + last)


def test_a_source_under_a_new_name_begins_anew_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    two = Mixture({name: PLANS[name] for name in "ab"}, weights={"a": 1, "b": 2})
    _, cursor = run(two, two.start(), 4, global_batch=9)
    assert two.adopt(cursor) == cursor
    assert not caplog.messages
    renamed = Mixture({"a": PLANS["a"], "other": PLANS["b"]}, weights={"a": 1, "other": 2})
    assert renamed.adopt(cursor).sources["other"].packs == 0
    (said,) = caplog.messages
    assert said.startswith("source 'other' begins at its first pack, and the state's source 'b' has the same samples")


def test_a_source_that_is_added_in_mid_epoch_is_read_once_with_the_rest_of_the_others() -> None:
    two = Mixture({name: PLANS[name] for name in "ab"})
    first, cursor = run(two, two.start(), 2, global_batch=9)
    three = Mixture(PLANS)
    cursor = three.adopt(cursor)
    rest, _ = run_to_end(three, cursor, global_batch=9)
    assert sorted(read for step in first + rest for read in step) == [
        (name, 0, pack) for name, plan in PLANS.items() for pack in range(plan.num_packs(0))
    ]


def test_when_the_only_source_with_packs_left_is_left_out_the_next_epoch_begins() -> None:
    used_up = {"a": SourceCursor(plan=PLANS["a"].fingerprint, packs=PLANS["a"].num_packs(0))}
    alone = Mixture({"a": PLANS["a"]})
    cursor = alone.adopt(Cursor(sources=used_up | {"b": SourceCursor(plan=PLANS["b"].fingerprint, packs=3)}))
    assert cursor.sources["a"] == SourceCursor(plan=PLANS["a"].fingerprint, epoch=1)
    assert cursor.sources["b"].packs == 3
    assert reads(alone.step(cursor, global_batch=2)) == [("a", 1, 0), ("a", 1, 1)]


def test_weights_may_follow_an_epoch_in_which_a_source_was_used_up() -> None:
    mixture = Mixture(PLANS)
    ended = {"a": SourceCursor(plan=PLANS["a"].fingerprint, packs=PLANS["a"].num_packs(0))}
    weighted = Mixture(PLANS, weights={"a": 1, "b": 1})
    step = weighted.step(weighted.adopt(Cursor(sources=ended)), global_batch=4)
    assert reads(step) == [("a", 1, 0), ("a", 1, 1), ("b", 0, 0), ("b", 0, 1)]
    assert mixture.packs_left(mixture.adopt(Cursor(sources=ended))) == sum(PLANS[n].num_packs(0) for n in "bc")


def test_sources_end_after_their_max_epochs_and_the_others_go_on() -> None:
    mixture = Mixture(PLANS, weights={"a": 5, "b": 1}, max_epochs={"a": 2, "b": 1})
    cursor = mixture.start()
    total = PLANS["a"].num_packs(0) + PLANS["a"].num_packs(1) + PLANS["b"].num_packs(0)
    assert mixture.packs_left(cursor) == total
    steps, cursor = run_to_end(mixture, cursor, global_batch=8)
    assert_nothing_lost_or_repeated(steps)
    assert sum(map(len, steps)) == total
    assert [len(step) for step in steps[:-1]] == [8] * (len(steps) - 1)
    assert mixture.packs_left(cursor) == 0
    assert mixture.step(cursor, global_batch=8).ranges == ()
    assert Mixture(PLANS, weights={"a": 1, "b": 1}, max_epochs={"a": 2}).packs_left(mixture.start()) is None


def test_skipped_steps_are_passed_over_exactly() -> None:
    mixture = Mixture(PLANS, weights={"a": 1, "b": 3})
    steps, _ = run(mixture, mixture.start(), 9, global_batch=6)
    skipped = mixture.skip(mixture.start(), 5, global_batch=6)
    assert run(mixture, skipped, 4, global_batch=6)[0] == steps[5:]
    assert skipped.step == 5


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """With weights, a schedule of up to a hundred phases, or without; with sources that end."""
    shares = st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 10), min_size=1)
    kind = draw(st.sampled_from(["none", "weights", "schedule", "long"]))
    ends = draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)))
    balance: str | int = draw(st.sampled_from(["deal", "window", "across_sources"]) | st.sampled_from([2, 7]))
    if kind == "none":
        return WindowedMixture(PLANS, balance=balance)
    if kind == "weights":
        return WindowedMixture(PLANS, weights=draw(shares), max_epochs=ends, balance=balance)
    if kind == "long":
        phases = {step: {"a": 1 + step % 7, "b": 1.0, "c": step % 3} for step in range(100)}
        return WindowedMixture(PLANS, weights=phases, max_epochs=ends, balance=balance)
    later = draw(st.dictionaries(st.integers(1, 30), shares, max_size=4))
    return WindowedMixture(PLANS, weights={0: draw(shares), **later}, max_epochs=ends, balance=balance)


@examples(60)
@given(mixture=mixtures(), begin=st.integers(0, 20), num_steps=st.integers(0, 120), global_batch=st.integers(1, 24))
def test_steps_that_are_skipped_at_once_leave_what_steps_one_by_one_leave(
    mixture: Mixture, begin: int, num_steps: int, global_batch: int
) -> None:
    _, cursor = run(mixture, mixture.start(), begin, global_batch=global_batch)
    _, after = run(mixture, cursor, num_steps, global_batch=global_batch)
    assert mixture.skip(cursor, num_steps, global_batch=global_batch) == after


@examples(60)
@given(
    mixture=mixtures(),
    begin=st.integers(0, 20),
    global_batch=st.integers(1, 24),
    source=st.sampled_from("abc"),
    epoch=st.integers(0, 3),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_step_that_reads_a_pack_is_found_without_the_steps_before(
    mixture: Mixture, begin: int, global_batch: int, source: str, epoch: int, share: float
) -> None:
    pack = int(share * PLANS[source].num_packs(epoch))
    _, start = run(mixture, mixture.start(), begin, global_batch=global_batch)
    cursor, expected = start, None
    for _ in range(80):
        step = mixture.step(cursor, global_batch=global_batch)
        if (source, epoch, pack) in reads(step):
            expected = cursor
        cursor = step.after
    wanted = SourceRange(source=source, epoch=epoch, first=pack, stop=pack + 1)
    assert mixture.step_of(start, wanted, global_batch=global_batch, num_steps=80) == expected


def test_the_packs_of_a_step_are_those_of_the_plans() -> None:
    mixture = Mixture(PLANS, weights={"a": 1, "b": 2, "c": 1})
    step = mixture.step(mixture.start(), global_batch=12)
    packs = mixture.packs(step.ranges)
    assert mixture.num_canonical_nodes == 2
    assert len(packs) == 12
    for at, (source, epoch, pack) in enumerate(reads(step)):
        own = PLANS[source].packs(epoch, pack, pack + 1)
        segments = slice(packs.offsets[at], packs.offsets[at + 1])
        for name in ("sample_ids", "starts", "lengths"):
            assert np.array_equal(getattr(packs, name)[segments], getattr(own, name))
        assert mixture.names[packs.sources[at]] == source
        assert packs.canonical_nodes[at] == own.canonical_nodes[0] * (1 if source == "b" else 2)


def test_one_source_is_its_plan() -> None:
    mixture = Mixture({"b": PLANS["b"]})
    steps, _ = run(mixture, mixture.start(), 3, global_batch=16)
    assert steps == [[("b", 0, pack) for pack in range(16 * n, 16 * n + 16)] for n in range(3)]


def test_a_cursor_that_does_not_fit_is_refused() -> None:
    mixture = Mixture(PLANS)
    foreign = Cursor(sources={"a": SourceCursor(plan=PLANS["b"].fingerprint)})
    with pytest.raises(CursorError, match=r"they differ in the lengths index .* and the shards .* and the order"):
        mixture.adopt(foreign)
    beyond = Cursor(sources={"a": SourceCursor(plan=PLANS["a"].fingerprint, packs=10**6)})
    with pytest.raises(CursorError, match=r"is at pack 1000000 of epoch 0 of 'a', which has .* packs: use another"):
        mixture.adopt(beyond)


def test_a_window_is_finished_when_a_later_packing_length_is_new() -> None:
    """The turns by tokens of a window do not count packs that come after it."""
    weights = {0: {"a": 9, "b": 1, "c": 2}, 3: {"a": 2, "b": 30}, 5: {"b": 1}}
    settings: dict[str, Any] = {"weights": weights, "balance": 6}
    mixture = WindowedMixture(PLANS, **settings)
    cursor = mixture.skip(mixture.start(), 1, global_batch=2)
    assert cursor.window is not None
    longer = PackingConfig(packing_length=512, later_lengths=((20, 2048),))
    resumed = WindowedMixture({name: plan.of_packing(longer) for name, plan in PLANS.items()}, **settings)
    state = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert run(resumed, resumed.adopt(state), 4, global_batch=2)[0] == run(mixture, cursor, 4, global_batch=2)[0]


@pytest.mark.parametrize("weights", [None, {"a": 1, "b": 2}])
def test_each_number_of_a_state_is_refused_out_of_its_range(weights: dict[str, float] | None) -> None:
    packing = PackingConfig(packing_length=1024, later_lengths=((2, 512),))
    plans = {name: plan.of_packing(packing) for name, plan in PLANS.items() if name != "c"}
    mixture = WindowedMixture(plans, weights=weights, balance=4)
    cursor = mixture.skip(mixture.start(), 3, global_batch=3)
    at = cursor.sources["b"]
    assert cursor.window is not None
    (change,) = at.changes
    longer = 1024 << 36 if weights else 1 << 40
    damaged = {
        "is at pack 1000000 of epoch 0 of 'b', which has": at._replace(packs=10**6),
        "is at pack 1000000 of epoch 0 of 'b', which has .*": at._replace(
            packs=10**6, changes=(change._replace(packs=10**6),)
        ),
        "changes packing_length of 'b' after its position, pack": at._replace(changes=(change._replace(epoch=1),)),
        "has credit -[0-9]+ of 'b', more than any turns give": at._replace(credit=-3 * longer - 1),
    }
    for message, value in damaged.items():
        outside = replace(cursor, window=None, sources={**cursor.sources, "b": value})
        inside = cursor.window._replace(sources={**cursor.window.sources, "b": value})
        for each in (outside, replace(cursor, window=inside)) if "credit" not in message else (outside,):
            with pytest.raises(CursorError, match=message):
                mixture.adopt(each)
    with pytest.raises(CursorError, match="is at step 3, and no pack of a source is read: it is damaged"):
        mixture.adopt(Cursor(step=3, sources={}))
    with pytest.raises(CursorError, match="is at step 3, and no pack of other is read: it is damaged"):
        mixture.adopt(Cursor(step=3, sources={"other": SourceCursor(plan="p")}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"d": 1}}, "weights name 'd', the sources are a, b, c"),
        ({"weights": {"a": -1}}, "the weight of 'a' must be a number that is 0 or more, got -1"),
        ({"weights": {"a": float("nan")}}, "the weight of 'a' must be a number that is 0 or more, got nan"),
        ({"weights": {"a": 0}}, "the weights from step 0 on are all 0"),
        ({"weights": {}}, "the weights from step 0 on are all 0"),
        ({"weights": {5: {"a": 1}}}, "a schedule of weights must begin at step 0, got step 5"),
        ({"weights": {0: {"a": 1}, "b": 1}}, "weights must map sources to shares, or first steps to such maps"),
        ({"max_epochs": {"a": 1}}, "max_epochs needs weights"),
        ({"weights": {"a": 1}, "max_epochs": {"d": 1}}, "max_epochs names 'd', the sources are a, b, c"),
        ({"weights": {"a": 1}, "max_epochs": {"a": 0}}, "max_epochs of 'a' must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(PLANS, **settings)


def test_no_sources_and_sources_without_packs_are_refused() -> None:
    with pytest.raises(ConfigError, match="a mixture needs at least one source"):
        Mixture({})
    dropped = PackPlan(
        np.array([9, 9]), [2], order=OrderConfig(), packing=PackingConfig(packing_length=4, overlong="drop")
    )
    with pytest.raises(ConfigError, match="source 'x' has no packs: all its samples are dropped"):
        Mixture({"x": dropped}).start()


def test_plans_that_are_mixed_share_the_memory_of_kept_packs() -> None:
    lengths = chat_lengths(300_000, limit=512, seed=0)
    order, packing = OrderConfig(shuffle_block_size=1 << 17), PackingConfig(packing_length=512)
    plan = PackPlan(lengths, [len(lengths)], order=order, packing=packing)
    for num_plans in (1, 4, 100):
        mixture = Mixture({f"source {number}": plan for number in range(num_plans)})
        assert sum(each.kept_segments for each in mixture.plans.values()) <= MIXED_SEGMENTS
    told = plan.keeping(1 << 22)
    assert Mixture({"a": told, **{f"source {number}": plan for number in range(40)}}).plans["a"] is told
    packs = Mixture({"a": plan}).packs([SourceRange("a", 0, 100, 300)])
    shared = mixture.packs([SourceRange("source 7", 0, 100, 300)])
    assert np.array_equal(packs.sample_ids, shared.sample_ids)


def test_the_packs_of_each_epoch_are_counted_once() -> None:
    """`len` asks for the packs of all epochs again and again, and a cache of counts may keep few of them."""

    class Forgetful(dict[str, Any]):
        num_counted = 0

        def __setitem__(self, key: str, counts: Any) -> None:
            self.num_counted += 1

    counts = Forgetful()
    plan = PackPlan(
        chat_lengths(9000, limit=512, seed=0),
        [9000],
        order=OrderConfig(),
        packing=PackingConfig(packing_length=512),
        counts_cache=counts,
    )
    mixture = Mixture({"a": plan}, weights={"a": 1}, max_epochs={"a": 40})
    left = [mixture.packs_left(mixture.start()) for _ in range(3)]
    assert left == 3 * [sum(plan.num_packs(epoch) for epoch in range(40))]
    assert counts.num_counted == 40


@pytest.mark.usefixtures("long_epochs")
def test_packs_of_which_none_are_chosen_count_and_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that reads nothing of a source in one stretch counts no other epoch, and packs no block a second time."""
    epochs: list[int] = []
    block = EpochOrder.block

    def noted(order: EpochOrder, node: int, number: int) -> NDArray[np.int64]:
        epochs.append(order.epoch)
        return block(order, node, number)

    mixture = Mixture({"a": make_plan(40), "b": make_plan(150, seed=1)}, weights={"a": 1, "b": 1})
    ranges = [SourceRange("a", 5, 0, 2), SourceRange("b", 5, 0, 2)]
    packs = mixture.packs(ranges)
    monkeypatch.setattr(EpochOrder, "block", noted)
    only_b = mixture.packs(ranges, np.array([2, 3]))
    assert mixture.packs(ranges).sample_ids.tolist() == packs.sample_ids.tolist()
    assert only_b.sources.tolist() == [1, 1]
    assert len(mixture.packs(ranges, np.empty(0, np.int64))) == 0
    assert epochs == []
