"""Nodes that serve each other shards: the shared part of a dataset, and how nodes find each other. datasets -> caches.

The trainer uses this module with `fetch: {peers: true}`. Your own loop calls join_peers with known addresses, or
meet_peers, which exchanges the addresses between all processes.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ...mds.core import HasCore, PackedDataset, core_of
from ...mds.shard_list import ShardNumbers
from ...mds.streams import StoredDataset
from ...storage.local import LocalStorage
from ...types import World
from .client import PeerClient, PeerGroup, Peers, host_and_port
from .server import PeerServer, SharedFolder, listen

Dataset = PackedDataset | HasCore


def join_peers(
    dataset: Dataset | Sequence[Dataset],
    addresses: Sequence[str],
    *,
    node: int,
    token: str,
    serves: bool = True,
    listener: socket.socket | None = None,
) -> PeerServer | None:
    """Take the shards of datasets from other nodes that have them; each process of each node calls this function.

    addresses: of each node, "host:port", equal on all nodes; node: the number of this node. token: a secret, equal on
    all nodes, e.g. from secrets.token_hex(). serves: this process starts the node's server, at its address or with an
    existing listener: one process of each node. The server ends with the process, or with the datasets, and serves the
    files in their cache folders; begin to read when the servers of all nodes run, and end when all nodes have read.

    Raises ConfigError for invalid arguments, StorageError if the server does not start.
    """
    group = PeerGroup(addresses=tuple(addresses), node=node, token=token)
    datasets = dataset if isinstance(dataset, Sequence) else [dataset]
    stored = {_source(each): each for one in datasets for each in _shared(core_of(one))}
    server = None
    if serves:
        shared = {source: SharedFolder(each.cache.folder, ShardNumbers(each.shards)) for source, each in stored.items()}
        server = PeerServer.start(listener or listen(*host_and_port(group.addresses[node]))[0], group, shared)
    client = PeerClient(group)
    for one in datasets:
        for each in _shared(core_of(one)):
            each.cache.peers = Peers(client, _source(each), each.cache.tally, server=server)
    return server


def meet_peers(
    dataset: Dataset | Sequence[Dataset],
    *,
    host: str,
    gather: Callable[[Any], Sequence[Any]],
    world: World | None = None,
) -> PeerServer | None:
    """Call join_peers after an exchange of addresses between the processes; all ranks of all nodes call it alike.

    host: an address of this node that the others reach; the node's first rank serves there, at any port. gather:
    returns the values of all ranks, in their order (torch.distributed.all_gather_object). world: default: torchrun's.
    Does nothing with a single node.
    """
    world = world or World.detect()
    if world.num_nodes == 1:
        return None
    listener, address = listen(host) if world.is_first_of_node else (None, "")
    told = gather((address, secrets.token_hex()))
    server = join_peers(
        dataset,
        [told[first][0] for first in world.first_ranks],
        node=world.node,
        token=told[0][1],
        serves=listener is not None,
        listener=listener,
    )
    gather(None)  # all servers run
    return server


def _shared(core: PackedDataset) -> list[StoredDataset]:
    """Streams whose shards are copied to this node from a store."""
    return [each for each in core.stored if each.is_copied and not isinstance(each.storage, LocalStorage)]


def _source(stored: StoredDataset) -> str:
    """Name of a dataset's files, equal on all nodes."""
    named = f"{stored.url} {stored.index_digest} {len(stored.shards)}"
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
