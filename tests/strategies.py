"""Hypothesis strategies and fixed-seed inputs that several test files share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig, PackRange
from numpy.typing import NDArray

from .rounds import rounds

Lengths = NDArray[np.int64]

STRATEGIES = ("best_fit", "even_fit", "first_fit", "next_fit", "window_7", "window_128")


def examples(count: int, *, many: int | None = None) -> settings:
    """Settings of a property that is tried with a quarter of `count` examples, the same in every run.

    many: the number in `make test-long`; four times `count` by default.
    """
    return settings(max_examples=rounds(-(-count // 4), many or 4 * count))


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, (1 << 32) - 1)


def shard_sizes() -> st.SearchStrategy[list[int]]:
    """Samples of each shard: no shard, one shard and empty shards among them."""
    return st.lists(st.just(0) | st.integers(0, 50), max_size=12)


def order_configs() -> st.SearchStrategy[OrderConfig]:
    """Orders with more canonical nodes than most drawn datasets have shards, and blocks from one sample up."""
    return st.builds(
        OrderConfig,
        seed=seeds(),
        shuffle=st.booleans(),
        num_canonical_nodes=st.none() | st.integers(1, 16),
        shuffle_block_size=st.integers(1, 80),
    )


def lengths_up_to(limit: int) -> st.SearchStrategy[Lengths]:
    """Sequences of lengths from 1 to `limit`: short ones that shrink well, and long ones from a seed."""

    def drawn(seed: int, count: int) -> Lengths:
        return np.random.default_rng(seed).integers(1, limit + 1, size=count, dtype=np.int64)

    listed = st.lists(st.integers(1, limit), max_size=60).map(lambda values: np.array(values, dtype=np.int64))
    return listed | st.builds(drawn, seeds(), st.integers(0, 1500))


class PackingCase(NamedTuple):
    lengths: Lengths
    config: PackingConfig
    seed: int


@st.composite
def packing_cases(
    draw: st.DrawFn, *, strategies: tuple[str, ...] = STRATEGIES, overlong: Overlong = "error"
) -> PackingCase:
    """Lengths with a config: packs of one token up to 70,000, windows smaller and larger than the input.

    With `overlong` other than "error" some lengths are up to twice packing_length.
    """
    limit = draw(st.integers(1, 300) | st.sampled_from([63, 64, 65, 4095, 4096, 4097, 70_000]))
    config = PackingConfig(
        packing_length=limit,
        strategy=draw(st.sampled_from(strategies)),
        window=draw(st.integers(1, 40) | st.sampled_from([128, 1000, 16384])),
        overlong=overlong,
    )
    longest = limit if overlong == "error" else 2 * limit
    # Lengths far below the limit fill packs with many samples, lengths up to it with few.
    lengths = draw(lengths_up_to(draw(st.sampled_from([longest, max(1, longest // 10)]))))
    return PackingCase(lengths, config, draw(seeds()))


def chat_lengths(count: int, *, limit: int, seed: int) -> Lengths:
    """Lognormal lengths (median 400 tokens) clipped to 1..limit, as chat datasets have them."""
    drawn = np.random.default_rng(seed).lognormal(mean=np.log(400), sigma=1.0, size=count)
    return np.clip(drawn, 1, limit).astype(np.int64)


class MediaSamples(NamedTuple):
    """Tokens and patches of samples."""

    lengths: Lengths
    patches: Lengths


def media_samples(count: int, *, num_images: int, limit: int, seed: int) -> MediaSamples:
    """Short texts with so many images each, of 16 to 400 tokens; four patches make one token."""
    draws = np.random.default_rng([seed, num_images])
    images = (draws.integers(4, 21, (count, num_images)) * draws.integers(4, 21, (count, num_images))).sum(axis=1)
    texts = np.clip(draws.lognormal(mean=np.log(200), sigma=1.0, size=count), 1, limit).astype(np.int64)
    return MediaSamples(np.where(images > 0, np.minimum(texts, 400) + images, texts), 4 * images)


def pack_range(
    pack_lengths: list[list[int]], canonical_nodes: list[int], patches: list[int] | None = None
) -> PackRange:
    """Packs with segments of the given lengths, their samples numbered from 0. patches: of each pack."""
    flat = np.array([length for lengths in pack_lengths for length in lengths], dtype=np.int64)
    return PackRange(
        sample_ids=np.arange(len(flat), dtype=np.int64),
        starts=np.zeros_like(flat),
        lengths=flat,
        offsets=np.cumsum([0, *map(len, pack_lengths)], dtype=np.int64),
        canonical_nodes=np.array(canonical_nodes, dtype=np.int64),
        sources=np.zeros(len(pack_lengths), dtype=np.int64),
        patches=None if patches is None else np.array(patches, dtype=np.int64),
    )
