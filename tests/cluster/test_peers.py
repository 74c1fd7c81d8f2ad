"""Nodes that take shards from each other, where the store's link is slow and theirs are fast."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ..rounds import in_long_rounds
from .case import PEERS
from .namespaces import what_is_missing
from .truth import store_of

pytestmark = [in_long_rounds, pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))]


def test_nodes_with_peers_fetch_each_shard_from_the_store_once(tmp_path: Path) -> None:
    with store_of(PEERS.num_nodes, tmp_path) as do:
        told, found = do(PEERS)
        told_alone, alone = do(dataclasses.replace(PEERS, peers=False))
    assert dict(sum(found.downloads, start=type(found.downloads[0])())) == dict.fromkeys(found.sizes, 1)
    assert sum(found.num_bytes) == told.download_bytes
    assert sum(alone.num_bytes) == told_alone.download_bytes == told.download_bytes + told.peer_bytes
    assert len(found.waits_s) == len(alone.waits_s)
    assert sum(found.received_bytes) == pytest.approx(sum(alone.received_bytes), rel=0.05)  # over the nodes' links
