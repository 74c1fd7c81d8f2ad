"""A packing_length that changes at steps of a run: each sample once, exact lengths, positions and amounts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.ledger import StepLookup, Stretch
from lmms_stream.plan.mixture import Step
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig, PackRange
from lmms_stream.plan.source_ranges import SourceRange
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.tools.ledger.amounts import amounts_of, seen_tokens
from lmms_stream.types import World

from ..strategies import examples

LENGTHS = (8, 20, 50)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of drawn sources. lengths: packing_length by step."""

    sizes: tuple[tuple[int, ...], ...]  # samples of each shard of each source
    seed: int
    nodes: int
    block: int
    strategy: str
    overlong: Any
    lengths: Mapping[int, int]
    weights: bool
    balance: str | int
    global_batch: int

    def mixture(self) -> WindowedMixture:
        """Return the mixture, made anew."""
        rng = np.random.default_rng(self.seed)
        plans = {}
        for name, sizes in zip("abc", self.sizes, strict=False):
            most = min(LENGTHS) if self.overlong == "error" else 2 * max(LENGTHS)
            packing = PackingConfig(
                packing_length=self.lengths[0],
                later_lengths=tuple((step, length) for step, length in self.lengths.items() if step),
                strategy=self.strategy,
                window=16,
                overlong=self.overlong,
            )
            order = OrderConfig(seed=self.seed, num_canonical_nodes=self.nodes, shuffle_block_size=self.block)
            lengths = rng.integers(1, most + 1, sum(sizes)).astype(np.int32)
            plans[name] = PackPlan(lengths, sizes, order=order, packing=packing)
        weights = {name: 1 + number for number, name in enumerate(plans)} if self.weights else None
        max_epochs = dict.fromkeys(plans, 3) if self.weights else None
        return WindowedMixture(plans, weights=weights, max_epochs=max_epochs, balance=self.balance)

    def length_at(self, step: int) -> int:
        """Return the packing_length of a step."""
        return self.lengths[max(first for first in self.lengths if first <= step)]


RUNS = st.builds(
    Run,
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 99),
    nodes=st.integers(1, 3),
    block=st.sampled_from([5, 16, 64]),
    strategy=st.sampled_from(["best_fit", "first_fit", "next_fit", "window_4"]),
    overlong=st.sampled_from(["error", "drop", "truncate", "split", "keep"]),
    lengths=st.dictionaries(st.integers(1, 12), st.sampled_from(LENGTHS), max_size=3).flatmap(
        lambda later: st.sampled_from(LENGTHS).map(lambda first: {0: first, **later})
    ),
    weights=st.booleans(),
    balance=st.sampled_from(["deal", "deal", 2, 3, "across_sources"]),
    global_batch=st.integers(1, 5),
)


def _steps(run: Run, *, most: int = 40) -> list[tuple[Cursor, Step, PackRange]]:
    """Return the first steps of a run, with the cursor before each."""
    found: list[tuple[Cursor, Step, PackRange]] = []
    try:
        mixture = run.mixture()
        cursor = mixture.start()
    except ConfigError:  # all samples are dropped
        reject()
    while len(found) < most:
        step = mixture.step(cursor, global_batch=run.global_batch)
        if not step.num_packs:
            break
        found.append((cursor, step, mixture.packs(step.ranges)))
        cursor = step.after
    return found


def _segments(packs: PackRange) -> list[tuple[int, int, int, int, int]]:
    """Return source, epoch, sample, first token and tokens of each segment."""
    assert packs.epochs is not None
    counts = np.diff(packs.offsets)
    columns = np.repeat(packs.sources, counts), np.repeat(packs.epochs, counts), packs.sample_ids, packs.starts
    return list(zip(*(each.tolist() for each in (*columns, packs.lengths)), strict=True))


@examples(60)
@given(run=RUNS)
def test_each_sample_is_read_once_an_epoch_in_packs_of_its_steps_length(run: Run) -> None:
    steps = _steps(run)
    plans = run.mixture().plans
    read: dict[tuple[int, int], dict[int, list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    last: dict[int, int] = {}
    for cursor, _, packs in steps:
        limit = run.length_at(cursor.step)
        of_packs = np.add.reduceat(packs.lengths, packs.offsets[:-1])
        is_kept = (np.diff(packs.offsets) == 1) & (run.overlong == "keep")
        if run.balance == "deal":
            assert (of_packs[~is_kept] <= limit).all()
        for source, epoch, sample_id, start, length in _segments(packs):
            read[source, epoch][sample_id].append((start, length, limit))
            last[source] = max(last.get(source, 0), epoch)
    for (source, epoch), samples in read.items():
        plan = list(plans.values())[source]
        for sample_id, pieces in samples.items():
            total, ends = int(plan.lengths[sample_id]), [0]
            for start, length, _ in sorted(pieces):
                ends.append(start + length)
            is_whole = epoch < last[source] or len(pieces) == 1
            assert len({start for start, _, _ in pieces}) == len(pieces)
            if run.overlong == "truncate":
                assert pieces[0][0] == 0
                assert len(pieces) == 1
                assert pieces[0][1] <= total
            elif is_whole and run.overlong == "split" and epoch < last[source]:
                assert [start for start, _, _ in sorted(pieces)] == ends[:-1]
                assert ends[-1] == total
            elif run.overlong != "split":
                assert pieces == [(0, total, pieces[0][2])]
        if epoch < last[source] and run.overlong != "drop":
            assert len(samples) == plan.num_samples


@examples(60)
@given(run=RUNS, data=st.data())
def test_a_state_goes_on_anywhere_and_skips_find_packs_and_lengths_agree(run: Run, data: st.DataObject) -> None:
    steps = _steps(run)
    at = data.draw(st.integers(0, len(steps) - 1))
    cursor = Cursor.from_dict(json.loads(json.dumps(steps[at][0].to_dict())))
    assert cursor == replace(steps[at][0], shares=cursor.shares)  # of a source alone, they are not saved
    mixture = run.mixture()
    cursor = mixture.adopt(cursor)
    again = mixture.step(cursor, global_batch=run.global_batch)
    assert again.after == steps[at][1].after
    assert _segments(mixture.packs(again.ranges)) == _segments(steps[at][2])
    fresh = run.mixture()
    assert fresh.skip(fresh.start(), at, global_batch=run.global_batch) == steps[at][0]
    before = data.draw(st.integers(0, at))
    pack = steps[at][1].ranges[data.draw(st.integers(0, len(steps[at][1].ranges) - 1))]
    single = SourceRange(pack.source, pack.epoch, pack.first, pack.first + 1)
    found = run.mixture().step_of(steps[before][0], single, global_batch=run.global_batch, num_steps=100)
    assert found is not None
    assert found.step == steps[at][0].step


@examples(40)
@given(run=RUNS)
def test_the_packs_left_are_the_packs_that_come(run: Run) -> None:
    steps = _steps(run, most=200)
    if len(steps) == 200:
        return
    ends = [number for number, (_, step, _) in enumerate(steps) if step.ends_epoch]
    if not run.weights:
        counts = run.mixture().packs_of_epochs(steps[0][0], 2, global_batch=run.global_batch)
        begins = [0, *(end + 1 for end in ends)]
        made = [sum(step.num_packs for _, step, _ in steps[a : b + 1]) for a, b in zip(begins, ends, strict=False)]
        assert counts[: len(made)] == made[:2]
    for number, (cursor, _, _) in enumerate(steps):
        end = next((end for end in ends if end >= number), None)
        if end is not None:
            left = sum(step.num_packs for _, step, _ in steps[number : end + 1])
            assert run.mixture().packs_left(cursor, global_batch=run.global_batch) == left


@examples(60)
@given(run=RUNS)
def test_the_ledger_counts_what_the_steps_read(run: Run) -> None:
    steps = _steps(run)
    mixture = run.mixture()
    world = World(world_size=1, num_nodes=1)
    ledger = StepLookup([Stretch(cursor=steps[0][0], mixture=mixture, global_batch=run.global_batch, world=world)])
    stop = len(steps)
    samples: dict[str, set[tuple[int, int]]] = defaultdict(set)
    tokens: dict[str, int] = defaultdict(int)
    different: dict[str, set[tuple[int, int]]] = defaultdict(set)  # sample, and number of the token
    for _, _, packs in steps:
        for source, epoch, sample_id, start, length in _segments(packs):
            samples[mixture.names[source]].add((epoch, sample_id))
            tokens[mixture.names[source]] += length
            different[mixture.names[source]] |= {(sample_id, start + number) for number in range(length)}
    for name, found in amounts_of(ledger, stop).items():
        assert (found.num_samples, found.num_tokens) == (len(samples[name]), tokens[name])
        assert seen_tokens(ledger, name, stop) == len(different[name])
        assert found.num_seen == len({sample_id for _, sample_id in samples[name]})
    source, epoch, sample_id, _, _ = _segments(steps[-1][2])[0]
    entries = ledger.sample(mixture.names[source], sample_id, stop=stop)
    assert any(entry.epoch == epoch and entry.step == stop - 1 for entry in entries)


def test_lengths_are_checked() -> None:
    with pytest.raises(ConfigError, match="packing_length must be at least 1"):
        PackingConfig(packing_length=8, later_lengths=((4, 0),))
    with pytest.raises(ConfigError, match="first step of packing_length must be at least 1"):
        PackingConfig(packing_length=8, later_lengths=((0, 16),))
    with pytest.raises(ConfigError, match="set reshuffle to true"):
        PackPlan(
            np.ones(4, np.int32),
            [4],
            order=OrderConfig(reshuffle=False),
            packing=PackingConfig(packing_length=8, later_lengths=((4, 16),)),
        )


def test_a_position_in_a_window_that_is_loaded_again_gives_the_same_packs() -> None:
    """A loader that is iterated again loads its position in the same mixture."""
    run = Run(
        sizes=((40,), (30,)), seed=3, nodes=1, block=64, strategy="best_fit", overlong="split",
        lengths={0: 50, 2: 20, 4: 8}, weights=False, balance=6, global_batch=4,
    )  # fmt: skip
    mixture = run.mixture()
    cursor = mixture.start()
    for _ in range(7):
        cursor = mixture.step(cursor, global_batch=4).after
    assert cursor.window is not None

    def sample_ids(mixture: WindowedMixture) -> list[int]:
        ranges = mixture.step(mixture.adopt(cursor), global_batch=4).ranges
        ids: list[int] = mixture.packs(ranges).sample_ids.tolist()
        return ids

    assert sample_ids(mixture) == sample_ids(run.mixture())
