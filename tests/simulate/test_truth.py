"""What is simulated is what real loaders do."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmms_stream.plan.order import OrderConfig
from lmms_stream.simulate.cluster import Cluster
from lmms_stream.simulate.run import simulate
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import World

from ..conftest import write_tokens
from ..rounds import LONG, rounds
from ..storage.test_room import upload_tokens
from .cluster_of_loaders import downloads, open_node

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores

CASES = [  # nodes, ranks a node, workers a rank, canonical nodes
    (1, 2, 0, 4),
    (2, 2, 0, 4),
    (2, 1, 0, 1),  # one node serves all, half of the packs spill to the other
    (4, 1, 0, 6),  # canonical nodes do not divide among nodes
    (2, 2, 2, 2),
]
if LONG:
    CASES += [(4, 2, 2, 4), (2, 2, 1, 3), (3, 2, 2, 9), (4, 2, 0, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=rounds(3000, 12000))
    return folder


@pytest.mark.parametrize(("num_nodes", "ranks", "num_workers", "canonical_nodes"), CASES)
def test_each_node_downloads_what_was_foretold(
    folder: Path, tmp_path: Path, num_nodes: int, ranks: int, num_workers: int, canonical_nodes: int
) -> None:
    order = OrderConfig(seed=5, num_canonical_nodes=canonical_nodes, shuffle_block_size=250)
    world = World(world_size=num_nodes * ranks, num_nodes=num_nodes)
    dataset = open_node(LocalStorage(folder), tmp_path / "simulated", order=order)
    cluster = Cluster(num_nodes=num_nodes, gpus_per_node=ranks, num_workers=num_workers)
    for epochs in (1, 2) if num_workers == 0 else (1,):
        told = simulate(dataset, cluster, global_batch=24, epochs=epochs)
        found = downloads(
            LocalStorage(folder),
            tmp_path / f"epochs-{epochs}",
            world=world,
            num_workers=num_workers,
            global_batch=24,
            epochs=epochs,
            order=order,
        )
        sizes = {info.name: info.size for info in dataset.shard_infos}
        assert told.num_asked_only == 0
        assert [node.num_downloads for node in told.nodes] == [sum(each.values()) for each in found]
        assert [node.download_bytes for node in told.nodes] == [
            sum(sizes[name] * count for name, count in each.items()) for each in found
        ]
        shared = [name for name in sizes if sum(name in each for each in found) > 1]
        assert told.num_shared_shards == len(shared)
        assert told.shard_downloads.tolist() == [sum(each[name] for each in found) for name in sizes]
