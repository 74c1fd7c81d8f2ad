from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.plan.order import EpochOrder, OrderConfig, default_canonical_nodes
from numpy.typing import NDArray

from ..strategies import examples, order_configs, seeds, shard_sizes


def epoch_blocks(order: EpochOrder) -> dict[tuple[int, int], NDArray[np.int64]]:
    nodes = range(order.num_canonical_nodes)
    return {(node, block): order.block(node, block) for node in nodes for block in range(order.num_blocks(node))}


def epoch_ids(order: EpochOrder) -> list[int]:
    return [int(sample_id) for ids in epoch_blocks(order).values() for sample_id in ids]


@examples(200)
@given(sizes=shard_sizes(), config=order_configs(), epoch=st.integers(0, 3))
def test_every_sample_is_in_exactly_one_block(sizes: list[int], config: OrderConfig, epoch: int) -> None:
    order = EpochOrder(sizes, config=config, epoch=epoch)
    assert sorted(epoch_ids(order)) == list(range(sum(sizes)))


@examples(60)
@given(sizes=shard_sizes(), config=order_configs())
def test_without_shuffle_samples_come_in_stored_order(sizes: list[int], config: OrderConfig) -> None:
    still = OrderConfig(
        seed=config.seed,
        shuffle=False,
        num_canonical_nodes=config.num_canonical_nodes,
        shuffle_block_size=config.shuffle_block_size,
    )
    assert epoch_ids(EpochOrder(sizes, config=still, epoch=1)) == list(range(sum(sizes)))


@examples(60)
@given(sizes=shard_sizes(), config=order_configs(), epoch=st.integers(0, 3))
def test_a_block_computed_alone_equals_the_same_block_computed_after_others(
    sizes: list[int], config: OrderConfig, epoch: int
) -> None:
    for (node, block), ids in reversed(epoch_blocks(EpochOrder(sizes, config=config, epoch=epoch)).items()):
        alone = EpochOrder(sizes, config=config, epoch=epoch).block(node, block)
        assert np.array_equal(alone, ids)


@examples(60)
@given(sizes=shard_sizes(), config=order_configs())
def test_a_block_read_twice_is_not_shuffled_twice(sizes: list[int], config: OrderConfig) -> None:
    order = EpochOrder(sizes, config=config, epoch=0)
    first = epoch_ids(order)
    assert epoch_ids(order) == first


@examples(60)
@given(sizes=shard_sizes(), config=order_configs())
def test_canonical_nodes_hold_equal_shares_within_one_sample(sizes: list[int], config: OrderConfig) -> None:
    order = EpochOrder(sizes, config=config, epoch=0)
    bounds = [order.node_bounds(node) for node in range(order.num_canonical_nodes)]
    counts = [stop - first for first, stop in bounds]
    assert max(counts) - min(counts) <= 1
    blocks = epoch_blocks(order)
    for node, count in enumerate(counts):
        assert sum(len(ids) for (home, _), ids in blocks.items() if home == node) == count


@examples(60)
@given(sizes=shard_sizes(), config=order_configs())
def test_every_block_but_the_last_of_a_canonical_node_is_full(sizes: list[int], config: OrderConfig) -> None:
    order = EpochOrder(sizes, config=config, epoch=0)
    for (node, block), ids in epoch_blocks(order).items():
        if block < order.num_blocks(node) - 1:
            assert len(ids) == config.shuffle_block_size
        else:
            assert 1 <= len(ids) <= config.shuffle_block_size


@examples(60)
@given(sizes=shard_sizes(), seed=seeds(), epoch=st.integers(0, 3), block_size=st.integers(2, 80))
def test_shards_are_laid_out_whole_and_blocks_are_cut_from_that(
    sizes: list[int], seed: int, epoch: int, block_size: int
) -> None:
    def shuffled_in_blocks_of(size: int) -> EpochOrder:
        config = OrderConfig(seed=seed, num_canonical_nodes=3, shuffle_block_size=size)
        return EpochOrder(sizes, config=config, epoch=epoch)

    laid_out = epoch_ids(shuffled_in_blocks_of(1))
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    entered = [b for a, b in pairwise([-1, *laid_out]) if a < 0 or shard_of[a] != shard_of[b]]
    assert len(entered) == sum(size > 0 for size in sizes)
    assert all(b == a + 1 for a, b in pairwise(laid_out) if shard_of[a] == shard_of[b])

    order = shuffled_in_blocks_of(block_size)
    for (node, block), ids in epoch_blocks(order).items():
        first = order.node_bounds(node)[0] + block * block_size
        assert sorted(ids) == sorted(laid_out[first : first + len(ids)])


def test_fewer_shards_than_canonical_nodes_still_fill_every_node() -> None:
    order = EpochOrder([40], config=OrderConfig(num_canonical_nodes=8), epoch=0)
    assert [len(order.block(node, 0)) for node in range(8)] == [5] * 8


def test_an_empty_dataset_has_no_blocks() -> None:
    for sizes in ([], [0, 0]):
        order = EpochOrder(sizes, config=OrderConfig(num_canonical_nodes=4), epoch=0)
        assert [order.num_blocks(node) for node in range(4)] == [0] * 4


def test_epochs_and_seeds_give_different_orders() -> None:
    sizes = [100] * 20
    config = [OrderConfig(seed=seed, num_canonical_nodes=2, shuffle_block_size=500) for seed in (0, 1, 2**32 - 1)]
    orders = [tuple(epoch_ids(EpochOrder(sizes, config=c, epoch=epoch))) for c in config for epoch in range(3)]
    assert len(set(orders)) == len(orders)


def test_epochs_and_seeds_lay_the_shards_out_differently() -> None:
    sizes = [2] * 50
    config = [OrderConfig(seed=seed, num_canonical_nodes=1, shuffle_block_size=1) for seed in (0, 1)]
    laid_out = [tuple(epoch_ids(EpochOrder(sizes, config=c, epoch=epoch))) for c in config for epoch in range(3)]
    assert len(set(laid_out)) == len(laid_out)


def test_blocks_and_canonical_nodes_are_shuffled_differently() -> None:
    config = OrderConfig(num_canonical_nodes=2, shuffle_block_size=100)
    blocks = epoch_blocks(EpochOrder([400], config=config, epoch=0))
    within = {tuple(ids - ids.min()) for ids in blocks.values()}
    assert len(blocks) == len(within) == 4


def test_the_order_neither_reads_nor_changes_the_global_random_state() -> None:
    config = OrderConfig(num_canonical_nodes=2, shuffle_block_size=100)
    orders, next_numbers = [], []
    for seed in (7, 7, 8):
        np.random.seed(seed)
        orders.append(epoch_ids(EpochOrder([30] * 20, config=config, epoch=0)))
        next_numbers.append(float(np.random.random_sample()))
    np.random.seed(7)
    assert orders[0] == orders[1] == orders[2]
    assert next_numbers[0] == next_numbers[1] == float(np.random.random_sample())


def correlation(ids: NDArray[np.int64]) -> float:
    return float(np.corrcoef(np.arange(len(ids)), ids)[0, 1])


def share_of_close_neighbours(ids: NDArray[np.int64], *, distance: int) -> float:
    return float(np.mean(np.abs(np.diff(ids)) <= distance))


def displacement(ids: NDArray[np.int64]) -> float:
    """Mean distance of a sample from its stored position, over the block's size: 1/3 for a uniform permutation."""
    return float(np.mean(np.abs(ids - np.arange(len(ids))))) / len(ids)


def test_a_block_is_shuffled_as_well_as_a_permutation_of_numpy() -> None:
    size, repeats, distance = 1 << 14, 40, 32
    rng = np.random.default_rng(123)
    blocks = [EpochOrder([size], config=OrderConfig(seed=5), epoch=epoch).block(0, 0) for epoch in range(repeats)]
    permutations = [rng.permutation(size) for _ in range(repeats)]

    # Each correlation has a standard deviation of 1/sqrt(size); 5 of them are passed once in a million blocks.
    assert max(abs(correlation(ids)) for ids in blocks) < 5 / np.sqrt(size)
    assert np.std([correlation(ids) for ids in blocks]) < 1.5 * np.std([correlation(ids) for ids in permutations])

    # About 2 * distance / size of the neighbours are close by chance: 64 of 16384 here, 2560 over the 40 blocks.
    ours = np.mean([share_of_close_neighbours(ids, distance=distance) for ids in blocks])
    numpys = np.mean([share_of_close_neighbours(ids, distance=distance) for ids in permutations])
    assert abs(ours / numpys - 1) < 0.15
    assert abs(ours / (2 * distance / size) - 1) < 0.1

    assert abs(np.mean([displacement(ids) for ids in blocks]) - 1 / 3) < 0.005


def test_shuffled_shards_land_anywhere_in_the_epoch() -> None:
    num_shards = 500
    config = OrderConfig(seed=11, num_canonical_nodes=1, shuffle_block_size=1)
    firsts = np.array(epoch_ids(EpochOrder([2] * num_shards, config=config, epoch=0)))[::2] // 2
    assert abs(correlation(firsts)) < 4 / np.sqrt(num_shards)
    assert share_of_close_neighbours(firsts, distance=1) < 0.03


@examples(100)
@given(num_samples=st.integers(0, 10**12))
def test_default_canonical_nodes_are_a_power_of_two_with_enough_samples_each(num_samples: int) -> None:
    nodes = default_canonical_nodes(num_samples)
    assert 1 <= nodes <= 8
    assert nodes & (nodes - 1) == 0
    assert nodes == 1 or num_samples // nodes >= 1 << 17
    assert nodes == 8 or num_samples // (2 * nodes) < 1 << 17


def test_default_canonical_nodes_are_used_unless_given() -> None:
    assert EpochOrder([1 << 18], config=OrderConfig(), epoch=0).num_canonical_nodes == 2
    assert EpochOrder([1 << 18], config=OrderConfig(num_canonical_nodes=5), epoch=0).num_canonical_nodes == 5


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^seed must be from 0 to 4294967295, got -1$"):
        OrderConfig(seed=-1)


def test_no_canonical_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^num_canonical_nodes must be at least 1, got 0$"):
        OrderConfig(num_canonical_nodes=0)


@pytest.mark.parametrize("size", [0, -5, (1 << 30) + 1])
def test_a_shuffle_block_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^shuffle_block_size must be from 1 to 1073741824 samples, got {size}$"):
        OrderConfig(shuffle_block_size=size)


def test_a_seed_that_would_take_two_words_of_the_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^seed must be from 0 to 4294967295, got 4294967296$"):
        OrderConfig(seed=1 << 32)


def test_shards_and_the_first_block_are_shuffled_by_streams_of_their_own() -> None:
    order = EpochOrder([1] * 1000, config=OrderConfig(seed=3, num_canonical_nodes=1), epoch=2)
    shards = np.random.default_rng([3, 2]).permutation(1000)
    assert not np.array_equal(order.block(0, 0), shards[shards])


def test_a_million_shards_are_ordered_block_by_block() -> None:
    sizes = np.random.default_rng(0).integers(0, 9, 1_000_000)
    order = EpochOrder(sizes, config=OrderConfig(), epoch=0)
    assert order.num_canonical_nodes == 8
    blocks = [order.block(node, block) for node in range(8) for block in range(order.num_blocks(node))]
    ids = np.concatenate(blocks)
    assert len(ids) == sizes.sum()
    assert np.array_equal(np.sort(ids), np.arange(len(ids)))
