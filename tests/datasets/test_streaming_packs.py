"""Packs of pieces that pass: each piece in one pack, and what is open goes on elsewhere as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.doors.lmms_engine.datasets.streaming_packs import (
    PieceRef,
    SamplePiece,
    StreamingPackConfig,
    StreamingPacker,
)
from lmms_stream.errors import ConfigError
from lmms_stream.plan import packing

CONFIGS = [
    StreamingPackConfig.of("first_fit", packing_length=64, options={}),
    StreamingPackConfig.of("best_fit", packing_length=64, options={"num_open_buckets": 3}),
    StreamingPackConfig.of("balanced", packing_length=64, options={"num_buckets": 3, "fill_threshold": 0.9}),
    StreamingPackConfig.of("first_fit", packing_length=64, options={}, max_samples_per_pack=2),
]


def pieces_of(lengths: Iterable[int]) -> list[SamplePiece]:
    return [SamplePiece(PieceRef("file", 0, row, 0, length), row) for row, length in enumerate(lengths)]


def rows_of(packs: Iterable[list[SamplePiece]]) -> list[list[int]]:
    return [[piece.content for piece in pack] for pack in packs]


@given(lengths=st.lists(st.integers(1, 64), max_size=60), config=st.sampled_from(CONFIGS))
def test_each_piece_is_in_one_pack_that_has_room_for_it(lengths: list[int], config: StreamingPackConfig) -> None:
    packer = StreamingPacker(config)
    packs = [pack for piece in pieces_of(lengths) for pack in packer.put(piece)]
    assert len(packer.open_refs) <= 2 * config.max_open + 2
    packs += packer.flush()
    assert sorted(row for pack in rows_of(packs) for row in pack) == list(range(len(lengths)))
    assert all(sum(piece.ref.length for piece in pack) <= 64 for pack in packs)
    assert all(len(pack) <= (config.max_samples_per_pack or 60) for pack in packs)


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    config=st.sampled_from(CONFIGS),
    stop=st.integers(0, 40),
)
def test_packs_are_the_same_where_another_packer_goes_on_after_any_of_them(
    lengths: list[int], config: StreamingPackConfig, stop: int
) -> None:
    pieces = pieces_of(lengths)
    whole = StreamingPacker(config)
    expected = rows_of([pack for piece in pieces for pack in whole.put(piece)] + list(whole.flush()))

    first = StreamingPacker(config)
    given_out: list[list[SamplePiece]] = []
    num_put = 0
    while num_put < len(pieces) and len(given_out) < stop:
        num_put += 1
        for pack in first.put(pieces[num_put - 1]):
            given_out.append(pack)
            if len(given_out) == stop:  # what is left of this put is in the state
                break
    second = StreamingPacker(config)
    second.restore([[pieces[ref.row] for ref in pack] for pack in first.open_refs])
    given_out += second.due()
    for piece in pieces[num_put:]:
        given_out += second.put(piece)
    assert rows_of([*given_out, *second.flush()]) == expected


def test_first_fit_gives_a_pack_out_when_the_next_sample_does_not_fit() -> None:
    packer = StreamingPacker(CONFIGS[0])
    packs = [pack for piece in pieces_of([30, 30, 10, 54, 64, 5]) for pack in packer.put(piece)]
    assert rows_of(packs) == [[0, 1], [2, 3], [4]]


@given(
    lengths=st.lists(st.integers(1, 64), max_size=150),
    num_buckets=st.integers(1, 9),
    most=st.none() | st.integers(1, 4),
)
def test_balanced_never_makes_more_packs_than_first_fit(lengths: list[int], num_buckets: int, most: int | None) -> None:
    counts = {}
    for strategy, options in (("first_fit", {}), ("balanced", {"num_buckets": num_buckets})):
        config = StreamingPackConfig.of(strategy, packing_length=64, options=options, max_samples_per_pack=most)
        packer = StreamingPacker(config)
        packs = [pack for piece in pieces_of(lengths) for pack in packer.put(piece)]
        counts[strategy] = len([*packs, *packer.flush()])
    assert counts["balanced"] <= counts["first_fit"]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_piece_that_is_longer_than_a_pack_is_a_pack_of_its_own(config: StreamingPackConfig) -> None:
    packer = StreamingPacker(config)
    packs = [pack for piece in pieces_of([10, 20, 100, 64, 65, 5]) for pack in packer.put(piece)]
    packs += packer.flush()
    assert sorted(row for pack in rows_of(packs) for row in pack) == list(range(6))
    assert [2] in rows_of(packs)
    assert [4] in rows_of(packs)


def test_open_packs_of_balanced_as_version_1_kept_them_are_packed_on() -> None:
    pieces = pieces_of([30, 20, 40, 10, 5, 60, 50, 7])
    packer = StreamingPacker(CONFIGS[2])
    packer.restore([[pieces[0]], [pieces[1], pieces[2]], [pieces[3], pieces[4]]])
    packs = [*packer.due(), *(pack for piece in pieces[5:] for pack in packer.put(piece)), *packer.flush()]
    assert sorted(row for pack in rows_of(packs) for row in pack) == list(range(8))


def test_best_fit_leaves_less_room_than_first_fit_and_balanced_packs_cost_about_the_same() -> None:
    lengths = [(number * 37) % 61 + 1 for number in range(2000)]
    num_packs, works = {}, {}
    for strategy in ("first_fit", "best_fit", "balanced"):
        packer = StreamingPacker(StreamingPackConfig.of(strategy, packing_length=256, options={}))
        packs = [pack for piece in pieces_of(lengths) for pack in packer.put(piece)]
        num_packs[strategy] = len(packs)
        work = [sum(piece.ref.length**2 for piece in pack) for pack in packs]
        mean = sum(work) / len(work)
        works[strategy] = (sum((each - mean) ** 2 for each in work) / len(work)) ** 0.5 / mean
    assert num_packs["best_fit"] < num_packs["first_fit"]
    assert num_packs["balanced"] < num_packs["first_fit"]
    assert works["balanced"] < min(works["first_fit"], works["best_fit"])


def test_best_fit_with_four_lanes_is_within_3_percent_of_the_plan_for_a_thousand_chats() -> None:
    for seed in range(3):
        draws = np.random.default_rng(seed)
        lengths = np.clip(draws.lognormal(5.3, 0.8, 1000), 10, 1024).astype(np.int64)
        num_packs = 0
        for lane in range(4):
            packer = StreamingPacker(StreamingPackConfig.of("best_fit", packing_length=1024, options={}))
            num_packs += sum(1 for piece in pieces_of(lengths[lane::4].tolist()) for _ in packer.put(piece))
            num_packs += sum(1 for _ in packer.flush())
        assert num_packs <= 1.03 * len(packing.pack(lengths, config=packing.PackingConfig(packing_length=1024)))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("fullest", {}, "packing_strategy must be one of first_fit, best_fit, balanced .*, got 'fullest'"),
        ("best_fit", {"num_buckets": 4}, "packing_kwargs has 'num_buckets', and best_fit takes num_open_buckets"),
        ("first_fit", {"fill_threshold": 0.5}, "packing_kwargs has 'fill_threshold', and first_fit takes none"),
        ("best_fit", {"num_open_buckets": 0}, r"open packs \(num_open_buckets, num_buckets\) must be from 1 .*, got 0"),
        ("best_fit", {"fill_threshold": 1.5}, "fill_threshold must be above 0 and at most 1, got 1.5"),
        ("balanced", {"num_buckets": "8"}, "packing_kwargs.num_buckets must be a number, got '8'"),
    ],
)
def test_settings_that_cannot_be_are_refused(strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingPackConfig.of(strategy, packing_length=64, options=options)
