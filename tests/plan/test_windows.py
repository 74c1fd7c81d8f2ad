"""Windows of steps, against a definition in plain Python that makes every pack."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from itertools import chain
from math import isqrt
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.plan.assign import LINEAR_COST, assign, pack_costs
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.lengths import Lengths
from lmms_stream.plan.mixture import Mixture, Step
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.plan.source_ranges import SourceRange
from lmms_stream.plan.windows import ACROSS_SOURCES, WindowedMixture, window_steps
from lmms_stream.types import World

from ..strategies import chat_lengths, examples
from .test_mixture import PLANS, Reads, reads, run, run_to_end


def media_plan() -> PackPlan:
    """Samples of which half have media."""
    rng = np.random.default_rng(3)
    lengths = chat_lengths(400, limit=512, seed=9)
    patches = rng.integers(1, 200, 400) * (np.arange(400) % 2)
    index = Lengths(lengths=lengths, content_hash="media", patches=patches.astype(np.uint32), patches_hash="patches")
    order = OrderConfig(seed=4, num_canonical_nodes=2, shuffle_block_size=64)
    return PackPlan(index, [100] * 4, order=order, packing=PackingConfig(packing_length=512))


WITH_MEDIA = {**PLANS, "media": media_plan()}


class Pack(NamedTuple):
    source: str
    epoch: int
    number: int
    node: int
    tower: int
    work: int


def packs_of(mixture: Mixture, steps: list[Step]) -> list[Pack]:
    """The packs of steps, in turn."""
    found = []
    for step in steps:
        made = mixture.packs(step.ranges)
        work, towers = pack_costs(made, linear_cost=LINEAR_COST), made.patches
        for number, read in enumerate(reads(step)):
            tower = 0 if towers is None else int(towers[number])
            found.append(Pack(*read, int(made.canonical_nodes[number]), tower, int(work[number])))
    return found


def sorted_window(packs: list[Pack], *, global_batch: int, seed: int, first: int, across_sources: bool) -> list[Reads]:
    """What the steps of a window read."""
    num_steps = -(-len(packs) // global_batch)
    places = np.random.default_rng([seed, 46, first]).permutation(num_steps).tolist()
    groups: dict[tuple[int, str], list[int]] = {}
    for turn, pack in enumerate(packs):
        groups.setdefault((pack.node, "" if across_sources else pack.source), []).append(turn)
    found: dict[int, Pack] = {}
    for turns in groups.values():
        by_tower = sorted(turns, key=lambda turn: (packs[turn].tower, turn))
        num_classes = isqrt(num_steps) if any(packs[turn].tower for turn in turns) else 1
        classes = {turn: rank * num_classes // len(turns) for rank, turn in enumerate(by_tower)}
        ordered = sorted(turns, key=lambda turn: (classes[turn], packs[turn].work, turn))
        slots = sorted(turns, key=lambda turn: (places[turn // global_batch], turn))
        found |= {slot: packs[turn] for slot, turn in zip(slots, ordered, strict=True)}
    return [
        [found[turn][:3] for turn in range(begin, min(begin + global_batch, len(packs)))]
        for begin in range(0, len(packs), global_batch)
    ]


@examples(40)
@given(
    names=st.lists(st.sampled_from(sorted(WITH_MEDIA)), min_size=1, unique=True),
    weights=st.none() | st.lists(st.integers(1, 5), min_size=4, max_size=4),
    phase=st.integers(1, 12),
    balance=st.sampled_from([2, 5, 9, ACROSS_SOURCES]),
    global_batch=st.integers(1, 12),
    begin=st.integers(0, 9),
)
def test_a_window_is_its_turns_with_packs_of_a_source_and_node_or_of_a_node_sorted_by_work(
    names: list[str], weights: list[int] | None, phase: int, balance: str | int, global_batch: int, begin: int
) -> None:
    plans = {name: WITH_MEDIA[name] for name in names}
    shares = None if weights is None else dict(zip(plans, weights, strict=False))
    schedule = None if shares is None else {0: shares} | {n * phase: dict.fromkeys(plans, 1 + n) for n in range(1, 24)}
    in_turn = Mixture(plans, weights=schedule)
    mixture = WindowedMixture(plans, weights=schedule, balance=balance)
    cursor = in_turn.skip(in_turn.start(), begin, global_batch=global_batch)
    most = window_steps(balance, global_batch=global_batch, num_canonical_nodes=mixture.num_canonical_nodes)
    for _ in range(3):
        steps: list[Step] = []
        after = cursor
        while len(steps) < most and not (steps and steps[-1].ends_epoch):
            if steps and schedule is not None and after.step % phase == 0:
                break
            steps.append(in_turn.step(after, global_batch=global_batch))
            after = steps[-1].after
        seed = next(iter(plans.values())).order.seed
        packs = packs_of(in_turn, steps)
        expected = sorted_window(
            packs, global_batch=global_batch, seed=seed, first=cursor.step, across_sources=balance == ACROSS_SOURCES
        )
        found, end = run(mixture, cursor, len(steps), global_batch=global_batch)
        assert found == expected
        assert end == after
        cursor = end


@examples(40)
@given(
    weights=st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1),
    balance=st.sampled_from([2, 6, "window", ACROSS_SOURCES]),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=4),
    last=st.sampled_from(["deal", 3, "window", ACROSS_SOURCES]),
)
def test_each_pack_is_read_once_when_batch_and_balance_change_at_any_step(
    weights: dict[str, int] | None, balance: str | int, sizes: list[tuple[int, int]], last: str | int
) -> None:
    ends = {} if weights is None else dict.fromkeys(weights, 2)
    found: list[Reads] = []
    mixture = WindowedMixture(PLANS, weights=weights, max_epochs=ends, balance=balance)
    cursor = mixture.start()
    for global_batch, num_steps in sizes:
        for _ in range(num_steps):
            step = mixture.step(cursor, global_batch=global_batch)
            found.append(reads(step))
            cursor = Cursor.from_dict(json.loads(json.dumps(step.after.to_dict())))
            assert cursor == step.after
    mixture = WindowedMixture(PLANS, weights=weights, max_epochs=ends, balance=last)
    cursor = mixture.adopt(cursor)
    is_over = not mixture.packs_left(cursor)
    while not is_over:
        step = mixture.step(cursor, global_batch=7)
        found.append(reads(step))
        cursor, is_over = step.after, step.ends_epoch
    counted = Counter(read for step in found for read in step)
    names = PLANS if weights is None else weights
    num_epochs = {name: cursor.sources[name].epoch if weights is None else 2 for name in names}
    whole = [
        (n, epoch, pack) for n in names for epoch in range(num_epochs[n]) for pack in range(PLANS[n].num_packs(epoch))
    ]
    assert counted == Counter(whole)


@examples(12)
@given(
    names=st.lists(st.sampled_from(sorted(WITH_MEDIA)), min_size=1, unique=True),
    balance=st.sampled_from([2, 5, 9, ACROSS_SOURCES]),
    batches=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    steps=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    nodes=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    micro_batches=st.integers(1, 2),
    num_workers=st.integers(1, 3),
)
@example(names=["b"], balance=5, batches=(7, 1), steps=(2, 0), nodes=[1], micro_batches=2, num_workers=3)
def test_readers_read_the_packs_of_each_step_after_changes_of_the_global_batch_inside_windows(
    names: list[str],
    balance: str | int,
    batches: tuple[int, int],
    steps: tuple[int, int],
    nodes: list[int],
    micro_batches: int,
    num_workers: int,
) -> None:
    mixture = WindowedMixture({name: WITH_MEDIA[name] for name in names}, balance=balance)
    cursor = mixture.start()
    for global_batch, num_steps in zip(batches, steps, strict=True):
        cursor = mixture.skip(cursor, num_steps, global_batch=global_batch)
    global_batch = sum(nodes) * micro_batches
    found = samples_of_readers(mixture, cursor, nodes=nodes, global_batch=global_batch, num_workers=num_workers)
    for samples in found:
        step = mixture.step(cursor, global_batch=global_batch)
        assert samples == samples_of(mixture, step)
        cursor = step.after
    assert step.ends_epoch


def test_the_readers_of_each_node_sort_a_window_alike_if_only_one_node_has_media() -> None:
    patches = np.where(np.arange(400) < 3, 90, 0)
    index = Lengths(lengths=chat_lengths(400, limit=512, seed=9), content_hash="few", patches=patches.astype(np.uint32))
    order = OrderConfig(seed=4, num_canonical_nodes=4, shuffle_block_size=64)
    plan = PackPlan(index, [100] * 4, order=order, packing=PackingConfig(packing_length=512))
    mixture = WindowedMixture({"few": plan}, balance=9)
    cursor = mixture.start()
    for samples in samples_of_readers(mixture, cursor, nodes=[1] * 4, global_batch=8, num_workers=1):
        step = mixture.step(cursor, global_batch=8)
        assert samples == samples_of(mixture, step)
        cursor = step.after


def samples_of_readers(
    mixture: WindowedMixture, cursor: Cursor, *, nodes: list[int], global_batch: int, num_workers: int
) -> list[Counter[tuple[str, int]]]:
    """The samples that all workers of all ranks read in each step, to the end of the epoch."""
    found: dict[int, Counter[tuple[str, int]]] = {}
    for rank in range(sum(nodes)):
        config = StepConfig(
            global_batch=global_batch, world=World(rank=rank, world_size=sum(nodes), ranks_per_node=nodes)
        )
        for worker in range(num_workers):
            for planned in StepPlanner(mixture, config, worker=worker, num_workers=num_workers).plan(cursor):
                work = planned.work
                ids = ((work.source, sample_id) for sample_id in work.segments.sample_ids.tolist())
                found.setdefault(work.step, Counter()).update(ids)
    return [found[step] for step in range(len(found))]


def samples_of(mixture: WindowedMixture, step: Step) -> Counter[tuple[str, int]]:
    packs = mixture.packs(step.ranges)
    sources = np.repeat(packs.sources, np.diff(packs.offsets)).tolist()
    names = [mixture.names[number] for number in sources]
    return Counter(zip(names, packs.sample_ids.tolist(), strict=True))


def test_a_new_source_without_a_weight_does_not_change_the_window_of_a_state() -> None:
    weights = {"b": 1, "c": 2}
    mixture = WindowedMixture({name: PLANS[name] for name in weights}, weights=weights, balance=6)
    _, cursor = run(mixture, mixture.start(), 2, global_batch=5)
    with_new = WindowedMixture(PLANS, weights=weights, balance=6)  # begins with source a, of another seed
    found, _ = run(with_new, with_new.adopt(cursor), 4, global_batch=5)
    assert found == run(mixture, cursor, 4, global_batch=5)[0]


def test_the_step_of_a_pack_is_found_in_a_window_longer_than_the_window_before() -> None:
    weights = {0: {"b": 1, "c": 3}, 1: {"b": 3, "c": 5}}
    mixture = WindowedMixture(PLANS, weights=weights, balance=13)
    cursor = start = mixture.start()
    for number in range(4):
        step = mixture.step(cursor, global_batch=3)
        for source, epoch, pack in reads(step):
            wanted = SourceRange(source=source, epoch=epoch, first=pack, stop=pack + 1)
            assert mixture.step_of(start, wanted, global_batch=3, num_steps=number + 1) == cursor
        cursor = step.after


def test_steps_of_windows_are_balanced() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(5.5, 1.1, 60_000), 1, 4096).astype(np.uint32)
    order = OrderConfig(seed=3, num_canonical_nodes=4, shuffle_block_size=4096)
    packing = PackingConfig(packing_length=4096)
    plans = {"x": PackPlan(lengths, [500] * 120, order=order, packing=packing)}
    short = PackPlan(np.minimum(lengths, 512), [500] * 120, order=order, packing=packing)
    imbalance = {}
    for num_sources, balance in ((1, "deal"), (1, 64), (2, "window"), (2, ACROSS_SOURCES)):
        mixture = WindowedMixture(plans if num_sources == 1 else plans | {"short": short}, balance=balance)
        cursor, worst, mean = mixture.start(), 0.0, 0.0
        for _ in range(128):
            step = mixture.step(cursor, global_batch=16)
            packs = mixture.packs(step.ranges)
            dealt = assign(packs, global_batch=16, nodes=[4] * 4, num_canonical_nodes=mixture.num_canonical_nodes)
            work = pack_costs(packs)[dealt].sum(axis=1)
            worst, mean = worst + work.max(), mean + work.mean()
            cursor = step.after
        imbalance[balance] = worst / mean
    assert imbalance["deal"] > 1.08
    assert imbalance[64] < 1.05
    assert 2 * (imbalance[ACROSS_SOURCES] - 1) < imbalance["window"] - 1


@examples(20)
@given(
    weights=st.none() | st.tuples(*[st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1)] * 2),
    names=st.sampled_from(["abc", "ba", "c"]),
    num_steps=st.integers(0, 7),
    batches=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    balances=st.tuples(st.sampled_from([5, ACROSS_SOURCES]), st.sampled_from(["deal", 4, ACROSS_SOURCES])),
)
def test_a_window_is_finished_before_other_weights_and_sources_apply(
    weights: tuple[dict[str, int], ...] | None, names: str, num_steps: int, batches: tuple[int, int], balances: Any
) -> None:
    shares: list[Any] = [None, None] if weights is None else [{n: v for n, v in weights[0].items() if n in names}]
    shares = shares if weights is None else [shares[0] or dict.fromkeys(names, 1), weights[1]]
    phases = None if weights is None else {0: shares[0], 8: shares[0]}
    former_balance, balance = balances
    former = WindowedMixture({name: PLANS[name] for name in names}, weights=phases, balance=former_balance)
    _, cursor = run(former, former.start(), num_steps, global_batch=batches[0])
    other = WindowedMixture(PLANS, weights=shares[1], balance=balance)
    cursor = other.adopt(Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))))
    window = cursor.window
    rest = 0 if window is None else window.num_left
    expected = []
    if window is not None:
        packs, _ = run(former, cursor, -(-rest // window.global_batch), global_batch=window.global_batch)
        expected = [read for step in packs for read in step][:rest]
    after = Cursor(step=0, sources=other.reach(cursor), shares=other.shares)
    found: Reads = []
    at = cursor
    while len(found) < rest + 24:
        step = other.step(at, global_batch=batches[1])
        assert step.num_packs
        for number, read in enumerate(reads(step)):
            if number % 3 == 0:
                piece = SourceRange(read[0], read[1], read[2], read[2] + 1)
                assert other.step_of(cursor, piece, global_batch=batches[1], num_steps=999) == at
        found += reads(step)
        at = step.after
        assert other.skip(cursor, at.step - cursor.step, global_batch=batches[1]) == at
    assert found[:rest] == expected
    in_turn = Mixture(PLANS, weights=shares[1])
    if balance == "deal" and rest % batches[1] == 0:
        later, _ = run(in_turn, in_turn.adopt(after), 40, global_batch=batches[1])
        assert found[rest:] == [read for step in later for read in step][: len(found) - rest]


def test_a_window_without_one_of_its_sources_or_with_weights_for_none_is_refused_with_its_last_step() -> None:
    mixture = WindowedMixture(PLANS, weights={"a": 1, "b": 3}, balance=6)
    _, cursor = run(mixture, mixture.start(), 4, global_batch=5)
    without = WindowedMixture({"a": PLANS["a"]}, weights={"a": 1}, balance=6)
    with pytest.raises(CursorError, match=r"it reads b, which is not here: continue with the former ones to step 6 "):
        without.adopt(cursor)
    with pytest.raises(CursorError, match="only one of both has weights: continue"):
        WindowedMixture(PLANS, balance=6).adopt(cursor)
    assert json.loads(json.dumps(cursor.to_dict()))["version"] == 6
    _, end = run(mixture, cursor, 2, global_batch=5)
    assert end.window is None
    assert without.adopt(end).step == 6
    assert json.loads(json.dumps(end.to_dict()))["version"] == 6
    across = WindowedMixture(PLANS, balance=ACROSS_SOURCES)
    assert run(across, across.start(), 1, global_batch=5)[1].to_dict()["version"] == 5


@examples(40)
@given(
    weights=st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
    names=st.permutations("abc"),
    later=st.permutations("abc"),
    balance=st.sampled_from(["deal", 5, ACROSS_SOURCES]),
    num_steps=st.integers(0, 12),
)
def test_the_order_of_keys_in_a_state_and_of_the_sources_at_a_resume_change_no_step(
    weights: dict[str, int] | None, names: str, later: str, balance: str | int, num_steps: int
) -> None:
    mixture = WindowedMixture({name: PLANS[name] for name in names}, weights=weights, balance=balance)
    _, cursor = run(mixture, mixture.start(), num_steps, global_batch=3)
    expected, end = run(mixture, cursor, 20, global_batch=3)
    state = json.loads(json.dumps(cursor.to_dict(), sort_keys=True))
    again = WindowedMixture({name: PLANS[name] for name in later}, weights=weights, balance=balance)
    found, again_end = run(again, again.adopt(Cursor.from_dict(state)), 20, global_batch=3)
    assert found == expected
    assert [*again_end.sources] == [*end.sources] == [*names]


def test_a_state_without_an_order_takes_that_of_the_sources_and_its_window_that_of_its_keys() -> None:
    former = WindowedMixture({name: PLANS[name] for name in "cab"}, balance=6)
    _, cursor = run(former, former.start(), 2, global_batch=5)
    state = cursor.to_dict()
    del state["order"], state["window"]["order"], state["window"]["turns"]  # as earlier releases wrote it
    mixture = WindowedMixture(PLANS, balance=6)
    adopted = mixture.adopt(Cursor.from_dict(state))
    assert ([*adopted.sources], [*(adopted.window or cursor).sources]) == ([*"abc"], [*"cab"])
    assert run(mixture, adopted, 4, global_batch=5)[0] == run(former, cursor, 4, global_batch=5)[0]


def test_a_window_of_other_turns_than_the_saved_ones_is_refused() -> None:
    mixture = WindowedMixture(PLANS, balance=6)
    _, cursor = run(mixture, mixture.start(), 2, global_batch=5)
    state = cursor.to_dict()
    state["window"]["sources"]["a"]["packs"] += 1
    with pytest.raises(CursorError, match=r"inside a window .* of turns \w+, and its sources give turns .*: the"):
        mixture.adopt(Cursor.from_dict(state))
    state["window"]["order"] = ["a", "b"]
    with pytest.raises(CursorError, match=r"the saved cursor is damaged .*order has .*, and the sources are"):
        Cursor.from_dict(state)


def changed_numbers(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the place of each number in a state, and other numbers for it."""
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from changed_numbers(each, (*at, key))
    if type(value) is int and at[-1] != "version":
        yield from ((at, other) for other in (value + 1, value - 1, -1, 1 << 20, 1 << 31, 1 << 62, 1 << 70))


@pytest.mark.parametrize("balance", [6, ACROSS_SOURCES])
@pytest.mark.parametrize("has_turns", [True, False])
def test_a_number_that_a_window_contradicts_is_refused(balance: str | int, has_turns: bool) -> None:
    """Without a digest of the turns, in states of earlier releases, the state may be of another run in some numbers."""
    ends: dict[str, Any] = {"weights": dict.fromkeys("abc", 1), "max_epochs": dict.fromkeys("abc", 2)}
    mixture = WindowedMixture(PLANS, **ends, balance=balance)
    _, cursor = run(mixture, mixture.start(), 4, global_batch=5)
    expected, _ = run(mixture, cursor, 9, global_batch=5)
    saved = cursor.to_dict()
    if not has_turns:
        del saved["window"]["turns"]
    assert run(mixture, mixture.adopt(Cursor.from_dict(saved)), 9, global_batch=5)[0] == expected
    for (*outer, last), other in changed_numbers(saved):
        state = json.loads(json.dumps(saved))
        reduce(getitem, outer, state)[last] = other
        is_of_other = [*outer, last] in (["window", "linear_cost"], ["window", "step"], ["step"])
        is_of_other |= not has_turns and outer == ["window"] and last in ("num_packs", "global_batch")
        try:
            adopted = mixture.adopt(Cursor.from_dict(state))
        except CursorError:
            continue
        found, _ = run(mixture, adopted, 9, global_batch=5)
        assert is_of_other or found == expected, (outer, last, other)


def test_balances_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="balance must be deal, window, across_sources or the number of steps of a window, got 'sort'"
    ):
        WindowedMixture(PLANS, balance="sort")
    with pytest.raises(ConfigError, match=r"balance must be .*2.*, got 1"):
        WindowedMixture(PLANS, balance=1)
    order = OrderConfig(shuffle=False)
    stored = PackPlan(chat_lengths(40, limit=512, seed=1), [40], order=order, packing=PackingConfig(packing_length=512))
    with pytest.raises(ConfigError, match="source 'x' has shuffle: false: set balance to deal, or shuffle to true"):
        WindowedMixture({"x": stored}, balance="window")


def test_a_window_has_64_to_256_steps_by_its_packs_of_each_canonical_node() -> None:
    found = [window_steps("window", global_batch=size, num_canonical_nodes=8) for size in (8, 64, 100, 256, 4096)]
    assert found == [256, 256, 164, 64, 64]
    assert [window_steps(each, global_batch=8, num_canonical_nodes=8) for each in ("deal", 12)] == [0, 12]
    assert window_steps(ACROSS_SOURCES, global_batch=100, num_canonical_nodes=8) == 164


def test_a_run_to_the_end_of_an_epoch_reads_what_deal_reads() -> None:
    in_turn, mixture = Mixture(PLANS), WindowedMixture(PLANS, balance="window")
    expected, _ = run_to_end(in_turn, in_turn.start(), global_batch=8)
    found, end = run_to_end(mixture, mixture.start(), global_batch=8)
    assert Counter(chain(*found)) == Counter(chain(*expected))
    assert [Counter(read[0] for read in step) for step in found] == [Counter(r[0] for r in step) for step in expected]
    assert found != expected
    assert end.window is None
    across = WindowedMixture(PLANS, balance=ACROSS_SOURCES)
    assert Counter(chain(*run_to_end(across, across.start(), global_batch=8)[0])) == Counter(chain(*expected))
    alone = [WindowedMixture({"b": PLANS["b"]}, balance=balance) for balance in ("window", ACROSS_SOURCES)]
    one, other = (run_to_end(each, each.start(), global_batch=8)[0] for each in alone)
    assert one == other
