"""What is simulated is what real loaders do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.mixed import mixed
from lmms_stream.plan.order import OrderConfig
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.simulate.cluster import Cluster
from lmms_stream.tools.simulate.run import simulate
from lmms_stream.types import World

from ..conftest import write_tokens
from ..rounds import LONG, in_long_rounds, rounds
from ..storage.test_eviction import upload_tokens
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
    CASES += [(4, 2, 2, 4), (2, 2, 1, 3), (3, 2, 2, 9)]


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


@pytest.mark.parametrize(
    ("num_nodes", "canonical_nodes", "epochs"), [(3, 1, 1), *([(4, 4, 3), (2, 6, 2)] if LONG else [])]
)
def test_nodes_with_peers_fetch_from_the_store_what_was_foretold(
    folder: Path, tmp_path: Path, num_nodes: int, canonical_nodes: int, epochs: int
) -> None:
    order = OrderConfig(seed=5, num_canonical_nodes=canonical_nodes, shuffle_block_size=250)
    dataset = open_node(LocalStorage(folder), tmp_path / "simulated", order=order)
    alone, told = (
        simulate(
            dataset,
            Cluster(num_nodes=num_nodes, gpus_per_node=1, num_workers=0, peers=peers),
            global_batch=24,
            epochs=epochs,
        )
        for peers in (False, True)
    )
    found = downloads(
        LocalStorage(folder), tmp_path / "real", world=World(world_size=num_nodes, num_nodes=num_nodes), num_workers=0,
        global_batch=24, epochs=epochs, order=order, has_peers=True,
    )  # fmt: skip
    sizes = {info.name: info.size for info in dataset.shard_infos}
    assert [sum(each[name] for each in found) for name in sizes] == told.shard_downloads.tolist()
    assert set(told.shard_downloads.tolist()) == {1}
    assert told.download_bytes == sum(sizes.values())
    assert told.num_from_peers == alone.num_downloads - len(sizes)
    assert told.peer_bytes == alone.download_bytes - told.download_bytes
    for one, other in zip(told.nodes, alone.nodes, strict=True):
        assert one.num_downloads + one.num_from_peers == other.num_downloads
    assert max(node.num_downloads for node in told.nodes) < 2 * len(sizes) / num_nodes  # each has its turn
    assert told.wait_s <= alone.wait_s
    assert alone.num_from_peers == 0


def test_peers_under_a_cache_limit_are_not_simulated(folder: Path, tmp_path: Path) -> None:
    dataset = open_node(LocalStorage(folder), tmp_path / "simulated", order=OrderConfig())
    with pytest.raises(ConfigError, match=r"what peers still have under a cache limit is not simulated: leave out "):
        simulate(dataset, Cluster(num_nodes=2, cache="1mb", peers=True), global_batch=16)


@in_long_rounds
def test_where_most_packs_spill_shards_asked_for_in_vain_are_the_only_doubt(folder: Path, tmp_path: Path) -> None:
    order = OrderConfig(seed=5, num_canonical_nodes=64, shuffle_block_size=250)
    dataset = open_node(LocalStorage(folder), tmp_path / "simulated", order=order)
    told = simulate(dataset, Cluster(num_nodes=4, gpus_per_node=2, num_workers=0), global_batch=24)
    world = World(world_size=8, num_nodes=4)
    found = downloads(LocalStorage(folder), tmp_path / "real", world=world, num_workers=0, global_batch=24, order=order)
    assert told.num_asked_only is not None
    real = sum(sum(each.values()) for each in found)
    assert told.num_downloads <= real <= told.num_downloads + told.num_asked_only


def test_the_least_cache_is_the_one_that_loaders_ask_for_and_suffices(folder: Path, tmp_path: Path) -> None:
    order = OrderConfig(seed=5, num_canonical_nodes=2, shuffle_block_size=100)
    settings = {"world": World(), "num_workers": 0, "global_batch": 24, "order": order}
    dataset = open_node(LocalStorage(folder), tmp_path / "simulated", order=order)
    least = simulate(dataset, Cluster(gpus_per_node=1, num_workers=0), global_batch=24).least_cache_bytes
    with pytest.raises(ConfigError, match=rf"cache_limit is {least - 1} bytes, .* raise it to {least},"):
        downloads(LocalStorage(folder), tmp_path / "less", **settings, cache_limit=least - 1)  # type: ignore[arg-type]
    told = simulate(dataset, Cluster(gpus_per_node=1, num_workers=0, cache=least), global_batch=24)
    assert told.live_bytes <= least < told.dataset_bytes
    assert told.num_again == 1  # the shard on the cut, which one canonical node begins with and the other ends with
    (found,) = downloads(LocalStorage(folder), tmp_path / "least", **settings, cache_limit=least)  # type: ignore[arg-type]
    # Threads fetch ahead while others read: with the least room they delete other shards than the simulated cache.
    assert found.keys() == {info.name for info in dataset.shard_infos}
    assert sum(found.values()) == pytest.approx(told.num_downloads, rel=0.1)


def test_under_a_limit_epochs_download_again_about_as_often_as_foretold(folder: Path, tmp_path: Path) -> None:
    """Threads fetch ahead while others read, so with the least room a little differs from run to run."""
    order = OrderConfig(seed=5, num_canonical_nodes=1, shuffle_block_size=100)
    dataset = open_node(LocalStorage(folder), tmp_path / "simulated", order=order)
    cluster = Cluster(gpus_per_node=1, num_workers=0)
    least = simulate(dataset, cluster, global_batch=24).least_cache_bytes
    limited = Cluster(gpus_per_node=1, num_workers=0, cache=least)
    told = simulate(dataset, limited, global_batch=24, epochs=3)
    found = downloads(
        LocalStorage(folder), tmp_path / "limited", world=World(), num_workers=0, global_batch=24, epochs=3,
        order=order, cache_limit=least,
    )  # fmt: skip
    assert told.num_again > len(dataset.shard_infos) / 2
    assert sum(found[0].values()) == pytest.approx(told.num_downloads, rel=0.1)


@in_long_rounds
def test_requests_to_a_real_server_are_those_foretold(s3_folder: str, tmp_path: Path) -> None:
    upload_tokens(s3_folder, tmp_path / "made", num_samples=6000, compression="zstd")
    order = OrderConfig(seed=5, num_canonical_nodes=4, shuffle_block_size=250)
    dataset = open_node(open_storage(s3_folder), tmp_path / "simulated", order=order)
    told = simulate(dataset, Cluster(num_nodes=2, gpus_per_node=2, num_workers=2), global_batch=24)
    world = World(world_size=4, num_nodes=2)
    found = downloads(
        open_storage(s3_folder), tmp_path / "real", world=world, num_workers=2, global_batch=24, order=order
    )
    sizes = {str(info.zip_name): int(info.zip_size or 0) for info in dataset.shard_infos}
    assert told.shard_downloads.tolist() == [sum(each[name] for each in found) for name in sizes]
    assert [node.download_bytes for node in told.nodes] == [
        sum(sizes[name] * count for name, count in each.items()) for each in found
    ]


@pytest.mark.parametrize(("cache_limit", "epochs"), [(None, 1), (True, 4)])
def test_nodes_download_of_mixed_datasets_what_was_foretold(
    folder: Path, tmp_path: Path, cache_limit: bool | None, epochs: int
) -> None:
    """With the least cache_limit about as often: threads fetch ahead while others read."""
    write_tokens(tmp_path / "small", num_samples=120)
    stores = {"large": LocalStorage(folder), "small": LocalStorage(tmp_path / "small")}
    order = OrderConfig(seed=5, num_canonical_nodes=2, shuffle_block_size=100)

    def opened(node: int, limit: int | None = None) -> PackedDataset:
        nodes = {
            name: open_node(each, tmp_path / f"{name}-{node}", order=order, cache_limit=limit, world=World())
            for name, each in stores.items()
        }
        return mixed(nodes, weights={"large": 2, "small": 1})

    num_nodes = 1 if cache_limit else 2
    cluster = Cluster(num_nodes=num_nodes, gpus_per_node=1, num_workers=0)
    simulated = opened(9)
    told = simulate(simulated, cluster, global_batch=24, epochs=epochs)
    assert told.num_samples == 3120
    limit = told.least_cache_bytes if cache_limit else None
    if limit is not None:
        with pytest.raises(ConfigError, match=rf"cache_limit is {limit - 1} bytes, .* raise it to {limit},"):
            PackedLoader(opened(8, limit - 1), global_batch=24, world=World())
        told = simulate(simulated, dataclasses.replace(cluster, cache=limit), global_batch=24, epochs=epochs)
    found = []
    for node in range(num_nodes):
        loader = PackedLoader(
            opened(node, limit), global_batch=24, world=World(rank=node, world_size=num_nodes, num_nodes=num_nodes)
        )
        for _ in range(epochs):
            assert sum(1 for _ in loader)
        for name in stores:
            keys = Counter((tmp_path / f"{name}-{node}.log").read_text().split())
            found += [(name, key) for key in keys.elements() if key.endswith(".mds")]
    names = [(name, info.name) for name, one in zip(stores, simulated.stored, strict=True) for info in one.shards]
    counts = Counter(found)
    if cache_limit:
        assert told.num_again > len(names) / 3
        assert len(found) == pytest.approx(told.num_downloads, rel=0.1)
    else:
        assert [counts[each] for each in names] == told.shard_downloads.tolist()


def test_each_source_has_a_cache_of_its_own(folder: Path, tmp_path: Path) -> None:
    """One of two sources is limited, and the other, which is read as often, takes none of its room."""
    order = OrderConfig(seed=5, num_canonical_nodes=1, shuffle_block_size=100)
    cluster = Cluster(gpus_per_node=1, num_workers=0)
    alone = open_node(LocalStorage(folder), tmp_path / "alone", order=order)
    least = simulate(alone, cluster, global_batch=24).least_cache_bytes
    sources = {
        name: open_node(LocalStorage(folder), tmp_path / name, order=order, cache_limit=limit, world=World())
        for name, limit in (("limited", least), ("free", None))
    }
    told = simulate(sources, cluster, global_batch=24, epochs=2)
    loader = PackedLoader(sources, global_batch=24, world=World())
    for _ in range(2):
        assert sum(1 for _ in loader)
    logs = [(tmp_path / f"{name}.log").read_text().split() for name in sources]
    limited, free = (sum(line.endswith(".mds") for line in log) for log in logs)
    assert told.shard_downloads[len(told.shard_downloads) // 2 :].tolist() == [1] * free
    assert limited == pytest.approx(int(told.shard_downloads[: len(told.shard_downloads) // 2].sum()), rel=0.1)
    assert limited > 1.5 * free
    shared = simulate(sources, dataclasses.replace(cluster, cache=least), global_batch=24, epochs=2)
    assert shared.shard_downloads[free:].sum() == shared.shard_downloads[:free].sum() > 1.5 * free
