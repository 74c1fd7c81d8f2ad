"""Turns by heaps, against a plain loop that looks at every source in every turn."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lmms_stream.plan.kernels import turns
from lmms_stream.plan.kernels.turns import NEVER, Sizes, no_sizes, take_epochs
from lmms_stream.plan.source_ranges import TOKEN_UNIT, UNIT, to_quotas
from numpy.typing import NDArray

from ..strategies import examples


def _deadline(lack: int, turn: int, most: int, quotas: list[int], ends: list[int], phase: int) -> int:
    for quota, stop in list(zip(quotas, ends, strict=True))[phase:]:
        if quota > 0 and stop > turn:
            if turn + (waits := (most - lack) // quota - 1) < stop - 1:
                return turn + waits
            lack += quota * (stop - turn)
        turn = max(turn, stop)
    return int(NEVER)


def turns_one_by_one(
    count: int, left: list[int], credits: list[int], quotas: list[list[int]], ends: list[int], least: int
) -> list[int]:
    """The source of each turn, until `count` turns were taken or a source has none left; credits are changed."""
    found: list[int] = []
    of_source = list(map(list, zip(*quotas, strict=True)))
    deadlines = [_deadline(lack, 0, UNIT - least, of_source[n], ends, 0) for n, lack in enumerate(credits)]
    for turn in range(count):
        phase = next(number for number, end in enumerate(ends) if turn < end)
        for source, quota in enumerate(quotas[phase]):
            credits[source] += quota
        chosen = min((n for n, lack in enumerate(credits) if lack >= least), key=lambda n: (deadlines[n], n))
        credits[chosen] -= UNIT
        found.append(chosen)
        if found.count(chosen) == left[chosen]:
            break
        deadlines[chosen] = _deadline(credits[chosen], turn + 1, UNIT - least, of_source[chosen], ends, phase)
    return found


Numbers = NDArray[np.int64]


def take_turns(
    count: int, left: Numbers, credits: Numbers, quotas: Numbers, ends: Numbers, unit: int, least: int, sizes: Sizes
) -> tuple[int, list[int]]:
    """Take up to `count` turns until a source ends, by the loops of take_epochs; return turns, and packs by source."""
    before, state = left.copy(), turns.TurnHeaps(left, credits, quotas, ends, unit, least, sizes)
    state.begin()
    turn = state.take(0, count)
    state.end()
    return turn, (before - left).tolist()


def token_turn(lacks: list[int], quotas: list[list[int]], ends: list[int], full: int) -> int:
    """The source of the next turn by tokens. ends: turns left in each phase."""
    in_full = [min(int(NEVER), end * full) for end in ends]
    most = full * TOKEN_UNIT - 1
    ready = [n for n, lack in enumerate(lacks) if lack + quotas[0][n] >= 1]
    return min(ready, key=lambda n: (_deadline(lacks[n], 0, most, [each[n] for each in quotas], in_full, 0), n))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], list[int]]:
    """left, credits, quotas and ends of 2 to 12 sources in up to 4 phases."""
    num_sources = draw(st.integers(2, 12))
    shares = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    phases = draw(st.lists(shares, min_size=1, max_size=4))
    quotas = [to_quotas([Fraction(share) for share in each]).tolist() for each in phases]
    ends = sorted(draw(st.lists(st.integers(1, 60), min_size=len(phases) - 1, max_size=len(phases) - 1)))
    left = draw(st.lists(st.integers(1, 40), min_size=num_sources, max_size=num_sources))
    credits = draw(st.lists(st.integers(-UNIT, UNIT), min_size=num_sources, max_size=num_sources))
    credits[0] -= sum(credits)
    return left, credits, quotas, [*ends, int(NEVER)]


@examples(100)
@given(case=cases(), count=st.integers(1, 90))
@example(case=([1, 1, 1], [0, 0, 0], [[0, UNIT // 2, UNIT // 2], [0, 0, UNIT]], [1, int(NEVER)]), count=1)
def test_turns_by_heaps_are_those_of_a_look_at_every_source(
    case: tuple[list[int], list[int], list[list[int]], list[int]], count: int
) -> None:
    left, credits, quotas, ends = case
    least = UNIT // max(2, 2 * len(left) - 2)
    expected, lacks = turns_one_by_one(count, left, after := [*credits], quotas, ends, least), np.array(credits)
    counts = np.array(left)
    found = take_turns(count, counts, lacks, np.array(quotas), np.array(ends), UNIT, least, no_sizes(len(left)))
    assert found == (len(expected), np.bincount(expected, minlength=len(left)).tolist())
    assert counts.tolist() == [a - b for a, b in zip(left, found[1], strict=True)]
    assert lacks.tolist() == after


@examples(100)
@given(
    case=cases(),
    count=st.integers(1, 300),
    num_rows=st.sampled_from([0, 12, 1000]),
    steps=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_ends_of_epochs_and_steps_change_no_turns(
    case: tuple[list[int], list[int], list[list[int]], list[int]], count: int, num_rows: int, steps: tuple[int, int]
) -> None:
    """Sources whose epochs have `left` packs each take the turns of sources that have no ends."""
    left, credits, quotas, _ = case
    num_sources, num_epochs, least = len(left), 301, UNIT // max(2, 2 * len(left) - 2)
    counts, firsts = np.repeat(left, num_epochs), np.arange(num_sources + 1) * num_epochs
    lacks, rows = np.array(credits), np.zeros((num_rows, 4), np.int64)
    at, packs, until = np.zeros(num_sources, np.int64), np.zeros(num_sources, np.int64), np.array([-1, 0, 0])
    ends = np.array([NEVER])
    done, written, over = take_epochs(
        count, at, packs, counts, firsts, lacks, np.array(quotas[:1]), ends, UNIT, least, until, steps, rows,
        no_sizes(num_sources),
    )  # fmt: skip
    assert over == -1
    assert done == count or num_rows == 12
    expected = turns_one_by_one(done, [count + 1] * num_sources, after := [*credits], quotas[:1], [int(NEVER)], least)
    taken = np.bincount(expected, minlength=num_sources)
    assert (at * left + packs).tolist() == taken.tolist()
    assert lacks.tolist() == after
    if num_rows:
        of_rows = rows[:written]
        sizes = of_rows[:, 3] - of_rows[:, 2]
        assert np.bincount(of_rows[:, 0], sizes, num_sources).tolist() == taken.tolist()
        begins = np.cumsum(sizes) - sizes
        if num_sources > 1:
            of_step = np.append(np.zeros(steps[0], np.int64), 1 + np.arange(done) // steps[1])
            assert np.array_equal(of_step[begins], of_step[begins + sizes - 1])


@examples(100)
@given(case=cases(), count=st.integers(1, 90), full=st.integers(1, 40), seed=st.integers(0, 99))
def test_turns_by_tokens_are_those_of_a_look_at_every_source(
    case: tuple[list[int], list[int], list[list[int]], list[int]], count: int, full: int, seed: int
) -> None:
    left, credits, quotas, ends = case
    units = [to_quotas([Fraction(share) for share in each], TOKEN_UNIT) for each in quotas]
    lacks = [credit * full // (UNIT // TOKEN_UNIT) for credit in credits[1:]]
    lacks = [-sum(lacks), *lacks]
    tokens = np.random.default_rng(seed).integers(1, full + 1, (len(left), count + 1))
    after, taken, turn = [*lacks], [0] * len(left), 0
    while turn < count and all(a > b for a, b in zip(left, taken, strict=True)):
        now = sum(end <= turn for end in ends)
        chosen = token_turn(after, [each.tolist() for each in units[now:]], [end - turn for end in ends[now:]], full)
        size = int(tokens[chosen, taken[chosen]])
        after = [a + int(quota) * size for a, quota in zip(after, units[now], strict=True)]
        after[chosen] -= TOKEN_UNIT * size
        taken[chosen], turn = taken[chosen] + 1, turn + 1
    found, counts = np.array(lacks), np.array(left)
    nothing = np.zeros(len(left), np.int64)
    sizes = Sizes(tokens, nothing, nothing + count + 1, np.zeros(len(left), np.bool_), full)
    in_full = np.array([min(int(NEVER), end * full) for end in ends])
    num_taken = take_turns(count, counts, found, np.stack(units), in_full, TOKEN_UNIT * full, 1, sizes)
    assert (*num_taken, found.tolist()) == (turn, taken, after)


def test_an_end_of_an_epoch_looks_at_no_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are computed for each source once, and once a turn; the loops run without compilation here."""
    spec = importlib.util.spec_from_file_location("turns", Path(turns.__file__).with_name("turns.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    num_deadlines = 0
    deadline = module.TurnHeaps.deadline

    def counted(*args: object) -> object:
        nonlocal num_deadlines
        num_deadlines += 1
        return deadline(*args)

    monkeypatch.setattr(module.TurnHeaps, "deadline", counted)
    num_sources, count = 50, 200
    quotas = to_quotas([Fraction(1)] * num_sources)[None]
    at, packs, credits = (np.zeros(num_sources, np.int64) for _ in range(3))
    counts, firsts = np.ones(num_sources * 9, np.int64), np.arange(num_sources + 1) * 9
    done, _, _ = module.take_epochs(
        count, at, packs, counts, firsts, credits, quotas, np.array([NEVER]), UNIT, UNIT // 98, np.array([-1, 0, 0]),
        (count, count), np.zeros((count + num_sources, 4), np.int64), no_sizes(num_sources),
    )  # fmt: skip
    assert done == count
    assert at.tolist() == [4] * num_sources
    assert num_deadlines <= num_sources + count
