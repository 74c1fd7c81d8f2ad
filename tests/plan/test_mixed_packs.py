from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan, packed_tokens
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.sample_order import SampleOrder, Streams

from ..strategies import STRATEGIES, Lengths, examples, order_configs, seeds, shard_sizes


class MixedCase(NamedTuple):
    lengths: Lengths
    shards: list[list[int]]
    counts: list[int]
    order: OrderConfig
    packing: PackingConfig

    @property
    def sizes(self) -> list[int]:
        return [sum(each) for each in self.shards]

    @property
    def shard_sizes(self) -> list[int]:
        return [size for each in self.shards for size in each]

    def plan(self, **changes: Any) -> PackPlan:
        names = tuple(f"stream-{number}" for number in range(len(self.shards)))
        streams = Streams(names, tuple(map(len, self.shards)), tuple(self.counts))
        settings: dict[str, Any] = {"order": self.order, "packing": self.packing, "streams": streams}
        return PackPlan(self.lengths, self.shard_sizes, **settings | changes)

    def sample_order(self, epoch: int) -> SampleOrder:
        shards = [np.array(each, np.int64) for each in self.shards]
        return SampleOrder(shards, counts=self.counts, config=self.order, epoch=epoch)


@st.composite
def mixed_cases(draw: st.DrawFn, *, whole: bool = False) -> MixedCase:
    """Up to four streams, taken in part, whole or several times over, some of them not at all."""
    shards = draw(st.lists(shard_sizes().filter(any), min_size=1, max_size=4))
    sizes = [sum(each) for each in shards]
    counts = sizes if whole else [draw(st.integers(0, 3 * size) | st.just(size)) for size in sizes]
    limit = draw(st.sampled_from([8, 100, 1000]))
    packing = PackingConfig(
        packing_length=limit,
        strategy=draw(st.sampled_from(STRATEGIES)),
        window=draw(st.sampled_from([4, 16, 1000])),
        overlong=draw(st.sampled_from(["drop", "truncate", "split", "keep"])),
    )
    rng = np.random.default_rng(draw(seeds()))
    lengths = rng.integers(1, limit // draw(st.sampled_from([1, 4])) + 2, size=sum(sizes))
    return MixedCase(lengths, shards, counts, draw(order_configs()), packing)


def small_case(**changes: Any) -> MixedCase:
    """Streams of 40, 300 and 1000 samples, taken 500, 450 and 390 times an epoch."""
    case = MixedCase(
        np.arange(1340, dtype=np.int64) ** 2 % 90 + 1,
        [[40], [100, 200], [400, 600]],
        [500, 450, 390],
        OrderConfig(seed=3, num_canonical_nodes=2, shuffle_block_size=64),
        PackingConfig(packing_length=128),
    )
    return case._replace(**changes)


@examples(60)
@given(case=mixed_cases(), epoch=st.integers(0, 3), kept_segments=st.sampled_from([None, 1, 40]))
def test_packs_hold_the_samples_of_the_sample_order_block_by_block(
    case: MixedCase, epoch: int, kept_segments: int | None
) -> None:
    plan, order = case.plan(kept_segments=kept_segments), case.sample_order(epoch)
    assert plan.epoch_size == sum(case.counts) == order.num_samples
    expected = Counter(order.ids(0, order.num_samples).tolist())
    blocks = [
        (node, block, order.block(node, block))
        for node in range(order.num_canonical_nodes)
        for block in range(order.num_blocks(node))
    ]
    assert Counter(int(each) for _, _, ids in blocks for each in ids) == expected
    tokens = packed_tokens(plan.index, slice(None), packing=case.packing)
    packs = plan.packs(epoch, 0, plan.num_packs(epoch))
    found = Counter(packs.sample_ids[packs.starts == 0].tolist())
    assert found == Counter({each: count for each, count in expected.items() if tokens[each]})
    repeats = np.zeros_like(packs.starts) if packs.repeats is None else packs.repeats
    named = [*zip(*(each.tolist() for each in (packs.sample_ids, repeats, packs.starts)), strict=True)]
    pieces = {each: {start for other, _, start in named if other == each} for each in found}
    assert sorted(named) == sorted(
        (each, repeat, start) for each, count in found.items() for repeat in range(count) for start in pieces[each]
    )
    assert plan.num_tokens(epoch) == packs.lengths.sum() == sum(tokens[each] * n for each, n in expected.items())
    if case.packing.overlong != "keep":
        assert (np.add.reduceat(packs.lengths, packs.offsets[:-1]) <= case.packing.packing_length).all()
    by_stream = np.bincount(plan.streams_of(packs.sample_ids), packs.lengths, minlength=len(case.counts))
    assert plan.tokens_of_streams(epoch).tolist() == by_stream.tolist()
    amounts = plan.amounts(epoch, plan.num_packs(epoch) // 2)
    half = plan.packs(epoch, 0, plan.num_packs(epoch) // 2)
    assert amounts.tokens == half.lengths.sum()
    starts = np.cumsum([0, *case.shard_sizes])[:-1]
    for node, block, ids in blocks[:6]:
        shards = np.searchsorted(starts, ids, side="right") - 1
        held = [each for each in np.unique(shards).tolist() if case.shard_sizes[each]]
        assert {*held} <= {*plan.shards_of_block(epoch, node, block).tolist()}


@examples(45)
@given(case=mixed_cases(), epoch=st.integers(0, 2), data=st.data())
def test_each_occurrence_of_a_sample_is_found(case: MixedCase, epoch: int, data: st.DataObject) -> None:
    plan = case.plan()
    packs = plan.packs(epoch, 0, plan.num_packs(epoch))
    number_of_segment = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
    wanted = sorted(data.draw(st.sets(st.integers(0, len(case.lengths) - 1), min_size=1, max_size=8)))
    for sample_id in wanted:
        numbers = plan.packs_of(epoch, sample_id)
        assert sorted(numbers.tolist()) == sorted(number_of_segment[packs.sample_ids == sample_id].tolist())
        pieces = plan.num_pieces(sample_id)
        for piece in range(pieces if len(numbers) else 0):  # the pieces of an occurrence are next to each other
            starts = packs.starts[packs.sample_ids == sample_id]
            held = numbers[piece::pieces].tolist()
            at = starts == piece * case.packing.packing_length
            assert sorted(held) == sorted(number_of_segment[packs.sample_ids == sample_id][at].tolist())
    found = [*plan.first_packs_of(epoch, np.array(wanted, np.int64))]
    assert [pack for pack, _ in found] == sorted(pack for pack, _ in found)
    is_wanted = np.isin(packs.sample_ids, wanted)
    pairs = zip(number_of_segment[is_wanted].tolist(), packs.sample_ids[is_wanted].tolist(), strict=True)
    assert Counter(found) == Counter(pairs)


def test_without_counts_each_sample_comes_once_an_epoch_in_packs_of_all_streams() -> None:
    case = small_case(counts=[40, 300, 1000])
    plan = case.plan()
    packs = plan.packs(1, 0, plan.num_packs(1))
    assert sorted(packs.sample_ids.tolist()) == list(range(1340))
    streams = np.split(plan.streams_of(packs.sample_ids), packs.offsets[1:-1])
    assert np.mean([len(np.unique(each)) > 1 for each in streams]) > 0.5


def test_shares_hold_in_every_part_of_an_epoch() -> None:
    """Of the tokens of any 64 successive packs a third is of each stream, to within two packs."""
    case = small_case(lengths=np.full(1340, 8, np.int64), counts=[447, 447, 446])
    plan = case.plan()
    packs = plan.packs(2, 0, plan.num_packs(2))
    for first, stop in pairwise(packs.offsets[::32].tolist()):
        counts = np.bincount(plan.streams_of(packs.sample_ids[first:stop]), minlength=3)
        assert abs(counts - (stop - first) / 3).max() < 2 * 128 / 8


def test_a_mixed_plan_has_a_fingerprint_of_its_own_and_packs_that_stay() -> None:
    case = small_case()
    plan = case.plan()
    assert plan.fingerprint.startswith("2.1-")
    names = plan.streams._replace(names=("a", "b", "c"))  # type: ignore[union-attr]
    assert case.plan(streams=names).fingerprint == plan.fingerprint
    others = [
        case.plan(streams=None),
        small_case(counts=[500, 450, 391]).plan(),
        small_case(shards=[[40, 100], [200], [400, 600]]).plan(),
    ]
    assert len({plan.fingerprint, *(each.fingerprint for each in others)}) == 4
    packs = plan.packs(1, 40, 44)
    assert packs.sample_ids.tolist() == GOLDEN


def test_a_run_over_a_mixed_plan_goes_on_at_any_pack_with_any_global_batch() -> None:
    def numbers(first: int, batch: int) -> list[int]:
        mixture = Mixture({"data": small_case().plan(kept_segments=50)})
        found: list[int] = []
        cursor = mixture.start()
        while len(found) < 60:
            step = mixture.step(cursor, global_batch=batch)
            found += mixture.packs(step.ranges).sample_ids[: 10**6].tolist() if cursor.step >= first else []
            cursor = step.after
        return found[:60]

    whole = numbers(0, 4)
    assert numbers(0, 12) == whole
    assert numbers(0, 6)[:60] == whole


def test_streams_are_refused_without_reshuffle() -> None:
    with pytest.raises(ConfigError, match=r"reshuffle: false keeps the packs .* \(mixing: packs\)"):
        small_case(order=OrderConfig(reshuffle=False)).plan()


def test_a_single_whole_stream_has_the_samples_of_its_epoch_order() -> None:
    order = OrderConfig(seed=1, num_canonical_nodes=3, shuffle_block_size=50)
    mixed = SampleOrder([np.array([70, 0, 130])], counts=[200], config=order, epoch=2)
    alone = EpochOrder([70, 0, 130], config=order, epoch=2)
    for node in range(3):
        assert mixed.num_blocks(node) == alone.num_blocks(node)
        blocks = [[*each.block(node, block)] for block in range(2) for each in (mixed, alone)]
        assert blocks[::2] == blocks[1::2]


GOLDEN = [13, 136, 1062, 258, 1094, 300, 16, 137, 262, 316]
