from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.plan.order import EpochOrder, OrderConfig, in_stored_order
from lmms_stream.plan.sample_order import Reader, SampleOrder, StreamShare, positions_read, samples_chosen
from numpy.typing import NDArray

from ..strategies import examples, order_configs, shard_sizes

Ids = NDArray[np.int64]


class Case(NamedTuple):
    shards: list[Ids]
    counts: list[int]
    config: OrderConfig

    def order(self, epoch: int) -> SampleOrder:
        return SampleOrder(self.shards, counts=self.counts, config=self.config, epoch=epoch)

    def ids(self, epoch: int) -> list[int]:
        order = self.order(epoch)
        return [int(sample) for sample in order.ids(0, order.num_samples)]

    @property
    def sizes(self) -> list[int]:
        return [int(sizes.sum()) for sizes in self.shards]

    def stream_of(self, ids: list[int]) -> list[int]:
        return [int(k) for k in np.searchsorted(np.cumsum(self.sizes), ids, side="right")]


@st.composite
def cases(draw: st.DrawFn, *, whole: bool = False, max_streams: int = 4) -> Case:
    """Up to four streams, taken in part, whole or several times over, some of them not at all."""
    shards = [
        np.array(sizes, np.int64)
        for sizes in draw(st.lists(shard_sizes().filter(any), min_size=1, max_size=max_streams))
    ]
    limits = [int(sizes.sum()) for sizes in shards]
    counts = limits if whole else [draw(st.integers(0, 3 * limit) | st.just(limit)) for limit in limits]
    return Case(shards, counts, draw(order_configs()))


@st.composite
def readers(draw: st.DrawFn) -> list[Reader]:
    """All readers of a world of up to four machines."""
    num_nodes = draw(st.sampled_from([1, 1, 2, 3, 4]))
    num_groups = num_nodes * draw(st.integers(1, 3)) if draw(st.booleans()) else draw(st.integers(1, 5))
    num_workers, batch_size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return [
        Reader(
            batch_size=batch_size,
            num_groups=num_groups,
            group=group,
            num_workers=num_workers,
            worker=worker,
            num_nodes=num_nodes,
        )
        for group in range(num_groups)
        for worker in range(num_workers)
    ]


def take_turns(queues: list[list[int]]) -> list[int]:
    """One of each queue that has any left, round after round."""
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def naive_order(case: Case, epoch: int) -> list[int]:
    """The definition in the module's docstring, without any arithmetic to spare work."""
    num_nodes = case.order(epoch).num_canonical_nodes
    per_node: list[list[tuple[Fraction, int, int]]] = [[] for _ in range(num_nodes)]  # (due, stream, sample)
    taken: dict[tuple[int, int], list[int]] = {}
    for stream, (shards, number) in enumerate(zip(case.shards, case.counts, strict=True)):
        seed = (case.config.seed + stream * 0x9E3779B9) % 2**32
        config = OrderConfig(
            seed=seed,
            shuffle=case.config.shuffle,
            num_canonical_nodes=num_nodes,
            shuffle_block_size=case.config.shuffle_block_size,
        )
        dealt: list[tuple[int, int]] = []  # (sample, canonical node), pass after pass
        for number_of_pass in count():
            if len(dealt) >= (epoch + 1) * number:
                break
            order = EpochOrder(shards, config=config, epoch=number_of_pass)
            sections = [np.concatenate([[], *blocks]).astype(int).tolist() for blocks in node_blocks(order)]
            node_of = {sample: node for node, section in enumerate(sections) for sample in section}
            dealt += [(sample, node_of[sample]) for sample in take_turns(sections)]
        for sample, node in dealt[epoch * number : (epoch + 1) * number]:
            taken.setdefault((stream, node), []).append(sample + sum(case.sizes[:stream]))
    for node, samples in enumerate(per_node):
        total = sum(len(ids) for (_, home), ids in taken.items() if home == node)
        for (stream, home), ids in taken.items():
            phase = Fraction(2 * ((node + stream * num_nodes // len(case.shards)) % num_nodes) + 1, 2 * num_nodes)
            if home == node:
                due = [math.floor((j + phase) / len(ids) * total * 64) for j in range(len(ids))]
                samples += [(Fraction(tick), stream, sample) for tick, sample in zip(due, ids, strict=True)]
        samples.sort(key=lambda sample: sample[:2])
    return take_turns([[sample for *_, sample in samples] for samples in per_node])


def node_blocks(order: EpochOrder) -> list[list[Ids]]:
    nodes = range(order.num_canonical_nodes)
    return [[order.block(node, block) for block in range(order.num_blocks(node))] for node in nodes]


def shares_of_all(order: SampleOrder, world: list[Reader], first: int) -> list[int]:
    return [int(i) for reader in world for ids in order.share(first, reader=reader) for i in ids]


# The order


@examples(150)
@given(case=cases(), epoch=st.integers(0, 3))
def test_the_order_is_the_one_that_the_module_describes(case: Case, epoch: int) -> None:
    assert case.ids(epoch) == naive_order(case, epoch)


@examples(100)
@given(case=cases(whole=True), epoch=st.integers(0, 3))
def test_streams_taken_whole_give_each_sample_once_an_epoch(case: Case, epoch: int) -> None:
    assert sorted(case.ids(epoch)) == list(range(sum(case.sizes)))


@examples(100)
@given(case=cases(), num_epochs=st.integers(1, 5))
def test_no_sample_comes_again_before_every_sample_of_its_stream_has_come(case: Case, num_epochs: int) -> None:
    came = Counter(sample for epoch in range(num_epochs) for sample in case.ids(epoch))
    firsts = np.cumsum([0, *case.sizes])
    for (first, stop), number in zip(pairwise(firsts.tolist()), case.counts, strict=True):
        times = [came[sample] for sample in range(first, stop)]
        passes, more = divmod(num_epochs * number, stop - first)
        assert Counter(times) == Counter({passes: stop - first - more, passes + 1: more})


@examples(60)
@given(case=cases(), epoch=st.integers(0, 3))
def test_an_epoch_takes_of_each_stream_what_was_asked(case: Case, epoch: int) -> None:
    per_stream = Counter(case.stream_of(case.ids(epoch)))
    assert [per_stream[stream] for stream in range(len(case.counts))] == case.counts
    assert case.order(epoch).num_samples == sum(case.counts)


@examples(80)
@given(sizes=shard_sizes().filter(any), config=order_configs(), epoch=st.integers(0, 3))
def test_one_stream_taken_whole_is_its_epoch_order_read_round_robin(
    sizes: list[int], config: OrderConfig, epoch: int
) -> None:
    case = Case([np.array(sizes, np.int64)], [sum(sizes)], config)
    order = EpochOrder(sizes, config=in_stored_order(config), epoch=epoch)
    sections = [[int(i) for ids in blocks for i in ids] for blocks in node_blocks(order)]
    assert case.order(epoch).num_canonical_nodes == order.num_canonical_nodes
    assert case.ids(epoch) == take_turns(sections)


@examples(60)
@given(sizes=shard_sizes().filter(any), number=st.integers(1, 200), block=st.integers(1, 80))
def test_one_stream_without_shuffle_comes_in_stored_order_over_and_over(
    sizes: list[int], number: int, block: int
) -> None:
    config = OrderConfig(shuffle=False, num_canonical_nodes=5, shuffle_block_size=block)
    case = Case([np.array(sizes, np.int64)], [number], config)
    came = [sample for epoch in range(3) for sample in case.ids(epoch)]
    assert came == [position % sum(sizes) for position in range(3 * number)]


@examples(80)
@given(case=cases(), epoch=st.integers(0, 3))
def test_on_one_canonical_node_every_prefix_holds_the_streams_in_proportion(case: Case, epoch: int) -> None:
    config = OrderConfig(seed=case.config.seed, num_canonical_nodes=1, shuffle_block_size=9)
    case = case._replace(config=config)
    came = [0] * len(case.counts)
    num_streams, total = sum(map(bool, case.counts)), sum(case.counts)
    for length, stream in enumerate(case.stream_of(case.ids(epoch)), start=1):
        came[stream] += 1
        for number, had in zip(case.counts, came, strict=True):
            part = Fraction(number, total)
            # Half a sample of its own and its part of the half samples of the others; times are rounded to 1/64.
            bound = Fraction(1, 2) + part * (num_streams - 2) / 2 + Fraction(num_streams, 64)
            assert abs(had - length * part) <= bound < max(2, num_streams)


@examples(80)
@given(data=st.data(), num_nodes=st.integers(1, 8), num_streams=st.integers(1, 4), epoch=st.integers(0, 2))
def test_on_equal_canonical_nodes_no_prefix_is_far_from_the_proportions(
    data: st.DataObject, num_nodes: int, num_streams: int, epoch: int
) -> None:
    rounds = data.draw(st.lists(st.integers(1, 40), min_size=num_streams, max_size=num_streams))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=num_streams, max_size=num_streams))
    case = Case(
        [np.array([num_nodes * size]) for size in sizes],
        [num_nodes * number for number in rounds],
        OrderConfig(num_canonical_nodes=num_nodes),
    )
    came = np.zeros(num_streams)
    for length, stream in enumerate(case.stream_of(case.ids(epoch)), start=1):
        came[stream] += 1
        expected = length * np.array(case.counts) / sum(case.counts)
        assert np.abs(came - expected).max() < num_nodes * max(1.1, num_streams - 1)


def test_canonical_nodes_turn_to_different_streams_at_a_time() -> None:
    case = Case([np.array([800])] * 2, [800, 800], OrderConfig(num_canonical_nodes=8))
    rounds = np.array(case.stream_of(case.ids(0))).reshape(-1, 8)
    assert (rounds.sum(axis=1) == 4).all()


def test_epochs_streams_and_seeds_are_shuffled_differently() -> None:
    orders = set()
    for seed in (0, 1, 2**32 - 1):
        config = OrderConfig(seed=seed, num_canonical_nodes=1)
        case = Case([np.full(10, 20)] * 3, [200] * 3, config)
        for epoch in range(3):
            ids = np.array(case.ids(epoch))
            orders |= {tuple(ids[ids // 200 == stream] % 200) for stream in range(3)}
    assert len(orders) == 27


def test_canonical_nodes_follow_from_the_stored_samples_alone() -> None:
    shards = [np.full(4, 1 << 16), np.full(4, 1 << 16)]
    for counts in ([1, 1], [1 << 18, 0], [1 << 22, 5]):
        assert SampleOrder(shards, counts=counts, config=OrderConfig(), epoch=0).num_canonical_nodes == 4


# Any position


@examples(100)
@given(case=cases(), epoch=st.integers(0, 3), data=st.data())
def test_any_range_of_positions_is_a_slice_of_the_epoch(case: Case, epoch: int, data: st.DataObject) -> None:
    whole = case.ids(epoch)
    reader = case.order(epoch)  # has read nothing yet
    for _ in range(4):
        first = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(first, len(whole)))
        assert reader.ids(first, stop).tolist() == whole[first:stop]


def test_billions_of_samples_are_interleaved_without_overflow_and_read_from_anywhere_at_once() -> None:
    shards = [np.full(100_000, 100_000), np.full(1000, 3_000_000)]
    counts = [10**10, 3 * 10**9 + 7]
    for epoch in (0, 5):
        order = SampleOrder(shards, counts=counts, config=OrderConfig(shuffle_block_size=1 << 12), epoch=epoch)
        for first in (0, 9_876_543_210, order.num_samples - 5000):
            ids = order.ids(first, first + 5000)
            assert np.array_equal(ids[1234:], order.ids(first + 1234, first + 5000))
            assert len(np.unique(ids)) == 5000
            assert np.count_nonzero(ids >= 10**10) == pytest.approx(5000 * 3 / 13, abs=2 * 8)


def test_a_long_epoch_read_in_chunks_equals_the_same_epoch_read_at_once() -> None:
    shards = [np.full(900, 1000), np.full(90, 1000), np.full(1, 7)]
    order = SampleOrder(shards, counts=[900_001, 200_000, 100], config=OrderConfig(seed=4), epoch=0)
    at_once = order.ids(0, order.num_samples)
    chunks = list(order.share(0, reader=Reader(batch_size=1)))
    assert len(chunks) > 10
    assert np.array_equal(at_once, np.concatenate(chunks))
    assert len(np.unique(at_once[at_once < 900_000])) == 900_000


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 8)])
def test_positions_outside_the_epoch_are_refused(first: int, stop: int) -> None:
    order = SampleOrder([np.array([7])], counts=[7], config=OrderConfig(), epoch=0)
    message = r"requested from an epoch of 7 samples: restore its streams and shares$"
    with pytest.raises(CursorError, match=rf"^positions \[{first}, {stop}\) {message}"):
        order.ids(first, stop)
    with pytest.raises(CursorError, match=rf"^positions \[8, 7\) {message}"):
        order.share(8, reader=Reader(batch_size=1))


# Readers


@examples(100)
@given(case=cases(), world=readers(), epoch=st.integers(0, 2), data=st.data())
def test_readers_of_any_world_read_the_rest_of_the_epoch_and_groups_equally_much(
    case: Case, world: list[Reader], epoch: int, data: st.DataObject
) -> None:
    whole = case.ids(epoch)
    first = data.draw(st.integers(0, len(whole)))
    read, rest = Counter(shares_of_all(case.order(epoch), world, first)), Counter(whole[first:])
    assert not rest - read
    again = read - rest  # fewer than there are groups, so that all groups read as many
    num_groups = world[0].num_groups
    assert again.total() == -len(whole[first:]) % num_groups
    assert set(again) <= set(whole)
    of_group = Counter[int]()
    for reader in world:
        of_group[reader.group] += sum(map(len, case.order(epoch).share(first, reader=reader)))
    assert set(of_group.values()) == {read.total() // num_groups}


@examples(200)
@given(world=readers(), first=st.integers(0, 50), length=st.integers(0, 400), num_canonical_nodes=st.integers(1, 16))
def test_after_n_batches_of_every_group_a_prefix_has_been_read(
    world: list[Reader], first: int, length: int, num_canonical_nodes: int
) -> None:
    size, num_groups = world[0].batch_size, world[0].num_groups
    batches: dict[int, list[int]] = {}  # number -> positions of all groups
    parts = Counter[tuple[int, int]]()  # (number, group) -> samples
    num_full = length // (size * num_groups)
    for reader in world:
        ranges = positions_read(first, first + length, reader=reader, num_canonical_nodes=num_canonical_nodes)
        mine = [int(position) for positions in ranges for position in positions]
        assert mine == sorted(mine)
        numbers = count(reader.worker, reader.num_workers)
        for number, at in zip(numbers, range(0, len(mine), size), strict=False):
            batches.setdefault(number, []).extend(mine[at : at + size])
            parts[number, reader.group] += len(mine[at : at + size])
    for number, positions in batches.items():
        start = first + number * size * num_groups
        assert sorted(positions) == list(range(start, min(start + size * num_groups, first + length)))
    assert sum(map(len, batches.values())) == length
    assert all(parts[number, group] == size for number in range(num_full) for group in range(num_groups))
    last = [parts[num_full, group] for group in range(num_groups)]
    assert max(last) - min(last) <= 1


@examples(150)
@given(
    machines=st.integers(1, 4),
    groups_each=st.integers(1, 3),
    nodes_each=st.integers(1, 4),
    size=st.integers(1, 12),
    first=st.integers(0, 50),
    num_batches=st.integers(1, 5),
)
def test_a_machine_reads_its_own_canonical_nodes_where_the_counts_divide(
    machines: int, groups_each: int, nodes_each: int, size: int, first: int, num_batches: int
) -> None:
    num_groups, num_canonical_nodes = machines * groups_each, machines * nodes_each
    divides = num_groups * size % num_canonical_nodes == 0
    for group in range(num_groups):
        reader = Reader(batch_size=size, num_groups=num_groups, group=group, num_nodes=machines)
        stop = first + num_batches * num_groups * size
        ranges = positions_read(first, stop, reader=reader, num_canonical_nodes=num_canonical_nodes)
        positions = np.concatenate(list(ranges))
        if divides:
            assert set(positions % num_canonical_nodes // nodes_each) == {group // groups_each}
        else:
            start = first + group * size
            runs = [
                range(start + b * num_groups * size, start + b * num_groups * size + size) for b in range(num_batches)
            ]
            assert positions.tolist() == [position for run in runs for position in run]


def test_each_of_two_machines_touches_the_shards_of_its_own_canonical_nodes() -> None:
    shards = [np.full(40, 30), np.full(80, 10)]
    config = OrderConfig(seed=2, num_canonical_nodes=4, shuffle_block_size=50)
    case = Case(shards, [2 * 1200, 400], config)  # two passes of one stream, half of one of the other
    shard_of = np.repeat(np.arange(120), np.concatenate(shards))
    order = case.order(0)
    touched = []
    for machine in range(2):
        world = [
            Reader(batch_size=8, num_groups=2, group=machine, num_workers=3, worker=w, num_nodes=2) for w in range(3)
        ]
        touched.append(np.unique(shard_of[shares_of_all(order, world, 0)]))
    # Both passes of the first stream are shuffled apart, so only the second stream's shards can be told apart.
    ours, theirs = (set(shards[shards >= 40]) for shards in touched)
    assert len(ours & theirs) <= 1
    assert min(len(ours), len(theirs)) >= 20

    for epoch in range(2):
        once = Case(shards[:1], [1200], config).order(epoch)
        seen = []
        for machine in range(2):
            reader = Reader(batch_size=8, num_groups=2, group=machine, num_nodes=2)
            seen.append(set(shard_of[np.concatenate(list(once.share(0, reader=reader)))]))
        assert len(seen[0] & seen[1]) <= 1  # a shard on the cut
        assert len(seen[0] | seen[1]) == 40


def test_the_order_goes_on_in_another_world_where_it_was_left() -> None:
    case = Case([np.full(50, 20), np.full(10, 33)], [1500, 200], OrderConfig(num_canonical_nodes=4))
    order = case.order(1)
    before = [Reader(batch_size=5, num_groups=4, group=group, num_nodes=2) for group in range(4)]
    after = [
        Reader(batch_size=8, num_groups=2, group=group, num_workers=2, worker=worker, num_nodes=2)
        for group in range(2)
        for worker in range(2)
    ]
    num_batches = 7
    read = [
        i for reader in before for i in np.concatenate(list(order.share(0, reader=reader)))[: num_batches * 5].tolist()
    ]
    rest = shares_of_all(case.order(1), after, num_batches * 20)
    assert sorted(read + rest) == sorted(case.ids(1))


def test_a_reader_is_given_its_batches_before_others_are_worked_out() -> None:
    shards = [np.full(10**6, 1000)]
    order = SampleOrder(shards, counts=[10**9], config=OrderConfig(), epoch=2)
    reader = Reader(batch_size=16, num_groups=64, group=63, num_workers=8, worker=7, num_nodes=8)
    for ids in islice(order.share(123_456_789, reader=reader), 2):
        assert 16 <= len(ids) <= 1 << 16
        assert len(ids) % 16 == 0


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^batch_size must be at least 1, got 0$"):
        Reader(batch_size=0)


# Shares


@examples(150)
@given(
    streams=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e3)), min_size=1, max_size=6),
    epoch_size=st.none() | st.integers(1, 10**7),
)
def test_proportions_share_out_the_epoch_to_within_a_sample(
    streams: list[tuple[int, float]], epoch_size: int | None
) -> None:
    sizes, proportions = [size for size, _ in streams], [proportion for _, proportion in streams]
    shares = [StreamShare(proportion=proportion) for proportion in proportions]
    if not any(proportions):
        return
    chosen = samples_chosen(sizes, shares, epoch_size=epoch_size)
    total = epoch_size or sum(sizes)
    exact = [Fraction(repr(proportion)) for proportion in proportions]
    assert sum(chosen) == total
    assert all(abs(n - total * part / sum(exact)) < 1 for n, part in zip(chosen, exact, strict=True))
    assert all(n == 0 for n, part in zip(chosen, exact, strict=True) if part == 0)


@examples(60)
@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=6), epoch_size=st.integers(1, 10**7))
def test_an_epoch_size_alone_is_shared_out_by_the_sizes_of_streams(sizes: list[int], epoch_size: int) -> None:
    by_size = [StreamShare(proportion=size) for size in sizes]
    assert samples_chosen(sizes, [StreamShare()] * len(sizes), epoch_size=epoch_size) == samples_chosen(
        sizes, by_size, epoch_size=epoch_size
    )


def test_repeat_and_choose_are_counted_in_samples() -> None:
    shares = [
        StreamShare(),
        StreamShare(repeat=2.5),
        StreamShare(repeat=0.29),
        StreamShare(choose=5),
        StreamShare(repeat=0),
    ]
    assert samples_chosen([10, 11, 100, 3, 9], shares) == [10, 27, 29, 5, 0]


def test_what_rounding_leaves_goes_to_the_largest_remainders() -> None:
    thirds = [StreamShare(proportion=1)] * 3
    assert samples_chosen([9, 9, 9], thirds, epoch_size=11) == [4, 4, 3]
    shares = [StreamShare(proportion=p) for p in (0.1, 0.2, 0.7)]
    assert samples_chosen([9, 9, 9], shares, epoch_size=8) == [1, 2, 5]


def test_streams_are_counted_as_mosaicml_streaming_counts_them() -> None:
    from streaming import Stream

    sizes = np.array([1000, 77, 5])
    for names, values, epoch_size in (
        ((None, "repeat", "choose"), (None, 1.5, 12), None),
        (("proportion",) * 3, (0.5, 0.25, 0.25), 1000),
        (("proportion",) * 3, (1, 2, 1), 400),
        ((None,) * 3, (None,) * 3, 1082),
        ((None,) * 3, (None,) * 3, None),
    ):
        settings: list[dict[str, Any]] = [
            {name: value} if name else {} for name, value in zip(names, values, strict=True)
        ]
        theirs = [Stream(local="unused", **setting) for setting in settings]
        Stream.apply_weights(theirs, sizes, epoch_size, seed=0)
        ours = samples_chosen(sizes.tolist(), [StreamShare(**s) for s in settings], epoch_size=epoch_size)
        assert ours == [stream.choose for stream in theirs]


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["proportion", "repeat"])
def test_a_share_that_is_no_amount_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be a finite number that is 0 or more, got {value}$"):
        StreamShare(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 2.5, math.nan])
def test_a_choice_of_no_whole_number_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^choose must be a whole number that is 0 or more, got {value}$"):
        StreamShare(choose=value)  # type: ignore[arg-type]


def test_two_settings_for_one_stream_are_refused() -> None:
    message = r"^a stream takes one of proportion, repeat and choose, got proportion 1 and choose 3: keep one$"
    with pytest.raises(ConfigError, match=message):
        StreamShare(proportion=1, choose=3)


def test_proportions_for_some_streams_only_are_refused() -> None:
    message = r"^stream 1 has no proportion, and other streams have: set it for every stream, or for none$"
    with pytest.raises(ConfigError, match=message):
        samples_chosen([1, 1], [StreamShare(proportion=1), StreamShare(repeat=2)])


def test_an_epoch_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the proportions are all 0: nothing would be read; raise one$"):
        samples_chosen([1], [StreamShare(proportion=0)])
    nothing = r"^an epoch takes no sample of any stream: raise repeat, choose or epoch_size, or add samples$"
    for sizes, share, epoch_size in (
        ([5], StreamShare(repeat=0.1), None),
        ([5], StreamShare(choose=0), None),
        ([0], StreamShare(), None),
        ([0], StreamShare(), 7),
        ([], None, None),
    ):
        with pytest.raises(ConfigError, match=nothing):
            samples_chosen(sizes, [share] if share else [], epoch_size=epoch_size)


def test_samples_of_a_stream_that_holds_none_are_refused() -> None:
    message = r"^stream 1 holds no samples and cannot give 3 an epoch: leave it out$"
    with pytest.raises(ConfigError, match=message):
        samples_chosen([4, 0], [StreamShare(), StreamShare(choose=3)])


@pytest.mark.parametrize("setting", [StreamShare(repeat=2), StreamShare(choose=2)])
def test_an_epoch_size_beside_repeat_or_choose_is_refused(setting: StreamShare) -> None:
    message = r"^epoch_size 9 contradicts repeat or choose of stream 1: leave one out$"
    with pytest.raises(ConfigError, match=message):
        samples_chosen([4, 4], [StreamShare(), setting], epoch_size=9)


@pytest.mark.parametrize("size", [0, -3, 1.5, math.nan])
def test_an_epoch_size_of_no_whole_number_is_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=rf"^epoch_size must be a whole number of samples, at least 1, got {size}$"):
        samples_chosen([4], [StreamShare()], epoch_size=size)  # type: ignore[arg-type]
