from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import CursorError, PackingError
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.ledger import StepLookup, Stretch
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.types import World

from ..rounds import rounds
from ..strategies import chat_lengths, examples

Read = tuple[int, str, int, int, int, int]  # step, source, sample id, first token, group, micro-batch


def make_plan(num_samples: int, *, seed: int, canonical_nodes: int = 1) -> PackPlan:
    return PackPlan(
        chat_lengths(num_samples, limit=600, seed=seed),
        [num_samples // 2, num_samples - num_samples // 2],
        order=OrderConfig(seed=seed, num_canonical_nodes=canonical_nodes, shuffle_block_size=16),
        packing=PackingConfig(packing_length=512, overlong="split" if seed else "drop"),
    )


PLANS = {"a": make_plan(30, seed=0), "b": make_plan(80, seed=1, canonical_nodes=2)}


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Stretch], int]:
    """A run of up to four stretches, each with weights, sources and ranks of its own, and the step it ends before."""
    stretches: list[Stretch] = []
    cursor = None
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.sampled_from([["a"], ["b"], ["a", "b"]]))
        shares = st.fixed_dictionaries({name: st.integers(1, 5) for name in names})
        later = st.fixed_dictionaries({name: st.integers(0, 2) for name in names}).filter(
            lambda each: any(each.values())
        )
        weights = draw(st.none() | shares | st.fixed_dictionaries({0: shares, draw(st.integers(1, 20)): later}))
        balance: str | int = draw(st.sampled_from(["deal", "window", "across_sources"]) | st.just(4))
        mixture = WindowedMixture({name: PLANS[name] for name in names}, weights=weights, balance=balance)
        nodes, replication = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2)), draw(st.integers(1, 2))
        ranks_per_node = [ranks * replication for ranks in nodes]
        world = World(world_size=sum(ranks_per_node), ranks_per_node=ranks_per_node, replication=replication)
        first = 0 if cursor is None else cursor.step
        begun = mixture.start() if cursor is None else mixture.adopt(cursor)
        skipped = draw(st.sampled_from([[], [(first + 1, first + 3)]]))
        batch = world.num_groups * draw(st.integers(1, 3))
        stretches.append(Stretch(mixture=mixture, cursor=begun, global_batch=batch, world=world, skipped=skipped))
        cursor = mixture.skip(begun, draw(st.integers(0, 9)), global_batch=batch)
        while cursor.window is not None:  # its end, where the mixture may change
            cursor = mixture.skip(cursor, 1, global_batch=batch)
    assert cursor is not None
    return stretches, cursor.step


def reads_of(stretch: Stretch, stop: int) -> set[Read]:
    """What the readers of all groups are given in a stretch, as a run gives it to them."""
    found: set[Read] = set()
    for group in range(stretch.world.num_groups):
        world = replace(stretch.world, rank=group * stretch.world.replication)
        cursor, num_steps = stretch.cursor, stop - stretch.cursor.step
        while num_steps:
            planner = StepPlanner(stretch.mixture, StepConfig(global_batch=stretch.global_batch, world=world))
            last = cursor
            for planned in planner.plan(cursor):
                work = planned.work
                if work.step >= num_steps:
                    break
                for micro_batch, (begin, end) in zip(work.micro_batches, pairwise(work.bounds.tolist()), strict=False):
                    segments = zip(work.segments.sample_ids[begin:end], work.segments.starts[begin:end], strict=True)
                    step = cursor.step + work.step
                    found |= {(step, work.source, int(id), int(at), group, micro_batch) for id, at in segments}
                last = planned.after if isinstance(planned.after, Cursor) else last
            num_steps -= last.step - cursor.step
            cursor = last
    return found


def in_order(run: tuple[list[Stretch], int]) -> set[Read]:
    stretches, stop = run
    ends = [*(after.cursor.step for after in stretches[1:]), stop]
    return set().union(*(reads_of(stretch, end) for stretch, end in zip(stretches, ends, strict=True)))


@examples(40)
@given(run=runs())
def test_the_packs_of_a_step_are_those_that_its_ranks_read(run: tuple[list[Stretch], int]) -> None:
    stretches, stop = run
    ledger = StepLookup(stretches)
    found = {
        (number, pack.source, sample_id, start, pack.group, pack.micro_batch)
        for number in range(stop)
        for pack in ledger.step(number).packs
        for sample_id, start in zip(pack.sample_ids.tolist(), pack.starts.tolist(), strict=True)
    }
    assert found == in_order(run)
    for number in range(stop):
        stretch = [each for each in stretches if each.cursor.step <= number][-1]
        skipped = any(first <= number < end for first, end in stretch.skipped)
        assert ledger.step(number).is_skipped == skipped


@examples(40)
@given(run=runs(), name=st.sampled_from("ab"), share=st.floats(0, 1, exclude_max=True))
def test_a_sample_is_found_in_each_step_that_reads_something_of_it(
    run: tuple[list[Stretch], int], name: str, share: float
) -> None:
    stretches, stop = run
    sample_id = int(share * PLANS[name].num_samples)
    expected = {
        (step, start // 512, group, micro_batch)
        for step, source, found, start, group, micro_batch in in_order(run)
        if (source, found) == (name, sample_id)
    }
    if not any(name in stretch.mixture.plans for stretch in stretches):
        with pytest.raises(PackingError, match=f"the run has no source '{name}': choose one of"):
            StepLookup(stretches).sample(name, sample_id, stop=stop)
        return
    entries = StepLookup(stretches).sample(name, sample_id, stop=stop)
    assert {(e.step, e.piece, e.group, e.micro_batch) for e in entries if e.step is not None} == expected
    pieces = {(entry.epoch, entry.piece) for entry in entries}
    assert len(pieces) == len(entries)


def test_a_piece_that_no_step_has_read_yet_says_so() -> None:
    mixture = Mixture({"b": PLANS["b"]})
    ledger = StepLookup([Stretch(mixture=mixture, cursor=mixture.start(), global_batch=2)])
    number = PLANS["b"].num_packs(0) - 1
    last = PLANS["b"].packs(0, number, number + 1)
    entries = ledger.sample("b", int(last.sample_ids[0]), stop=1)
    (entry,) = (entry for entry in entries if entry.pack == number)
    assert (entry.epoch, entry.step, entry.is_skipped, entry.group, entry.micro_batch) == (0, None, False, None, None)


def test_a_dropped_sample_is_nowhere() -> None:
    plan = PLANS["a"]
    overlong = int((plan.lengths > 512).argmax())
    assert plan.lengths[overlong] > 512
    mixture = Mixture({"a": plan})
    ledger = StepLookup([Stretch(mixture=mixture, cursor=mixture.start(), global_batch=2)])
    assert ledger.sample("a", overlong, stop=5) == []


def test_steps_that_are_not_of_the_run_are_refused() -> None:
    mixture = Mixture(PLANS, weights={"a": 1, "b": 1}, max_epochs={"a": 1, "b": 1})
    later = mixture.skip(mixture.start(), 3, global_batch=2)
    ledger = StepLookup([Stretch(mixture=mixture, cursor=later, global_batch=2)])
    with pytest.raises(CursorError, match="step 2 is before the first, 3: name a later one"):
        ledger.step(2)
    with pytest.raises(CursorError, match="step 10000 is after the end of the run"):
        ledger.step(10_000)
    with pytest.raises(PackingError, match=r"sample 99 asked of a dataset with samples \[0, 30\)"):
        ledger.sample("a", 99, stop=5)
    start = Stretch(mixture=mixture, cursor=mixture.start(), global_batch=2)
    with pytest.raises(CursorError, match="begins at step 0, before the preceding stretch, which begins at step 3"):
        StepLookup([Stretch(mixture=mixture, cursor=later, global_batch=2), start])
    with pytest.raises(CursorError, match="a ledger needs at least one stretch of a run"):
        StepLookup([])


@examples(12, many=120)
@given(run=runs(), name=st.sampled_from("ab"), share=st.floats(0, 1, exclude_max=True))
def test_what_is_left_of_an_epoch_is_looked_up_ahead(run: tuple[list[Stretch], int], name: str, share: float) -> None:
    stretches, stop = run
    ledger, mixture = StepLookup(stretches), stretches[-1].mixture
    cursor = ledger.cursor(stop)
    if name not in cursor.sources:
        return
    sample_id = int(share * PLANS[name].num_samples)
    entries = ledger.sample(name, sample_id, stop=stop, ahead=True)
    known = ledger.sample(name, sample_id, stop=stop)
    assert [entry for entry in entries if entry.step is not None and entry.step < stop] == [
        entry for entry in known if entry.step is not None
    ]
    epoch = cursor.sources[name].epoch
    expected = set()
    batch = stretches[-1].global_batch
    while name in mixture.plans and cursor.sources[name].epoch == epoch and cursor.step < stop + 200:
        for pack in ledger.step(cursor.step).packs:
            if (pack.source, pack.epoch) == (name, epoch) and sample_id in pack.sample_ids:
                expected.add(cursor.step)
        cursor = mixture.skip(cursor, 1, global_batch=batch)
    assert {entry.step for entry in entries if entry.step is not None and entry.step >= stop} == expected


@examples(12, many=120)
@given(run=runs(), seed=st.integers(0, 1000), count=st.integers(1, 6))
def test_the_first_step_of_some_samples_is_the_first_that_was_trained_on_any(
    run: tuple[list[Stretch], int], seed: int, count: int
) -> None:
    stretches, stop = run
    ledger, read = StepLookup(stretches), in_order(run)
    for name in {name for stretch in stretches for name in stretch.mixture.plans}:
        ids = np.unique(np.random.default_rng(seed).integers(0, PLANS[name].num_samples, count))
        trained = [
            step
            for step, source, sample_id, *_ in read
            if source == name and sample_id in ids and not ledger.is_skipped(step)
        ]
        found = ledger.first_step(name, ids, stop=stop)
        assert (None if found is None else found.step) == min(trained, default=None)
        if found is not None:
            assert found.sample_id in {id for pack in ledger.step(found.step).packs for id in pack.sample_ids.tolist()}


@pytest.mark.parametrize("num_samples", [rounds(400, 20_000)])
def test_every_step_and_a_thousand_samples_over_epochs_phases_and_ranks(num_samples: int) -> None:
    """Mixed, split and repeated, on 1 to 4 ranks, with a schedule of weights, and passed over now and then."""
    plans = {"a": make_plan(num_samples, seed=1, canonical_nodes=2), "b": make_plan(num_samples // 2, seed=2)}
    run = long_run(plans, num_steps=num_samples // 20)
    stretches, stop = run
    expected: dict[tuple[str, int], set[tuple[int, int, int, int]]] = {}
    of_step: dict[int, set[tuple[str, int, int, int, int]]] = {}
    for step, source, sample_id, start, group, micro_batch in in_order(run):
        expected.setdefault((source, sample_id), set()).add((step, start // 512, group, micro_batch))
        of_step.setdefault(step, set()).add((source, sample_id, start, group, micro_batch))
    ledger = StepLookup(stretches)
    for number in range(stop):
        packs = ledger.step(number).packs
        found = {
            (pack.source, sample_id, start, pack.group, pack.micro_batch)
            for pack in packs
            for sample_id, start in zip(pack.sample_ids.tolist(), pack.starts.tolist(), strict=True)
        }
        assert found == of_step[number]
    draws = np.random.default_rng(0)
    for name, plan in plans.items():
        for sample_id in draws.choice(plan.num_samples, rounds(20, 500), replace=False).tolist():
            entries = ledger.sample(name, sample_id, stop=stop)
            where = {(e.step, e.piece, e.group, e.micro_batch) for e in entries if e.step is not None}
            assert where == expected.get((name, sample_id), set())


def long_run(plans: dict[str, PackPlan], *, num_steps: int) -> tuple[list[Stretch], int]:
    """Four stretches of so many steps: without weights, with a schedule of them, with a source that ends, and alone."""
    third = num_steps // 3
    settings: list[tuple[dict[str, PackPlan], Any, dict[str, int] | None, World, int]] = [
        (plans, None, None, World(world_size=2, num_nodes=2), 4),
        (plans, {0: {"a": 3, "b": 1}, 4 * third: {"b": 1}, 5 * third: {"a": 1, "b": 4}}, None, World(world_size=4), 4),
        (plans, {"a": 1, "b": 1}, {"a": 2}, World(world_size=4, num_nodes=2, replication=2), 6),
        ({"b": plans["b"]}, None, None, World(world_size=1), 3),
    ]
    stretches: list[Stretch] = []
    cursor: Cursor | None = None
    for mixed, weights, max_epochs, world, batch in settings:
        mixture = Mixture(mixed, weights=weights, max_epochs=max_epochs)
        begun = mixture.start() if cursor is None else mixture.adopt(cursor)
        skipped = [(begun.step + 2, begun.step + 5)]
        stretches.append(Stretch(mixture=mixture, cursor=begun, global_batch=batch, world=world, skipped=skipped))
        cursor = mixture.skip(begun, num_steps, global_batch=batch)
    assert cursor is not None
    return stretches, cursor.step
