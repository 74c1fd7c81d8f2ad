"""Batches of samples of like lengths, on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.datasets import DistributedLengthGroupedSampler
from lmms_stream.errors import ConfigError
from lmms_stream.plan.assign import assign, pack_costs
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig

from ..strategies import chat_lengths, examples


def ranks(num_ranks: int, **options: Any) -> list[list[int]]:
    made = [DistributedLengthGroupedSampler(num_replicas=num_ranks, rank=rank, **options) for rank in range(num_ranks)]
    found = [list(each) for each in made]
    assert [len(each) for each in made] == [len(each) for each in found]
    return found


@examples(30)
@given(size=st.integers(0, 90), num_ranks=st.integers(1, 5), batch=st.integers(1, 7), drop_last=st.booleans())
def test_ranks_have_equally_many_samples_and_each_comes_once(
    size: int, num_ranks: int, batch: int, drop_last: bool
) -> None:
    lengths = np.random.default_rng(size).integers(1, 99, size).tolist()
    found = ranks(num_ranks, batch_size=batch, lengths=lengths, drop_last=drop_last)
    assert len({len(each) for each in found}) == 1
    flat = [number for each in found for number in each]
    if drop_last:
        assert len(flat) == len({*flat}) == size // num_ranks * num_ranks
    else:
        assert {*flat} == {*range(size)}
        assert len(flat) - size < num_ranks


def test_lengths_of_a_batch_are_alike_and_the_longest_comes_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 10_000, 4096)
    grouped = ranks(2, batch_size=8, lengths=lengths.tolist(), gradient_accumulation_steps=32)
    assert lengths[grouped[0][0]] == lengths.max()
    padding = [_padding(lengths[each]) for each in grouped]
    assert max(padding) < 0.15 < _padding(lengths)


def _padding(lengths: Any) -> float:
    batches = lengths.reshape(-1, 8)
    return float(1 - batches.sum() / (8 * batches.max(axis=1)).sum())


def busiest_over_mean(work: Any) -> float:
    """work: of each rank in each step."""
    return float((work.max(axis=1) / work.mean(axis=1)).mean())


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_batches_without_packing_are_as_even_as_length_grouped_ones(num_ranks: int, batch: int) -> None:
    """By the squares of lengths that a rank has in a step, in which ranks wait for the busiest one."""
    lengths = chat_lengths(4096, limit=4096, seed=1)
    grouped = ranks(num_ranks, batch_size=batch, lengths=lengths.tolist(), drop_last=True)
    by_length = np.stack([(lengths[each].reshape(-1, batch) ** 2).sum(axis=1) for each in grouped], axis=1)

    plan = PackPlan(
        lengths, [4096], order=OrderConfig(),
        packing=PackingConfig(packing_length=4096, strategy="first_fit", max_samples_per_pack=1),
    )  # fmt: skip
    global_batch = num_ranks * batch
    work = []
    for first in range(0, 4096 - global_batch + 1, global_batch):
        packs = plan.packs(0, first, first + global_batch)
        costs = pack_costs(packs, linear_cost=0)
        work.append(costs[assign(packs, global_batch=global_batch, nodes=[num_ranks], linear_cost=0)].sum(axis=1))
    assert busiest_over_mean(np.stack(work)) <= 1.01 * busiest_over_mean(by_length)


def test_epochs_have_other_orders_and_a_seed_the_same() -> None:
    sampler = DistributedLengthGroupedSampler(4, lengths=[*range(64)], num_replicas=1, rank=0)
    before = list(sampler)
    assert before == list(sampler)
    sampler.set_epoch(1)
    assert before != list(sampler)


def test_lengths_are_those_of_a_dataset() -> None:
    class Data:
        modality_length = (3, 1, 2)

    assert list(DistributedLengthGroupedSampler(3, Data(), num_replicas=1, rank=0)) == [0, 2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0, "lengths": [1]}, "batch_size must be at least 1, got 0"),
        ({"batch_size": "2", "lengths": [1]}, "batch_size must be a whole number, got '2'"),
        ({"batch_size": 2, "lengths": [1], "seed": -1}, "seed must be at least 0, got -1"),
        ({"batch_size": 2, "lengths": [1], "num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"batch_size": 1}, "give a dataset with modality_length, or lengths"),
        ({"batch_size": 1, "lengths": [1], "num_replicas": 2, "rank": 2}, "rank must be from 0 to 1, got 2"),
    ],
)
def test_what_cannot_be_grouped_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedLengthGroupedSampler(**options)
