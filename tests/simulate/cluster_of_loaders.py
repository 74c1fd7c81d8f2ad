"""Nodes as cache folders of their own, whose ranks' real loaders read a store that writes a line per download."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.plugins.peers.nodes import join_peers
from lmms_stream.plugins.peers.server import PeerServer, listen
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import Storage
from lmms_stream.types import StoredObject, World


class CountedStore:
    """A store that passes all on to another, and notes each download in a file."""

    def __init__(self, storage: Storage, log: Path):
        self.url = f"counted://{storage.url}"
        self._storage = storage
        self._log = log

    def download(self, key: str, path: Path) -> None:
        with self._log.open("a") as log:
            log.write(f"{key}\n")
        self._storage.download(key, path)

    def read(self, key: str) -> bytes:
        return self._storage.read(key)

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        return self._storage.read_range(key, start=start, stop=stop, tag=tag)

    def write(self, key: str, data: bytes) -> None:
        self._storage.write(key, data)

    def upload(self, path: Path, key: str) -> None:
        self._storage.upload(path, key)

    def delete(self, key: str) -> None:
        self._storage.delete(key)

    def list_objects(self, prefix: str) -> list[StoredObject]:
        return self._storage.list_objects(prefix)

    def stat(self, key: str) -> StoredObject:
        return self._storage.stat(key)


def open_node(
    storage: Storage,
    folder: Path,
    *,
    order: OrderConfig,
    overlong: Overlong = "error",
    cache_limit: int | None = None,
    world: World | None = None,
) -> PackedDataset:
    """The dataset as one node has it, with a cache in the folder."""
    return PackedDataset(
        [StreamConfig(source=CountedStore(storage, folder.with_suffix(".log")), remote="counted", local=folder)],
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=256, window=64, overlong=overlong),
        order=order,
        fetch=FetchConfig(cache_limit=cache_limit, timeout_s=60),
        world=world,
    )


def downloads(
    storage: Storage,
    folder: Path,
    *,
    world: World,
    num_workers: int,
    global_batch: int,
    epochs: int = 1,
    has_peers: bool = False,
    **settings: Any,
) -> list[Counter[str]]:
    """How often each node of a world downloads each shard from the store, when all its ranks read some epochs.

    has_peers: nodes, which read one after another, take shards from each other.
    """
    found = []
    per_node = world.world_size // world.num_nodes
    caches = [folder / f"node-{node}" for node in range(world.num_nodes)]
    datasets = [open_node(storage, cache, world=world, **settings) for cache in caches]
    servers = _join(datasets) if has_peers else []
    for node, (cache, dataset) in enumerate(zip(caches, datasets, strict=True)):
        loaders = []
        for rank in range(node * per_node, (node + 1) * per_node):
            mine = World(rank=rank, world_size=world.world_size, num_nodes=world.num_nodes)
            loaders.append(PackedLoader(dataset, global_batch=global_batch, world=mine, num_workers=num_workers))
        for _ in range(epochs):
            for loader in loaders:
                assert sum(1 for _ in loader)
        lines = cache.with_suffix(".log").read_text().split()
        found.append(Counter(line for line in lines if line.endswith((".mds", ".zstd"))))
    for server in servers:
        server.close()
    return found


def _join(datasets: Sequence[PackedDataset]) -> list[PeerServer]:
    """Have nodes take shards from each other."""
    listeners = [listen("127.0.0.1") for _ in datasets]
    addresses = [address for _, address in listeners]
    servers = [
        join_peers(dataset, addresses, node=node, token="0123456789abcdef", listener=listener)
        for node, (dataset, (listener, _)) in enumerate(zip(datasets, listeners, strict=True))
    ]
    return [server for server in servers if server is not None]
