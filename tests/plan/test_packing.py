from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, PackingError
from lmms_stream.plan.packing import NO_OPEN_PACKS, OpenPacks, Overlong, PackingConfig, Packs, pack, pack_window

from ..rounds import in_long_rounds
from ..strategies import STRATEGIES, Lengths, PackingCase, chat_lengths, examples, packing_cases

INTEGER_DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def members(packs: Packs) -> list[tuple[int, ...]]:
    """Positions of each pack, ascending, in the order the packs are emitted."""
    return [tuple(sorted(map(int, packs.order[a:b]))) for a, b in pairwise(packs.offsets)]


def fills(lengths: Lengths, packs: Packs) -> list[int]:
    """Tokens in each pack."""
    return [int(sum(lengths[position] for position in positions)) for positions in members(packs)]


def efficiency(lengths: Lengths, packs: Packs, packing_length: int) -> float:
    return int(lengths.sum()) / (len(packs) * packing_length)


def naive_next_fit(lengths: list[int], limit: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for position, length in enumerate(lengths):
        if not packs or sum(lengths[at] for at in packs[-1]) + length > limit:
            packs.append([])
        packs[-1].append(position)
    return packs


def naive_best_fit_rooms(lengths: list[int], limit: int) -> list[int]:
    """Room left in each pack of a single window, by the words of pack's docstring and lists alone.

    Which of two equally full packs takes a sample is left open there, so only the rooms are comparable.
    """
    by_length = sorted(lengths)
    fillers: list[int] = []
    for length in sorted(set(lengths)):  # samples of one length are kept back all or none
        same = [length] * by_length.count(length)
        if sum(fillers) + sum(same) > math.floor(0.2 * sum(lengths)):
            break
        fillers += same
    large = [length for length in lengths if length > max(fillers, default=0)]
    rooms: list[int] = []
    for length in large + sorted(fillers, reverse=True):
        enough = [room for room in rooms if room >= length]
        if enough:
            rooms.remove(min(enough))
            rooms.append(min(enough) - length)
        else:
            rooms.append(limit - length)
    return sorted(rooms)


@examples(150)
@given(case=packing_cases())
def test_every_sample_is_in_exactly_one_pack(case: PackingCase) -> None:
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    assert sorted(packs.order) == list(range(len(case.lengths)))
    assert packs.offsets[0] == 0
    assert packs.offsets[-1] == len(packs.order)
    assert np.all(np.diff(packs.offsets) >= 1)
    assert len(packs) == len(members(packs))
    assert packs.num_overlong == 0


@examples(150)
@given(case=packing_cases())
def test_no_pack_is_over_packing_length(case: PackingCase) -> None:
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    assert max(fills(case.lengths, packs), default=0) <= case.config.packing_length


@examples(60)
@given(case=packing_cases())
def test_packing_again_gives_the_same_packs(case: PackingCase) -> None:
    first = pack(case.lengths, config=case.config, seed=case.seed)
    again = pack(case.lengths.copy(), config=case.config, seed=case.seed)
    assert np.array_equal(first.order, again.order)
    assert np.array_equal(first.offsets, again.offsets)


@examples(60)
@given(case=packing_cases())
def test_order_and_offsets_have_the_documented_dtypes_and_the_lengths_stay_unchanged(case: PackingCase) -> None:
    before = case.lengths.copy()
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    assert packs.order.dtype == np.int32
    assert packs.offsets.dtype == np.int64
    assert np.array_equal(case.lengths, before)


@examples(40)
@given(values=st.lists(st.integers(1, 127), max_size=80), strategy=st.sampled_from(STRATEGIES))
def test_all_integer_dtypes_give_the_same_packs(values: list[int], strategy: str) -> None:
    config = PackingConfig(packing_length=130, strategy=strategy, window=16)
    expected = members(pack(np.array(values, np.int64), config=config, seed=3))
    for dtype in INTEGER_DTYPES:
        lengths: np.ndarray[Any, np.dtype[np.integer[Any]]] = np.array(values, dtype=dtype)
        assert members(pack(lengths, config=config, seed=3)) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lengths_that_are_not_contiguous_give_the_same_packs(strategy: str) -> None:
    lengths = chat_lengths(1000, limit=1024, seed=1)
    config = PackingConfig(packing_length=1024, strategy=strategy)
    interleaved = np.stack([lengths, lengths], axis=1)[:, 0]
    assert not interleaved.flags["C_CONTIGUOUS"]
    assert members(pack(interleaved, config=config)) == members(pack(lengths, config=config))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overlong", ["error", "drop", "truncate"])
def test_no_samples_make_no_packs(strategy: str, overlong: Overlong) -> None:
    config = PackingConfig(packing_length=16, strategy=strategy, overlong=overlong)
    packs = pack(np.empty(0, np.int64), config=config)
    assert len(packs) == len(packs.order) == packs.num_overlong == 0
    assert packs.offsets.tolist() == [0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_as_long_as_a_pack_are_alone_in_it(strategy: str) -> None:
    packs = pack(np.full(100, 512), config=PackingConfig(packing_length=512, strategy=strategy, window=8))
    assert sorted(members(packs)) == [(position,) for position in range(100)]


@examples(80)
@given(case=packing_cases(strategies=("next_fit",)))
def test_next_fit_closes_a_pack_when_the_next_sample_does_not_fit(case: PackingCase) -> None:
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    expected = naive_next_fit(case.lengths.tolist(), case.config.packing_length)
    assert [list(positions) for positions in members(packs)] == expected
    assert packs.order.tolist() == list(range(len(case.lengths)))


@examples(100)
@given(case=packing_cases(strategies=("best_fit",)))
def test_best_fit_in_one_window_fills_packs_as_a_plain_reference_does(case: PackingCase) -> None:
    lengths = case.lengths[:300]
    limit = case.config.packing_length
    packs = pack(lengths, config=PackingConfig(packing_length=limit, window=300), seed=case.seed)
    assert sorted(limit - fill for fill in fills(lengths, packs)) == naive_best_fit_rooms(lengths.tolist(), limit)


@examples(60)
@given(case=packing_cases(strategies=("best_fit",)))
def test_best_fit_in_one_window_leaves_at_most_one_pack_half_empty(case: PackingCase) -> None:
    limit = case.config.packing_length
    config = PackingConfig(packing_length=limit, window=max(1, len(case.lengths)))
    packs = pack(case.lengths, config=config, seed=case.seed)
    assert sum(2 * fill <= limit for fill in fills(case.lengths, packs)) <= 1
    assert len(packs) <= 2 * math.ceil(int(case.lengths.sum()) / limit)


@examples(100)
@given(case=packing_cases(strategies=("best_fit",)))
def test_the_samples_of_a_pack_lie_within_two_windows(case: PackingCase) -> None:
    for positions in members(pack(case.lengths, config=case.config, seed=case.seed)):
        assert positions[-1] // case.config.window - positions[0] // case.config.window <= 1


@examples(100)
@given(case=packing_cases(strategies=("best_fit",)))
def test_packs_are_emitted_at_most_one_window_late(case: PackingCase) -> None:
    latest = 0
    for positions in members(pack(case.lengths, config=case.config, seed=case.seed)):
        assert positions[0] // case.config.window >= latest - 1
        latest = max(latest, positions[-1] // case.config.window)


def test_packs_with_room_take_samples_of_the_next_window_and_full_ones_do_not() -> None:
    config = PackingConfig(packing_length=1024, window=2)
    # Window 0 leaves two packs with rooms of 224 and 1 (below 1024 / 512: closed); window 1 offers 224 and 1.
    packs = pack(np.array([800, 1023, 224, 1]), config=config)
    assert sorted(members(packs)) == [(0, 2), (1,), (3,)]


def test_a_pack_is_carried_over_one_window_only() -> None:
    packs = pack(np.array([600, 500, 100]), config=PackingConfig(packing_length=1000, window=1))
    # After window 1 the pack of sample 0 is closed with room for 400, so sample 2 joins sample 1.
    assert sorted(members(packs)) == [(0,), (1, 2)]


@pytest.mark.parametrize("window", [3, 4, 100, 1 << 26])
def test_windows_as_large_as_the_input_or_larger_are_alike(window: int) -> None:
    packs = pack(np.array([5, 6, 5]), config=PackingConfig(packing_length=10, window=window))
    assert sorted(members(packs)) == [(0, 2), (1,)]


@examples(60)
@given(case=packing_cases(strategies=("best_fit",)), other_seed=st.integers(0, 1 << 40))
def test_another_seed_gives_the_same_packs_in_another_order(case: PackingCase, other_seed: int) -> None:
    ours = members(pack(case.lengths, config=case.config, seed=case.seed))
    others = members(pack(case.lengths, config=case.config, seed=other_seed))
    assert sorted(ours) == sorted(others)


def test_the_emission_order_differs_between_seeds_and_says_nothing_of_the_content() -> None:
    lengths = chat_lengths(16384, limit=4096, seed=8)
    config = PackingConfig(packing_length=4096)
    emitted = [members(pack(lengths, config=config, seed=seed)) for seed in range(8)]
    assert len({tuple(packs) for packs in emitted}) == len(emitted)
    for packs in emitted:
        # Each correlation has a standard deviation of 1 / sqrt(packs).
        firsts = [positions[0] for positions in packs]
        num_samples = [len(positions) for positions in packs]
        for content in (firsts, num_samples):
            assert abs(np.corrcoef(np.arange(len(packs)), content)[0, 1]) < 4 / np.sqrt(len(packs))


def works(lengths: Lengths, packs: Packs) -> Lengths:
    """Sum of squared lengths of each pack, at least one pack."""
    found: Lengths = np.add.reduceat(lengths[packs.order] ** 2, packs.offsets[:-1])
    return found


@examples(100, many=3000)
@given(case=packing_cases(strategies=("even_fit",)), most=st.none() | st.integers(1, 12), keeps=st.booleans())
def test_even_fit_has_as_many_packs_as_best_fit_and_none_has_more_work_than_its_heaviest(
    case: PackingCase, most: int | None, keeps: bool
) -> None:
    config = replace(case.config, max_samples_per_pack=most, overlong="keep" if keeps else "error")
    limit = max(1, config.packing_length // (2 if keeps else 1))
    config = replace(config, packing_length=limit)
    best, even = (pack(case.lengths, config=each, seed=case.seed) for each in (config.counted, config))
    assert (len(even), even.num_tokens, even.num_overlong) == (len(best), best.num_tokens, best.num_overlong)
    assert sorted(even.order) == list(range(len(case.lengths)))
    assert max(np.diff(even.offsets), default=0) <= (most or len(case.lengths))
    for positions, tokens in zip(members(even), fills(case.lengths, even), strict=True):
        assert tokens <= limit or len(positions) == 1
    if len(best):
        packed = np.minimum(case.lengths, limit)
        before, after = works(packed, best), works(packed, even)
        assert after.max() <= before.max()
        assert after.sum() == before.sum()
        assert (after**2.0).sum() <= (before**2.0).sum()


def test_even_fit_halves_the_spread_of_work_where_a_pack_has_many_samples() -> None:
    lengths = chat_lengths(16384, limit=4096, seed=0)
    best, even = (
        works(lengths, pack(lengths, config=PackingConfig(packing_length=32768, strategy=strategy)))
        for strategy in ("best_fit", "even_fit")
    )
    assert even.std() < 0.5 * best.std()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1024, 4096, 32768])
def test_best_fit_is_denser_than_next_fit_on_chat_lengths(seed: int, limit: int) -> None:
    lengths = chat_lengths(20_000, limit=limit, seed=seed)
    best = pack(lengths, config=PackingConfig(packing_length=limit), seed=seed)
    following = pack(lengths, config=PackingConfig(packing_length=limit, strategy="next_fit"))
    assert efficiency(lengths, best, limit) >= efficiency(lengths, following, limit)


def test_best_fit_fills_chat_packs_to_99_5_percent() -> None:
    lengths = chat_lengths(200_000, limit=4096, seed=0)
    packs = pack(lengths, config=PackingConfig(packing_length=4096))
    assert efficiency(lengths, packs, 4096) >= 0.995


@examples(60)
@given(case=packing_cases(overlong="drop"))
def test_dropped_overlong_samples_are_in_no_pack_and_counted(case: PackingCase) -> None:
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    fitting = np.flatnonzero(case.lengths <= case.config.packing_length)
    assert sorted(packs.order) == fitting.tolist()
    assert packs.num_overlong == len(case.lengths) - len(fitting)
    assert max(fills(case.lengths, packs), default=0) <= case.config.packing_length


@examples(60)
@given(case=packing_cases(overlong="truncate"))
def test_truncated_overlong_samples_fill_a_pack_and_are_counted(case: PackingCase) -> None:
    limit = case.config.packing_length
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    cut = np.minimum(case.lengths, limit)
    assert sorted(packs.order) == list(range(len(case.lengths)))
    assert packs.num_overlong == np.count_nonzero(case.lengths > limit)
    assert max(fills(cut, packs), default=0) <= limit
    assert members(packs) == members(pack(cut, config=case.config, seed=case.seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropping_every_sample_leaves_no_packs(strategy: str) -> None:
    config = PackingConfig(packing_length=4, strategy=strategy, overlong="drop")
    packs = pack(np.array([5, 6, 7]), config=config)
    assert (len(packs), packs.num_overlong) == (0, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlong_samples_are_an_error_by_default(strategy: str) -> None:
    with pytest.raises(
        PackingError,
        match=(
            r"^2 of 4 samples are longer than packing_length 8 \(the longest has 12 tokens\): "
            r"raise packing_length, or set overlong to drop, truncate, split or keep$"
        ),
    ):
        pack(np.array([8, 9, 1, 12]), config=PackingConfig(packing_length=8, strategy=strategy))


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate"])
@pytest.mark.parametrize("length", [0, -3])
def test_a_sample_without_tokens_is_refused(overlong: Overlong, length: int) -> None:
    with pytest.raises(PackingError, match=rf"^length {length} at position 2: a sample must have at least one token$"):
        pack(np.array([4, 9, length, 1]), config=PackingConfig(packing_length=8, overlong=overlong))


@pytest.mark.parametrize("packing_length", [0, -1, (1 << 30) + 1])
def test_a_packing_length_out_of_range_is_refused(packing_length: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^packing_length must be from 1 to 1073741824 tokens, got {packing_length}$"
    ):
        PackingConfig(packing_length=packing_length)


@pytest.mark.parametrize("window", [0, (1 << 26) + 1])
def test_a_window_out_of_range_is_refused(window: int) -> None:
    with pytest.raises(ConfigError, match=rf"^window must be from 1 to 67108864 samples, got {window}$"):
        PackingConfig(packing_length=8, window=window)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^strategy must be one of best_fit, even_fit, first_fit, next_fit, window_N .*, got 'worst_fit'$",
    ):
        PackingConfig(packing_length=8, strategy="worst_fit")


def test_an_unknown_overlong_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^overlong must be one of error, drop, truncate, split, keep, got 'smash'$"):
        PackingConfig(packing_length=8, overlong="smash")  # type: ignore[arg-type]


@pytest.mark.parametrize("overlong", get_args(Overlong))
@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_a_length_that_takes_more_than_31_bits_is_refused(overlong: Overlong, dtype: type[np.integer[Any]]) -> None:
    with pytest.raises(PackingError, match=r"^length 2147483658 at position 1: a sample may have up to 2147483647"):
        pack(np.array([3, (1 << 31) + 10], dtype), config=PackingConfig(packing_length=100, overlong=overlong))


@given(case=packing_cases(overlong="split"))
@examples(60)
def test_split_samples_are_whole_again_when_their_pieces_are_put_together(case: PackingCase) -> None:
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    limit = case.config.packing_length
    overlong = case.lengths > limit
    assert packs.num_overlong == np.count_nonzero(overlong)
    pieces = np.zeros_like(packs.order) if packs.pieces is None else packs.pieces
    starts = pieces.astype(np.int64) * limit
    taken = np.minimum(case.lengths[packs.order] - starts, limit)
    assert np.array_equal(np.bincount(packs.order, weights=taken, minlength=len(case.lengths)), case.lengths)
    assert len(set(zip(packs.order.tolist(), pieces.tolist(), strict=True))) == len(packs.order)
    filled = np.concatenate([[0], np.cumsum(taken)])[packs.offsets]
    assert np.all(np.diff(filled) <= limit)


@given(case=packing_cases(), max_samples=st.integers(1, 5))
@examples(60)
def test_no_pack_has_more_samples_than_allowed(case: PackingCase, max_samples: int) -> None:
    config = replace(case.config, max_samples_per_pack=max_samples)
    packs = pack(case.lengths, config=config, seed=case.seed)
    assert np.all(np.diff(packs.offsets) <= max_samples)
    assert np.array_equal(np.sort(packs.order), np.arange(len(case.lengths)))
    filled = np.concatenate([[0], np.cumsum(case.lengths[packs.order])])[packs.offsets]
    assert np.all(np.diff(filled) <= config.packing_length)


@given(case=packing_cases(strategies=("first_fit",)))
@examples(60)
def test_first_fit_takes_the_pack_that_was_opened_first_among_those_with_room(case: PackingCase) -> None:
    packs: list[list[int]] = []
    rooms: list[int] = []
    for position, length in enumerate(case.lengths.tolist()):
        chosen = next((number for number, room in enumerate(rooms) if room >= length), len(packs))
        if chosen == len(packs):
            packs.append([])
            rooms.append(case.config.packing_length)
        packs[chosen].append(position)
        rooms[chosen] -= length
    found = pack(case.lengths, config=case.config)
    assert [found.order[a:b].tolist() for a, b in pairwise(found.offsets)] == packs


@given(case=packing_cases(strategies=("window_7", "window_128")))
@examples(60)
def test_a_pack_of_window_n_is_of_one_window_or_of_two_that_follow_each_other(case: PackingCase) -> None:
    window = int(case.config.strategy.removeprefix("window_"))
    packs = pack(case.lengths, config=case.config, seed=case.seed)
    assert all(np.ptp(packs.order[a:b] // window) <= 1 for a, b in pairwise(packs.offsets))


def sliding_window(lengths: Lengths, limit: int, size: int) -> int:
    """Number of packs where a pack takes of `size` samples that wait, oldest first, all that fit, and others enter."""
    waiting, following, num_packs = list(range(min(size, len(lengths)))), size, 0
    while waiting:
        room, left = limit, []
        for position in waiting:
            if lengths[position] <= room:
                room -= lengths[position]
            else:
                left.append(position)
        taken = len(waiting) - len(left)
        waiting = left + list(range(following, min(following + taken, len(lengths))))
        following += taken
        num_packs += 1
    return num_packs


def window_distributions(count: int, *, limit: int) -> dict[str, Lengths]:
    draws = np.random.default_rng(0)
    is_short = draws.random(count) < 0.5
    images = draws.choice([256, 576, 1024, 1369], count)
    return {
        "chats": chat_lengths(count, limit=limit, seed=0),
        "any": draws.integers(1, limit + 1, count),
        "short": draws.integers(1, 200, count),
        "thirds": draws.integers(limit // 4, limit // 2, count),
        "halves": draws.integers(limit // 3, 2 * limit // 3, count),
        "exponential": np.clip(draws.exponential(800, count), 1, limit).astype(np.int64),
        "short and long": np.where(is_short, draws.integers(50, 300, count), draws.integers(2500, 3900, count)),
        "equal": np.full(count, 1000),
        "heavy tail": np.clip((draws.pareto(1.2, count) + 1) * 100, 1, limit).astype(np.int64),
        "long": draws.integers(limit // 2, limit + 1, count),
        "images of four sizes": images,
        "images and texts": images + draws.integers(5, 60, count),
        "images of three sizes": draws.choice([1024, 1369, 1600], count),
        "images of a tenth and a third": draws.choice([290, 1162, 1231, 1515], count),
    }


@pytest.mark.parametrize("size", [10, 100, pytest.param(1000, marks=in_long_rounds)])
def test_window_n_fills_packs_at_least_as_full_as_a_sliding_window_of_n_samples(size: int) -> None:
    limit, config = 4096, PackingConfig(packing_length=4096, strategy=f"window_{size}")
    for name, lengths in window_distributions(3000, limit=limit).items():
        assert len(pack(lengths, config=config)) <= sliding_window(lengths, limit, size), name


@in_long_rounds
def test_window_n_takes_fewer_packs_of_few_sizes_than_a_sliding_window_and_at_most_four_percent_more() -> None:
    draws, found, expected = np.random.default_rng(0), 0, 0
    for limit in (2048, 4096, 8192) * 8:
        lengths = draws.choice(draws.integers(64, limit * 2 // 3, 4), 1500, p=draws.dirichlet(np.ones(4)))
        for size in (10, 30, 100, 1000):
            config = PackingConfig(packing_length=limit, strategy=f"window_{size}")
            packs, sliding = len(pack(lengths, config=config)), sliding_window(lengths, limit, size)
            assert packs <= 1.04 * sliding, (limit, size, np.unique(lengths))
            found, expected = found + packs, expected + sliding
    assert found < expected


@given(case=packing_cases(overlong="keep"))
@examples(100)
def test_a_kept_sample_that_is_longer_than_a_pack_is_a_pack_of_its_own(case: PackingCase) -> None:
    limit, packs = case.config.packing_length, pack(case.lengths, config=case.config, seed=case.seed)
    assert sorted(packs.order.tolist()) == list(range(len(case.lengths)))
    assert packs.num_tokens == case.lengths.sum()
    assert packs.num_overlong == np.count_nonzero(case.lengths > limit)
    for positions in members(packs):
        assert len(positions) == 1 or case.lengths[[*positions]].sum() <= limit
    cut = pack(case.lengths, config=replace(case.config, overlong="truncate"), seed=case.seed)
    assert np.array_equal(packs.order, cut.order)
    assert np.array_equal(packs.offsets, cut.offsets)


def test_max_samples_per_pack_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_samples_per_pack must be at least 1, got 0$"):
        PackingConfig(packing_length=8, max_samples_per_pack=0)


@given(case=packing_cases(), max_samples=st.none() | st.integers(1, 5))
@examples(100)
def test_windows_packed_one_by_one_give_the_packs_of_the_whole(case: PackingCase, max_samples: int | None) -> None:
    config = replace(case.config, max_samples_per_pack=max_samples)
    count = len(case.lengths)
    step = config.samples_at_once or max(1, count)
    found: list[list[int]] = []
    waiting, held = NO_OPEN_PACKS, np.empty(0, np.int64)  # held: positions of the segments that wait
    for start in range(0, count, step):
        stop = min(start + step, count)
        window = case.lengths[start:stop].astype(np.int32)
        packs = pack_window(window, config=config, seed=case.seed, waiting=waiting, position=start, last=stop == count)
        positions = np.concatenate([held, np.arange(start, stop)])[packs.order]
        done = packs.offsets[: packs.num_closed + 1]
        found += [positions[a:b].tolist() for a, b in pairwise(done)]
        held = positions[done[-1] :]
        offsets = packs.offsets[packs.num_closed :] - done[-1]
        waiting = OpenPacks(lengths=case.lengths[held].astype(np.int32), offsets=offsets, firsts=packs.firsts)
        assert waiting.firsts.tolist() == held[offsets[:-1]].tolist()
    whole = pack(case.lengths, config=config, seed=case.seed)
    assert found == [whole.order[a:b].tolist() for a, b in pairwise(whole.offsets)]
    assert len(held) == 0
