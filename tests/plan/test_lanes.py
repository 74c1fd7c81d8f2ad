from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, CursorError, PackingError
from lmms_stream.plan.lane_cursor import LaneState
from lmms_stream.plan.lanes import UNMEASURED, Lane, LanePack, allowed_readers, check_lanes, default_lanes
from lmms_stream.plan.lengths import Lengths as PlanLengths
from lmms_stream.plan.lengths import hash_lengths
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import MAX_LENGTH, Overlong, PackingConfig, block_seed, pack
from numpy.typing import NDArray

from ..rounds import rounds
from ..strategies import STRATEGIES, Lengths, chat_lengths, examples, seeds

RULES: list[tuple[int, Overlong]] = [(0, "drop"), (1, "truncate"), (2, "split"), (3, "keep")]  # with their numbers
Pack = list[tuple[int, int, int]]  # (sample id, start, length) of each segment


def pairs_with_rules(*strategies: str) -> list[tuple[str, Overlong]]:
    """Return strategies with rules for overlong samples: all pairs in long rounds; in short ones each once at least."""
    every = [(strategy, rule) for strategy in strategies for _, rule in RULES]
    return rounds([(strategies[number % len(strategies)], rule) for number, rule in RULES], every)


class LaneCase(NamedTuple):
    lengths: Lengths
    sizes: list[int]
    order: OrderConfig
    packing: PackingConfig
    patches: Lengths | None = None  # of samples with media

    def lane(self, lane: int, state: LaneState | None = None, *, calls: list[NDArray[np.int64]] | None = None) -> Lane:
        """A lane that measures from the array, and notes in `calls` which samples it measures."""

        def measure(sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
            if calls is not None:
                calls.append(sample_ids)
            if self.patches is None:
                return self.lengths[sample_ids]
            return np.stack([self.lengths[sample_ids], self.patches[sample_ids]], axis=1)

        return Lane(self.sizes, order=self.order, packing=self.packing, lane=lane, measure=measure, state=state)

    def plan_packs(self, lane: int, epoch: int) -> list[Pack]:
        """What the plan has for the canonical node; without shuffle a plan has one, and its blocks are packed here."""
        if not self.order.shuffle:
            return self.packs_of_blocks(lane, epoch)
        plan = self.plan()
        packs = plan.packs(epoch, 0, plan.num_packs(epoch))
        segments = list(zip(packs.sample_ids.tolist(), packs.starts.tolist(), packs.lengths.tolist(), strict=True))
        bounds = zip(pairwise(packs.offsets.tolist()), packs.canonical_nodes.tolist(), strict=True)
        return [segments[first:stop] for (first, stop), node in bounds if node == lane]

    def plan(self) -> PackPlan:
        index = PlanLengths(
            lengths=self.lengths,
            content_hash=hash_lengths(self.lengths),
            patches=self.patches,
            patches_hash="" if self.patches is None else hash_lengths(self.patches),
        )
        return PackPlan(index, self.sizes, order=self.order, packing=self.packing)

    def packs_of_blocks(self, lane: int, epoch: int) -> list[Pack]:
        order, limit = EpochOrder(self.sizes, config=self.order, epoch=epoch), self.packing.packing_length
        found = []
        for block in range(order.num_blocks(lane)):
            ids = order.block(lane, block)
            seed = block_seed(self.order.seed, epoch=epoch, node=lane, block=block)
            patches = None if self.patches is None else self.patches[ids]
            packs = pack(self.lengths[ids], config=self.packing, seed=seed, patches=patches)
            pieces = np.zeros(len(packs.order), np.int64) if packs.pieces is None else packs.pieces
            for first, stop in pairwise(packs.offsets.tolist()):
                chosen, starts = ids[packs.order[first:stop]], pieces[first:stop] * limit
                most = MAX_LENGTH if self.packing.overlong == "keep" else limit
                sizes = np.minimum(self.lengths[chosen] - starts, most)
                found.append(list(zip(chosen.tolist(), starts.tolist(), sizes.tolist(), strict=True)))
        return found


@st.composite
def lane_cases(draw: st.DrawFn, *, overlongs: tuple[Overlong, ...] = get_args(Overlong)) -> LaneCase:
    """Lanes of at least one sample, with blocks and windows from one sample up and many samples longer than a pack.

    The first sample of the dataset fits, so that not every sample is dropped.
    """
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any))
    limit = draw(st.sampled_from([8, 100, 1000]))
    overlong = draw(st.sampled_from(overlongs))
    packing = PackingConfig(
        packing_length=limit,
        strategy=draw(st.sampled_from(STRATEGIES)),
        window=draw(st.sampled_from([1, 2, 4, 16, 1000])),
        overlong=overlong,
        max_samples_per_pack=draw(st.sampled_from([None, None, 1, 3])),
    )
    order = OrderConfig(
        seed=draw(seeds()),
        shuffle=draw(st.booleans()),
        num_canonical_nodes=draw(st.integers(1, min(4, sum(sizes)))),
        shuffle_block_size=draw(st.integers(1, 80)),
    )
    longest = limit if overlong == "error" else limit * draw(st.sampled_from([1, 2, 5]))
    rng = np.random.default_rng(draw(seeds()))
    lengths = rng.integers(1, max(1, longest // draw(st.sampled_from([1, 4]))) + 1, size=sum(sizes))
    return LaneCase(lengths, sizes, order, packing)


def small_case(**packing: Any) -> LaneCase:
    """Two lanes of four blocks each; some samples are longer than a pack."""
    lengths = chat_lengths(700, limit=2000, seed=3)
    order = OrderConfig(seed=5, num_canonical_nodes=2, shuffle_block_size=100)
    settings: dict[str, Any] = {"packing_length": 1024, "window": 16, "overlong": "split"} | packing
    return LaneCase(lengths, [300, 0, 400], order, PackingConfig(**settings))


def content(pack: LanePack) -> Pack:
    assert pack.sample_ids.dtype == pack.starts.dtype == pack.lengths.dtype == pack.expected.dtype == np.int64
    return list(zip(pack.sample_ids.tolist(), pack.starts.tolist(), pack.lengths.tolist(), strict=True))


def take(lane: Lane, num_packs: int) -> list[Pack]:
    return [content(lane.next_pack()) for _ in range(num_packs)]


def through_json(state: LaneState) -> LaneState:
    return LaneState.from_dict(json.loads(json.dumps(state.to_dict())))


@examples(75, many=1200)
@given(case=lane_cases())
def test_the_packs_of_a_lane_are_those_the_plan_has_for_its_canonical_node(case: LaneCase) -> None:
    for number in range(case.order.num_canonical_nodes or 1):
        lane = case.lane(number)
        num_packs = 0
        for epoch in range(2):
            expected = case.plan_packs(number, epoch)
            if not expected:
                with pytest.raises(PackingError, match=rf"^lane {number} has no packs in epoch {epoch}, "):
                    lane.next_pack()
                break
            assert take(lane, len(expected)) == expected
            num_packs += len(expected)
            assert (lane.state.num_packs, lane.epoch) == (num_packs, epoch)


@pytest.mark.parametrize(
    ("strategy", "overlong", "shuffle"),
    rounds(
        [(strategy, rule, (place + at) % 2 == 0) for place, strategy in enumerate(STRATEGIES) for at, rule in RULES],
        [(strategy, rule, shuffle) for strategy in STRATEGIES for _, rule in RULES for shuffle in (True, False)],
    ),
)
def test_each_strategy_and_rule_for_overlong_samples_packs_as_the_plan_does(
    strategy: str, overlong: Overlong, shuffle: bool
) -> None:
    case = small_case(strategy=strategy, overlong=overlong)
    case = case._replace(order=dataclasses.replace(case.order, shuffle=shuffle))
    for number in range(2):
        expected = case.plan_packs(number, 0) + case.plan_packs(number, 1)
        assert take(case.lane(number), len(expected)) == expected


@examples(60)
@given(case=lane_cases(overlongs=("error", "truncate", "split", "keep")))
def test_the_lanes_of_an_epoch_have_each_token_of_each_sample_once(case: LaneCase) -> None:
    limit = case.packing.packing_length
    kept = np.minimum(case.lengths, limit) if case.packing.overlong == "truncate" else case.lengths
    seen: set[tuple[int, int]] = set()
    for number in range(case.order.num_canonical_nodes or 1):
        lane = case.lane(number)
        while not lane.state.epoch:
            for sample_id, start, length in content(lane.next_pack()):
                tokens = {(sample_id, token) for token in range(start, start + length)}
                assert not seen & tokens
                seen |= tokens
    assert len(seen) == kept.sum()


@examples(150)
@given(case=lane_cases(), data=st.data())
def test_a_lane_goes_on_from_its_state_as_if_it_had_not_stopped(case: LaneCase, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, (case.order.num_canonical_nodes or 1) - 1))
    num_packs = [len(case.plan_packs(number, epoch)) for epoch in range(2)]
    if not all(num_packs):
        return
    expected = take(case.lane(number), sum(num_packs))
    first = data.draw(st.integers(0, len(expected)))
    second = data.draw(st.integers(first, len(expected)))
    lane = case.lane(number)
    assert take(lane, first) == expected[:first]
    lane = case.lane(number, through_json(lane.state))
    assert take(lane, second - first) == expected[first:second]
    uninterrupted = case.lane(number)
    take(uninterrupted, second)
    assert lane.state == uninterrupted.state
    lane = case.lane(number, through_json(lane.state))
    assert take(lane, len(expected) - second) == expected[second:]


@given(case=lane_cases(overlongs=("drop", "truncate", "split", "keep")), data=st.data())
@examples(100)
def test_samples_without_a_length_take_no_room_wherever_a_lane_stops(case: LaneCase, data: st.DataObject) -> None:
    is_bad = np.array(data.draw(st.lists(st.booleans(), min_size=len(case.lengths), max_size=len(case.lengths))))
    known = case._replace(lengths=np.where(is_bad, UNMEASURED, case.lengths.astype(np.int64)))
    number = data.draw(st.integers(0, int(case.order.num_canonical_nodes or 1) - 1))
    with suppress(PackingError):  # as none of the lane has a length that fits
        check_passed_over(case, known, number, is_bad, stops=data.draw(st.integers(0, 8)))
        return
    with pytest.raises(PackingError, match="cannot be measured"):
        take(known.lane(number), 8)


def check_passed_over(case: LaneCase, known: LaneCase, number: int, is_bad: NDArray[np.bool_], *, stops: int) -> None:
    """A lane without some samples is whole without them, and goes on after so many packs as if it had not stopped."""
    uninterrupted = known.lane(number)
    expected = take(uninterrupted, 8)
    assert not {sample_id for pack in expected for sample_id, _, _ in pack} & {*np.flatnonzero(is_bad).tolist()}
    if case.packing.overlong == "drop":  # as if they were too long
        longer = np.where(is_bad, case.packing.packing_length + 1, case.lengths.astype(np.int64))
        assert take(case._replace(lengths=longer).lane(number), 8) == expected
    lane = known.lane(number)
    assert take(lane, stops) == expected[:stops]
    resumed = known.lane(number, through_json(lane.state))
    assert take(resumed, 8 - stops) == expected[stops:]
    assert resumed.state == uninterrupted.state


@pytest.mark.parametrize(("strategy", "overlong"), pairs_with_rules("best_fit", "even_fit", "next_fit", "window_7"))
def test_a_lane_can_be_stopped_after_every_single_pack(strategy: str, overlong: Overlong) -> None:
    case = small_case(strategy=strategy, overlong=overlong)
    expected = case.plan_packs(1, 0) + case.plan_packs(1, 1)
    state = None
    for each in expected:
        lane = case.lane(1, state)
        assert content(lane.next_pack()) == each
        state = through_json(lane.state)


@pytest.mark.parametrize(("strategy", "overlong"), pairs_with_rules("best_fit", "next_fit", "window_16"))
def test_a_lane_measures_a_window_at_a_time_and_at_most_a_window_again(strategy: str, overlong: Overlong) -> None:
    case = small_case(strategy=strategy, overlong=overlong, window=16)
    kept = case.lengths <= (1024 if overlong == "drop" else 2000)

    def num_kept(calls: list[NDArray[np.int64]]) -> int:
        return sum(int(kept[sample_ids].sum()) for sample_ids in calls)

    calls: list[NDArray[np.int64]] = []
    lane = case.lane(0, calls=calls)
    for _ in case.plan_packs(0, 0):
        state, measured = lane.state, num_kept(calls)
        lane.next_pack()
        calls_again: list[NDArray[np.int64]] = []
        resumed = case.lane(0, state, calls=calls_again)
        assert calls_again == []
        resumed.next_pack()
        # The sample that follows shows whether the window is the last. A window may begin with a piece of a sample.
        assert num_kept(calls_again) - (num_kept(calls) - measured) <= 17 + (overlong == "split")
    assert sorted(np.concatenate(calls)) == sorted(set(np.concatenate(calls)))
    assert sum(map(len, calls)) == 350
    assert max(map(len, calls)) <= 17


def test_a_state_says_nothing_of_samples_other_than_those_that_wait() -> None:
    case = small_case(overlong="truncate", window=64)
    lane = case.lane(0)
    for _ in range(len(case.plan_packs(0, 0))):
        lane.next_pack()
        state = lane.state
        assert len(state.carried.samples) < 64
        assert len(json.dumps(state.to_dict())) < 1500
        assert sum(state.carried.sizes) == len(state.carried.samples) == len(state.carried.expected)


def test_expected_is_the_length_of_the_whole_sample() -> None:
    case = small_case()
    lane = case.lane(0)
    split = 0
    for _ in range(len(case.plan_packs(0, 0))):
        pack = lane.next_pack()
        assert np.array_equal(pack.expected, case.lengths[pack.sample_ids])
        split += int(np.count_nonzero(pack.expected > 1024))
    assert split


@pytest.mark.parametrize(("strategy", "overlong"), pairs_with_rules(*rounds(STRATEGIES[::3], STRATEGIES)))
def test_overlong_samples_are_counted_as_the_plan_counts_them_however_often_a_lane_stops(
    strategy: str, overlong: Overlong
) -> None:
    case = small_case(strategy=strategy, overlong=overlong)
    plan = PackPlan(case.lengths, case.sizes, order=case.order, packing=case.packing)
    met = [0, 0]
    for number in range(2):
        state = LaneState()
        for epoch in range(2):
            for _ in range(len(case.plan_packs(number, epoch))):
                lane = case.lane(number, state)
                lane.next_pack()
                state = through_json(lane.state)
            met[epoch] += state.num_overlong
    assert met == [plan.num_overlong(0), plan.num_overlong(0) + plan.num_overlong(1)]
    assert met[0] > 0


def test_windows_and_blocks_in_which_everything_is_dropped_are_passed_over() -> None:
    lengths = np.array([9] * 20 + [3, 9] + [9] * 20)
    order = OrderConfig(shuffle=False, num_canonical_nodes=1, shuffle_block_size=6)
    case = LaneCase(lengths, [42], order, PackingConfig(packing_length=8, window=2, overlong="drop"))
    lane = case.lane(0)
    for epoch in range(3):
        assert take(lane, 1) == [[(20, 0, 3)]]
        assert lane.epoch == epoch
    assert (lane.state.epoch, lane.state.num_packs) == (2, 3)


def test_a_lane_that_drops_a_whole_epoch_is_an_error_and_keeps_its_state() -> None:
    order = OrderConfig(num_canonical_nodes=1, shuffle_block_size=4)
    packing = PackingConfig(packing_length=8, window=2, overlong="drop")
    lane = LaneCase(np.full(10, 9), [10], order, packing).lane(0)
    for _ in range(2):
        with pytest.raises(
            PackingError,
            match=(
                r"^lane 0 has no packs in epoch 0, all its samples are longer than packing_length 8 and dropped, "
                r"or cannot be measured: raise packing_length, set overlong to truncate, split or keep, or correct the "
                r"processor$"
            ),
        ):
            lane.next_pack()
        assert lane.state == LaneState()


def test_first_fit_measures_a_whole_block() -> None:
    calls: list[NDArray[np.int64]] = []
    small_case(strategy="first_fit").lane(0, calls=calls).next_pack()
    assert [len(sample_ids) for sample_ids in calls] == [100]


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, r"^sample 3 has length 0: a sample must have at least one token$"),
        (-4, r"^sample 3 has length -4: a sample must have at least one token$"),
        (1 << 31, r"^sample 3 has length 2147483648: a sample may have up to 2147483647 tokens$"),
        (
            9,
            r"^sample 3 has length 9: it is longer than packing_length 8; raise packing_length, or set overlong to "
            r"drop, truncate, split or keep$",
        ),
    ],
)
def test_a_length_that_cannot_be_packed_is_refused_when_its_window_is_measured(length: int, message: str) -> None:
    order = OrderConfig(shuffle=False, num_canonical_nodes=1)
    packing = PackingConfig(packing_length=8, window=2)
    lane = LaneCase(np.array([8, 8, 8, length]), [4], order, packing).lane(0)
    assert sorted(take(lane, 2)) == [[(0, 0, 8)], [(1, 0, 8)]]
    state = lane.state
    with pytest.raises(PackingError, match=message):
        lane.next_pack()
    assert lane.state == state


def test_a_measure_that_leaves_out_samples_is_refused() -> None:
    lane = Lane(
        [8],
        order=OrderConfig(),
        packing=PackingConfig(packing_length=8, window=4),
        lane=0,
        measure=lambda sample_ids: np.ones(len(sample_ids) - 1, np.int64),
    )
    with pytest.raises(
        PackingError, match=r"^measure gave 4 lengths for 5 samples: it must return a length for each sample$"
    ):
        lane.next_pack()


def stopped_state() -> LaneState:
    """In the middle of a window with packs that waited for it."""
    lane = small_case().lane(0)
    while not (lane.state.taken and lane.state.carried.sizes):
        lane.next_pack()
    return lane.state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["epoch"], -1),
        (["epoch"], "0"),
        (["num_packs"], 1.5),
        (["num_packs"], 1 << 63),
        (["carried"], None),
        (["carried", "sizes"], [1]),
        (["carried", "firsts"], []),
        (["carried", "pieces"], [0]),
        (["carried", "expected"], [1 << 31]),
        (["carried", "samples"], 3),
    ],
)
def test_a_damaged_state_is_refused(path: list[str], value: Any) -> None:
    data: dict[str, Any] = stopped_state().to_dict()
    node = data
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(CursorError, match=r"^the saved lane state is damaged \(.*\): use another checkpoint$"):
        LaneState.from_dict(data)


@pytest.mark.parametrize("name", ["epoch", "taken", "carried"])
def test_a_state_that_lacks_a_part_is_refused(name: str) -> None:
    data = stopped_state().to_dict()
    del data[name]
    damaged: list[Any] = [data, {}, [], None]
    for state in damaged:
        with pytest.raises(CursorError, match=r"^the saved lane state is damaged \(.*\): use another checkpoint$"):
            LaneState.from_dict(state)


@pytest.mark.parametrize(
    ("changes", "packing"),
    [
        ({"block": 4}, {}),
        ({"epoch": 999}, {}),
        ({"num_overlong": 1 << 40}, {}),
        ({"sample": 100}, {}),
        ({"sample": 0}, {}),
        ({"piece": 1}, {"overlong": "drop"}),
        ({}, {"strategy": "first_fit"}),
        ({}, {"packing_length": 100, "overlong": "error"}),
    ],
)
def test_a_state_that_does_not_fit_the_lane_is_refused(changes: dict[str, Any], packing: dict[str, Any]) -> None:
    state = dataclasses.replace(stopped_state(), **changes)
    with pytest.raises(
        CursorError,
        match=(
            r"^the saved lane state does not fit lane 0 \(block \d+, sample \d+, \d+ packs carried\): restore its "
            r"dataset, order and packing settings, or use another checkpoint$"
        ),
    ):
        small_case(**packing).lane(0, state)


def test_a_state_with_segments_that_its_block_does_not_have_is_refused() -> None:
    state = stopped_state()
    carried = state.carried
    assert len(carried.samples) > 1
    twice = dataclasses.replace(carried, samples=(carried.samples[1],) * 2 + carried.samples[2:], pieces=())
    late = dataclasses.replace(carried, firsts=(state.segment, *carried.firsts[1:]))
    for changed in (twice, late):
        with pytest.raises(CursorError, match="the saved lane state does not fit lane 0"):
            small_case().lane(0, dataclasses.replace(state, carried=changed))
    lane = small_case(overlong="split").lane(0, dataclasses.replace(state, piece=500))
    with pytest.raises(CursorError, match=r"begins with piece 500 of sample \d+ of its block, and there is no such"):
        lane.next_pack()


def test_a_state_with_more_packs_taken_than_its_window_has_is_refused() -> None:
    lane = small_case().lane(0, dataclasses.replace(stopped_state(), taken=500))
    with pytest.raises(
        CursorError,
        match=(
            r"^the saved lane state has taken 500 packs of a window with \d+ packs: measured lengths have "
            r"changed; restore the dataset and its processor$"
        ),
    ):
        lane.next_pack()


@pytest.mark.parametrize("number", [-1, 2])
def test_a_lane_that_there_is_not_is_refused(number: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^lane must be from 0 to 1, got {number}: there is a lane for each of num_canonical_nodes$"
    ):
        small_case().lane(number)


def test_a_lane_without_samples_is_refused() -> None:
    case = LaneCase(np.ones(2, np.int64), [2], OrderConfig(num_canonical_nodes=3), PackingConfig(packing_length=8))
    with pytest.raises(
        ConfigError,
        match=(r"^lane 0 of 3 has no samples, the shards hold 2: set num_canonical_nodes to at most that number$"),
    ):
        case.lane(0)


@given(num_lanes=st.integers(1, 64), num_ranks=st.integers(1, 16), num_workers=st.integers(1, 8))
def test_lanes_are_shared_whole_exactly_when_the_readers_divide_them(
    num_lanes: int, num_ranks: int, num_workers: int
) -> None:
    readers = num_ranks * num_workers
    lanes_of_readers: dict[tuple[int, int], set[int]] = {}
    for number in range(num_lanes * readers):
        reader = number % num_ranks, number // num_ranks % num_workers
        lanes_of_readers.setdefault(reader, set()).add(number % num_lanes)
    shared = sum(map(len, lanes_of_readers.values())) > num_lanes
    assert shared == (readers not in allowed_readers(num_lanes))
    if shared:
        with pytest.raises(ConfigError, match="which cannot share"):
            check_lanes(num_lanes, num_ranks, num_workers)
        return
    check_lanes(num_lanes, num_ranks, num_workers)


def test_the_error_of_lanes_that_cannot_be_shared_names_what_is_allowed() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^2 ranks of 3 workers are 6 readers, which cannot share 8 lanes: ranks times workers must be one of "
            r"1, 2, 4, 8; change the number of workers, or set num_canonical_nodes to a multiple of 6$"
        ),
    ):
        check_lanes(8, 2, 3)


@given(num_samples=st.integers(0, 1 << 40), window=st.integers(1, 1 << 26))
def test_default_lanes_are_a_power_of_two_with_two_windows_each(num_samples: int, window: int) -> None:
    lanes = default_lanes(num_samples, window)
    assert lanes in (1, 2, 4, 8, 16, 32, 64)
    assert lanes == 1 or num_samples // lanes >= 2 * window
    assert lanes == 64 or num_samples // (2 * lanes) < 2 * window
