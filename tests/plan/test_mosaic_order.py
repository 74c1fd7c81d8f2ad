"""MosaicML's orders by our arithmetic, beside those of MosaicML's package.

mosaic_orders.json has checksums of what its 0.13.0 gives for settings that are drawn; they hold without the package.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.plan.mosaic_order import (
    ALGORITHMS,
    BATCHING_METHODS,
    PARTITIONS,
    MosaicOrder,
    Readers,
    StreamSamples,
    mosaic_work,
    sampled,
)

from ..strategies import examples, seeds

ORDERS: list[str] = json.loads(Path(__file__).with_name("mosaic_orders.json").read_text())
Asked = tuple[MosaicOrder, list[StreamSamples], Readers, int, int]


@st.composite
def orders(draw: st.DrawFn) -> MosaicOrder:
    return MosaicOrder(
        batching_method=draw(st.sampled_from(BATCHING_METHODS)),
        partition_algo=draw(st.sampled_from(PARTITIONS)),
        sampling_method=draw(st.sampled_from(["balanced", "fixed"])),
        sampling_granularity=draw(st.integers(1, 5)),
        num_canonical_nodes=draw(st.integers(1, 6)),
        initial_physical_nodes=draw(st.none() | st.integers(1, 4)),
        batch_size=draw(st.integers(1, 6)),
        shuffle=draw(st.booleans()),
        shuffle_algo=draw(st.sampled_from(ALGORITHMS)),
        shuffle_seed=draw(seeds()),
        shuffle_block_size=draw(st.integers(2, 120)),
        epoch_seed_change=draw(st.booleans()),
    )


@st.composite
def sources(draw: st.DrawFn) -> list[StreamSamples]:
    found: list[StreamSamples] = []
    counts = draw(
        st.lists(
            st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 99)), min_size=1, max_size=3
        )
    )
    first = 0
    for sizes, choose in counts:
        share = choose / sum(choose for _, choose in counts)
        found.append(StreamSamples(first, np.array(sizes, np.int64), choose, share))
        first += sum(sizes)
    return found


def as_dataset(order: MosaicOrder, streams: list[StreamSamples]) -> Any:
    """What the package's functions ask a dataset for."""
    mosaic = pytest.importorskip("streaming")
    shards = np.array([len(stream.sizes) for stream in streams])
    sizes = np.concatenate([stream.sizes for stream in streams])
    dataset = SimpleNamespace(
        **dataclasses.asdict(order),
        streams=streams,
        num_streams=len(streams),
        shards_per_stream=shards,
        shard_offset_per_stream=np.cumsum(shards) - shards,
        samples_per_shard=sizes,
        sample_offset_per_shard=np.cumsum(sizes) - sizes,
        epoch_size=sum(stream.choose for stream in streams),
    )
    dataset.resample_streams = lambda *arguments: mosaic.StreamingDataset.resample_streams(dataset, *arguments)
    return dataset


@examples(90)
@given(order=orders(), streams=sources(), epoch=st.integers(0, 3))
def test_samples_are_drawn_as_mosaicmls_package_draws_them(
    order: MosaicOrder, streams: list[StreamSamples], epoch: int
) -> None:
    theirs = as_dataset(order, streams).resample_streams(epoch)
    for found, expected in zip(sampled(order, streams, epoch), theirs, strict=True):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


@examples(900)
@given(
    order=orders(),
    streams=sources(),
    readers=st.builds(Readers, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    epoch=st.integers(0, 2),
    position=st.just(0) | st.integers(0, 120),
)
def test_orders_are_those_of_mosaicmls_package(
    order: MosaicOrder, streams: list[StreamSamples], readers: Readers, epoch: int, position: int
) -> None:
    batching = pytest.importorskip("streaming.base.batching")
    world: Any = SimpleNamespace(**readers._asdict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = batching.generate_work(order.batching_method, as_dataset(order, streams), world, epoch, position)
        except (ValueError, ZeroDivisionError) as error:
            if "Resuming further" in str(error):  # some steps at the end of an epoch: see the test below
                return
            with pytest.raises(ValueError):
                mosaic_work(order, streams, readers, epoch, position)
            return
        if order.batching_method == "stratified" and not expected.size:  # an error is better than an epoch of nothing
            return
        try:
            found = mosaic_work(order, streams, readers, epoch, position)
        except ValueError as error:  # beyond the epoch, where MosaicML's class reads nothing without an error
            if "Resuming further into the dataset" not in str(error) or (expected >= 0).any():
                raise
            return
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()


@examples(200)
@given(order=orders(), streams=sources(), num_workers=st.integers(1, 3), position=st.integers(0, 150))
def test_an_epoch_goes_on_from_each_of_its_batches(
    order: MosaicOrder, streams: list[StreamSamples], num_workers: int, position: int
) -> None:
    order, readers = dataclasses.replace(order, initial_physical_nodes=None), Readers(1, 1, num_workers)
    position -= position % order.batch_size

    def as_read(position: int) -> list[int]:
        work = mosaic_work(order, streams, readers, 0, position).transpose(3, 2, 0, 1, 4).ravel()
        return [sample_id for sample_id in work.tolist() if sample_id >= 0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = as_read(0)
        except ValueError:
            return
        if position <= len(whole):
            assert as_read(position) == whole[position:]


@examples(300)
@given(
    order=orders(),
    streams=sources(),
    readers=st.builds(Readers, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    other=st.builds(Readers, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    other_batch=st.integers(1, 8),
)
def test_a_state_at_the_end_of_an_epoch_is_loaded_by_any_world_and_a_later_position_by_none(
    order: MosaicOrder, streams: list[StreamSamples], readers: Readers, other: Readers, other_batch: int
) -> None:
    def work(order: MosaicOrder, readers: Readers, position: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mosaic_work(order, streams, readers, 0, position)

    try:
        whole = work(order, readers, 0)
        elsewhere = dataclasses.replace(
            order,
            batch_size=order.batch_size if order.initial_physical_nodes else other_batch,
            saved_ranks=readers.num_nodes * readers.ranks_per_node,
        )
        work(elsewhere, other, 0)
    except ValueError:  # settings that do not fit each other
        return
    of_rank_0 = int(np.count_nonzero(whole[0, 0] >= 0))  # a state counts the samples of rank 0
    end = of_rank_0 * readers.num_nodes * readers.ranks_per_node
    assert not (work(order, readers, end) >= 0).any()
    work(elsewhere, other, end)
    for position in (end + 4000, 1 << 61):
        with pytest.raises(ValueError, match=rf"Resuming further into the dataset \({position}\) than it has samples"):
            work(elsewhere, other, position)


def drawn(number: int) -> Asked:
    """Settings, streams, readers, an epoch and a position in it."""
    rng = random.Random(number)
    order = MosaicOrder(
        batching_method=rng.choice(BATCHING_METHODS),
        partition_algo=rng.choice(PARTITIONS),
        sampling_method=rng.choice(["balanced", "fixed"]),
        sampling_granularity=rng.randrange(1, 5),
        num_canonical_nodes=rng.randrange(1, 7),
        initial_physical_nodes=rng.choice([None, 1, 2, 4]),
        batch_size=rng.randrange(1, 7),
        shuffle=rng.random() < 0.8,
        shuffle_algo=rng.choice(ALGORITHMS),
        shuffle_seed=rng.randrange(1 << 32),
        shuffle_block_size=rng.randrange(40, 120),
        epoch_seed_change=rng.random() < 0.5,
    )
    found: list[StreamSamples] = []
    first = 0
    chosen = [rng.randrange(20, 300) for _ in range(rng.randrange(1, 4))]
    for choose in chosen:
        sizes = np.array([rng.randrange(1, 30) for _ in range(rng.randrange(1, 9))], np.int64)
        found.append(StreamSamples(first, sizes, choose, choose / sum(chosen)))
        first += int(sizes.sum())
    readers = Readers(rng.randrange(1, 5), rng.randrange(1, 5), rng.randrange(1, 4))
    return order, found, readers, rng.randrange(3), rng.choice([0, 0, rng.randrange(40)])


def digest(work: Callable[..., Any], asked: Asked) -> str:
    """A checksum of an order and its shape; "refused" for settings that do not fit one another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ids = work(*asked)
        except (ValueError, ZeroDivisionError):
            return "refused"
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, "<i8").tobytes() + str(ids.shape).encode())


def test_orders_are_those_that_mosaicmls_package_gave() -> None:
    assert len(ORDERS) - ORDERS.count("refused") > 150
    for number, expected in enumerate(ORDERS):
        assert digest(mosaic_work, drawn(number)) == expected, drawn(number)
