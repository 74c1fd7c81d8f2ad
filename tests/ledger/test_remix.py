"""Totals of runs whose settings change on the way, against a count of what their ranks were given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.ledger import PackEntry, StepLookup, Stretch
from lmms_stream.plan.left_out import LeftOut, LeftOutSample
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.tools.ledger.amounts import amounts_of, step_after, steps_to_end
from lmms_stream.tools.ledger.remix import Change, changed, describe_change
from lmms_stream.types import World

from ..strategies import chat_lengths, examples

NUM_CHANGES = 5
WORLD_SIZES = (1, 2, 4)


def make_plan(num_samples: int, *, seed: int, overlong: Overlong) -> PackPlan:
    return PackPlan(
        chat_lengths(num_samples, limit=600, seed=seed),
        [num_samples // 2, num_samples - num_samples // 2],
        order=OrderConfig(seed=seed, num_canonical_nodes=2, shuffle_block_size=16),
        packing=PackingConfig(packing_length=512, overlong=overlong),
    )


PLANS = {
    "a": make_plan(30, seed=0, overlong="drop"),
    "b": make_plan(60, seed=1, overlong="split"),
    "c": make_plan(20, seed=2, overlong="truncate"),
}


class Segment(NamedTuple):
    source: str
    epoch: int
    sample_id: int
    num_tokens: int


Log = dict[int, list[Segment]]  # what the ranks were given, by step; a step that was done twice as of the later time


def given_to_ranks(stretch: Stretch, num_steps: int) -> Iterator[tuple[int, list[Segment]]]:
    """What each rank is given in the first steps of a stretch, as their loaders plan it."""
    for rank in range(stretch.world.world_size):
        world = World(rank=rank, world_size=stretch.world.world_size)
        cursor = stretch.cursor
        while cursor.step < stretch.cursor.step + num_steps:
            planner = StepPlanner(stretch.mixture, StepConfig(global_batch=stretch.global_batch, world=world))
            last = cursor
            for planned in planner.plan(cursor):
                work = planned.work
                if cursor.step + work.step >= stretch.cursor.step + num_steps:
                    break
                for pack, (begin, end) in enumerate(pairwise(work.bounds.tolist())):
                    segments = zip(work.segments.sample_ids[begin:end], work.segments.lengths[begin:end], strict=True)
                    found = [Segment(work.source, work.epochs[pack], int(id), int(size)) for id, size in segments]
                    yield cursor.step + work.step, found
                last = planned.after if isinstance(planned.after, Cursor) else last
            if last.step == cursor.step:
                break  # all sources are at their ends
            cursor = last


def write_log(log: Log, stretch: Stretch, num_steps: int) -> None:
    for step in range(stretch.cursor.step, stretch.cursor.step + num_steps):
        log[step] = []
    for step, segments in given_to_ranks(stretch, num_steps):
        log[step] += segments


class Total(NamedTuple):
    """What a log says of a source before a step. read: samples of which a piece was, once for each epoch."""

    read: int
    tokens: int
    seen: int
    seen_tokens: int


def padding_in(log: Log, name: str, left_out: LeftOut, first: int, stop: int) -> tuple[int, int]:
    """Samples, each once in an epoch, and tokens of a source that are left out in steps of a log."""
    segments = [
        each
        for step, found in log.items()
        for each in found
        if first <= step < stop and each.source == name and left_out.is_left_out(name, each.sample_id, step=step)
    ]
    return len({(each.epoch, each.sample_id) for each in segments}), sum(each.num_tokens for each in segments)


@st.composite
def some_left_out(draw: st.DrawFn) -> LeftOut:
    """Samples that are padding from steps of the run on, some from its start."""
    ids = {name: draw(st.lists(st.integers(0, plan.num_samples - 1), max_size=9)) for name, plan in PLANS.items()}
    return LeftOut(
        LeftOutSample(name, each, "listed", draw(st.sampled_from([0, 0, 7, 19])), "dropped")
        for name, listed in ids.items()
        for each in listed
    )


def total_of(log: Log, name: str, stop: int) -> Total:
    tokens: Counter[tuple[int, int]] = Counter()
    for segments in (segments for step, segments in log.items() if step < stop):
        for each in segments:
            if each.source == name:
                tokens[each.epoch, each.sample_id] += each.num_tokens
    first = sum(count for (epoch, _), count in tokens.items() if epoch == 0)
    return Total(len(tokens), sum(tokens.values()), len({sample_id for _, sample_id in tokens}), first)


@st.composite
def settings(draw: st.DrawFn, world_size: int) -> tuple[Mixture, int, World]:
    """Sources, weights (at times a schedule of them), max_epochs and a global batch of a stretch."""
    names = draw(st.lists(st.sampled_from(sorted(PLANS)), min_size=1, max_size=3, unique=True))
    shares = st.fixed_dictionaries({name: st.integers(1, 5) for name in names})
    weights = draw(st.none() | shares | st.builds(lambda a, b: {0: a, 9: b}, shares, shares))
    max_epochs = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 4))) if weights else {}
    mixture = Mixture({name: PLANS[name] for name in names}, weights=weights, max_epochs=max_epochs)
    return mixture, world_size * draw(st.integers(1, 3)), World(world_size=world_size)


@examples(6, many=100)
@given(data=st.data())
def test_totals_over_five_changes_kills_and_three_world_sizes_are_those_of_the_log(data: st.DataObject) -> None:
    """Each change is told beforehand, too: what the command says of it is what the log says afterwards."""
    log: Log = {}
    ledger: StepLookup | None = None
    step = 0
    left_out = data.draw(some_left_out())
    worlds = data.draw(st.permutations([*WORLD_SIZES, *WORLD_SIZES]))
    for world_size in worlds[: NUM_CHANGES + 1]:
        mixture, global_batch, world = data.draw(settings(world_size))
        before = ledger
        if before is None:
            stretch = Stretch(mixture=mixture, cursor=mixture.start(), global_batch=global_batch, world=world)
            ledger = StepLookup([stretch])
        else:
            ledger = changed(before, mixture, first=step, global_batch=global_batch)
        stretch = Stretch(mixture=mixture, cursor=ledger.stretches[-1].cursor, global_batch=global_batch, world=world)
        to_end = steps_to_end(stretch)
        num_steps = min(data.draw(st.integers(1, 8)), 99 if mixture.schedule is None or to_end is None else to_end)
        stop = step + num_steps
        if before is not None and num_steps:
            change = describe_change(before, ledger, stop=stop, left_out=left_out)
        write_log(log, stretch, num_steps + data.draw(st.integers(0, 3)))  # a kill loses what no checkpoint has
        for lost in [each for each in log if each >= stop]:
            del log[lost]
        found = amounts_of(ledger, stop)
        for name, amounts in found.items():
            total = total_of(log, name, stop)
            assert (amounts.num_samples, amounts.num_tokens, amounts.num_seen) == (total.read, total.tokens, total.seen)
        if before is not None and num_steps:
            assert set(change.sources) == set(found)
            for name, told in change.sources.items():
                was, now = total_of(log, name, step), total_of(log, name, stop)
                packed = PLANS[name].amounts(0, PLANS[name].num_packs(0))
                assert (told.num_samples, told.num_tokens) == (now.read - was.read, now.tokens - was.tokens)
                assert told.num_new_samples == now.seen - was.seen
                assert told.num_repeated_samples == now.read - was.read - (now.seen - was.seen)
                assert told.num_new_tokens == now.seen_tokens - was.seen_tokens
                assert told.num_repeated_tokens == told.num_tokens - told.num_new_tokens
                padding = padding_in(log, name, left_out, step, stop)
                assert (told.num_left_out_samples, told.num_left_out_tokens) == padding
                assert told.num_unread_samples == packed.samples - now.seen
                assert told.num_unread_tokens == packed.tokens - now.seen_tokens
            check_phases(change, log, mixture)
        step = stop


@examples(8, many=200)
@given(
    weights=st.none() | st.fixed_dictionaries({name: st.integers(1, 5) for name in PLANS}),
    balance=st.sampled_from([3, 8, 30, "across_sources"]),
    global_batch=st.sampled_from([1, 2, 7]),
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    left_out=some_left_out(),
)
@example(  # source a has had all turns of its epoch before step 25, and not all packs
    weights={"a": 3, "b": 1, "c": 1}, balance="across_sources", global_batch=1, steps=[25, 30], left_out=LeftOut([])
)
def test_totals_inside_a_window_are_of_the_packs_that_it_gave_to_its_steps(
    weights: dict[str, int] | None, balance: str | int, global_batch: int, steps: list[int], left_out: LeftOut
) -> None:
    """A change at a step tells what is new and what is padding in the steps after it."""
    ends = {} if weights is None else {"a": 1, "c": 2}
    phases = None if weights is None else dict.fromkeys(range(0, 40, 13), weights)
    mixture = WindowedMixture(PLANS, weights=phases, max_epochs=ends, balance=balance)
    ledger = StepLookup([Stretch(mixture=mixture, cursor=mixture.start(), global_batch=global_batch)])
    entries = {number: ledger.step(number).packs for number in range(max(steps))}
    log = {
        number: [
            Segment(pack.source, pack.epoch, sample_id, num_tokens)
            for pack in packs
            for sample_id, num_tokens in zip(pack.sample_ids.tolist(), pack.lengths.tolist(), strict=True)
        ]
        for number, packs in entries.items()
    }
    for stop in steps:
        for name, amounts in amounts_of(ledger, stop).items():
            total = total_of(log, name, stop)
            assert (amounts.num_samples, amounts.num_tokens, amounts.num_seen) == (total.read, total.tokens, total.seen)
            whole, rest = divmod(len(steps_of(entries, name, stop)), PLANS[name].num_packs(0))
            assert amounts.epochs == whole + rest / PLANS[name].num_packs(whole)
    for first, stop in pairwise(sorted({0, *steps})):
        again = changed(ledger, mixture, first=first, global_batch=global_batch)
        for name, told in describe_change(ledger, again, stop=stop, left_out=left_out).sources.items():
            before, after = (
                {
                    (sample_id, start): num_tokens
                    for number in range(step)
                    for pack in entries[number]
                    if pack.source == name
                    for sample_id, start, num_tokens in zip(
                        *(each.tolist() for each in (pack.sample_ids, pack.starts, pack.lengths)), strict=True
                    )
                }
                for step in (first, stop)
            )
            read = steps_of(entries, name, stop)
            assert told.packs_per_step == sum(step >= first for step in read) / (stop - first)
            last = name in ends and len(read) == sum(map(PLANS[name].num_packs, range(ends[name]))) and read[-1]
            assert told.ends_at_step == (last if last is not False and last >= first else None)
            assert told.num_new_tokens == sum(after.values()) - sum(before.values())
            assert told.num_unread_tokens == PLANS[name].num_tokens(0) - sum(after.values())
            padding = padding_in(log, name, left_out, first, stop)
            assert (told.num_left_out_samples, told.num_left_out_tokens) == padding


def steps_of(entries: Mapping[int, Sequence[PackEntry]], name: str, stop: int) -> list[int]:
    """The step of each pack of a source in the steps before `stop`."""
    return [number for number in range(stop) for pack in entries[number] if pack.source == name]


def check_phases(change: Change, log: Log, mixture: Mixture) -> None:
    starts = [first for first, _ in mixture.schedule or () if change.first < first < change.stop]
    assert [(each.first, each.stop) for each in change.phases] == [*pairwise([change.first, *starts, change.stop])]
    for phase in change.phases:
        read = Counter[str]()
        for step in range(phase.first, phase.stop):
            for each in log[step]:
                read[each.source] += each.num_tokens
        total = max(1, read.total())
        assert phase.token_shares == pytest.approx({name: read[name] / total for name in phase.token_shares})


def run_of(weights: dict[str, float], *, num_steps: int) -> StepLookup:
    """A run of steps of four packs with some weights, and then a change that changes nothing."""
    mixture = Mixture({name: PLANS[name] for name in weights}, weights=weights)
    ledger = StepLookup([Stretch(mixture=mixture, cursor=mixture.start(), global_batch=4)])
    return changed(ledger, mixture, first=num_steps, global_batch=4)


def test_sources_are_kept_added_and_removed_and_shares_are_said_before_and_after() -> None:
    before = run_of({"a": 1, "b": 1}, num_steps=3)
    mixture = Mixture({name: PLANS[name] for name in ("b", "c")}, weights={"b": 1, "c": 3})
    change = describe_change(before, changed(before, mixture, first=3, global_batch=8), stop=7)
    assert {name: each.status for name, each in change.sources.items()} == {"a": "removed", "b": "kept", "c": "added"}
    assert (change.first, change.stop, change.global_batch_before, change.global_batch) == (3, 7, 4, 8)
    shares = {name: (each.token_share_before, each.token_share) for name, each in change.sources.items()}
    assert shares["a"] == pytest.approx((0.5, 0), abs=0.05)
    assert shares["c"] == pytest.approx((0, 0.75), abs=0.05)
    assert [each.packs_per_step for each in change.sources.values()] == [0, 2, 6]
    assert change.sources["a"].num_unread_samples == amounts_of(before, 3)["a"].num_unseen


def test_the_step_with_the_last_pack_of_a_source_is_said_and_the_end_of_all() -> None:
    before = run_of({"a": 1, "b": 1}, num_steps=2)
    mixture = Mixture({name: PLANS[name] for name in "ab"}, weights={"a": 3, "b": 1}, max_epochs={"a": 2, "b": 1})
    after = changed(before, mixture, first=2, global_batch=4)
    change = describe_change(before, after, stop=1000)
    assert change.is_end
    assert change.stop == 2 + (steps_to_end(after.stretches[-1]) or 0)
    end = change.sources["a"].ends_at_step
    assert end is not None
    assert "a" in {pack.source for pack in after.step(end).packs}
    assert "a" not in {pack.source for number in range(end + 1, change.stop) for pack in after.step(number).packs}
    assert all(each.num_unread_samples == 0 for each in change.sources.values())
    assert change.sources["a"].epochs_after == 2


def test_steps_that_are_passed_over_are_no_reads() -> None:
    before = run_of({"a": 1, "b": 1}, num_steps=2)
    mixture = before.stretches[-1].mixture
    after = changed(before, mixture, first=2, global_batch=4, skipped=[(3, 5)])
    change = describe_change(before, after, stop=step_after(2, 3, skipped=[(3, 5)]))
    assert change.stop == 7
    passed = [pack for number in (3, 4) for pack in after.step(number).packs]
    assert sum(each.num_skipped_tokens for each in change.sources.values()) == sum(
        int(pack.lengths.sum()) for pack in passed
    )
    whole = describe_change(before, changed(before, mixture, first=2, global_batch=4), stop=7)
    for name, each in change.sources.items():
        assert each.num_tokens + each.num_skipped_tokens == whole.sources[name].num_tokens
        assert each.num_new_tokens == whole.sources[name].num_new_tokens


def test_samples_of_steps_that_are_passed_over_are_no_padding() -> None:
    before = run_of({"a": 1, "b": 1}, num_steps=2)
    mixture = before.stretches[-1].mixture
    after = changed(before, mixture, first=2, global_batch=4, skipped=[(3, 5)])
    everything = LeftOut(
        LeftOutSample(name, each, "listed", 0, "dropped") for name in "ab" for each in range(PLANS[name].num_samples)
    )
    change = describe_change(before, after, stop=8, left_out=everything)
    for each in change.sources.values():
        assert each.num_left_out_tokens == each.num_tokens


def test_the_steps_of_epochs_are_those_of_the_loader() -> None:
    mixture = Mixture({name: PLANS[name] for name in "ab"})
    stretch = Stretch(mixture=mixture, cursor=mixture.start(), global_batch=4)
    per_epoch = [-(-sum(plan.num_packs(epoch) for plan in mixture.plans.values()) // 4) for epoch in range(3)]
    assert steps_to_end(stretch, num_epochs=3) == sum(per_epoch)
    assert steps_to_end(stretch) == per_epoch[0]


def test_a_change_without_steps_or_of_another_dataset_is_refused() -> None:
    before = run_of({"a": 1}, num_steps=3)
    with pytest.raises(ConfigError, match="no step is left from step 3 on: the run is at its end"):
        describe_change(before, before, stop=3)
    other = Mixture({"a": PLANS["b"]}, weights={"a": 1})
    with pytest.raises(CursorError, match="they differ in the lengths index"):
        changed(before, other, first=3, global_batch=4)
