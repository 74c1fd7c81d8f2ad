from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import World

from ..storage.counting import held
from ..storage.test_eviction import upload_tokens

NUM_SAMPLES = 6000


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_shards_of_a_block_are_those_of_its_samples(nodes: int) -> None:
    sizes = np.random.default_rng(1).integers(0, 40, 60)
    order = EpochOrder(sizes, config=OrderConfig(seed=1, num_canonical_nodes=nodes, shuffle_block_size=90), epoch=2)
    shard_of = np.repeat(np.arange(60), sizes)
    for node in range(nodes):
        for block in range(order.num_blocks(node)):
            needed = set(shard_of[order.block(node, block)].tolist())
            found = order.shards_of_block(node, block).tolist()
            assert needed == {shard for shard in found if sizes[shard]}
        assert len(order.shards_of_block(node, order.num_blocks(node))) == 0


@pytest.fixture(scope="module")
def remote(s3: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"{s3}/blocks-ahead"
    upload_tokens(url, tmp_path_factory.mktemp("blocks") / "made", num_samples=NUM_SAMPLES)
    return url


@pytest.mark.parametrize(("num_nodes", "served"), [(1, [0, 1]), (2, [1])])
def test_the_shards_of_this_block_and_of_the_next_come_before_they_are_read(
    remote: str, tmp_path: Path, num_nodes: int, served: list[int]
) -> None:
    dataset = PackedStreamingDataset(
        remote,
        tmp_path / "cache",
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=256),
        order=OrderConfig(num_canonical_nodes=2, shuffle_block_size=350),
    )
    world = World(rank=num_nodes - 1, world_size=num_nodes, num_nodes=num_nodes)
    batches = iter(PackedLoader(dataset, global_batch=2, world=world))
    next(batches)
    expected = {
        dataset.core.shard_infos[shard].name
        for node in served
        for block in (0, 1)
        for shard in dataset.plan.shards_of_block(0, node, block).tolist()
    }
    assert 8 <= len(expected) < len(dataset.core.shard_infos) / 2
    deadline = time.monotonic() + 20
    while set(held(tmp_path / "cache")) - {"_lmms"} != expected:
        assert time.monotonic() < deadline, expected ^ set(held(tmp_path / "cache"))
        time.sleep(0.01)
    seen = sum(len(batch.sample_ids) for batch in batches)
    assert seen > NUM_SAMPLES * 11 // 12 // num_nodes
