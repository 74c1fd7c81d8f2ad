"""Real nodes that read one shuffle from S3: processes with workers, caches and servers of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plugins.peers.nodes import join_peers, meet_peers
from lmms_stream.types import World

from ..cluster.lock_step import serve_barrier
from ..conftest import write_tokens
from ..processes import start_module
from ..proxy import FaultProxy
from ..rounds import in_long_rounds
from ..storage.test_eviction import upload_tokens
from .reading import BARRIER

NUM_NODES, NUM_SAMPLES = 3, 1000
LIMIT_S = 150.0
TOKEN = "0123456789abcdef"


def read_all(url: str, folder: Path, *, has_peers: bool) -> list[dict[str, Any]]:
    """What each of NUM_NODES nodes got."""
    folder.mkdir()
    nodes = [
        {"RANK": str(rank), "WORLD_SIZE": str(NUM_NODES), "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        for rank in range(NUM_NODES)
    ]
    arguments = url, str(folder), str(has_peers)
    with (
        serve_barrier(folder / BARRIER, NUM_NODES),
        start_module("tests.peers.reading", arguments, nodes) as job,
    ):
        done = job.complete(LIMIT_S)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_NODES)]


@in_long_rounds
@pytest.mark.timeout(360)
@pytest.mark.parametrize("compression", ["zstd", None])
def test_nodes_that_share_a_shuffle_fetch_each_shard_from_the_store_once(
    proxy: FaultProxy, s3_folder: str, tmp_path: Path, compression: str | None
) -> None:
    upload_tokens(s3_folder, tmp_path / "data", num_samples=NUM_SAMPLES, compression=compression)
    names = [path.name for path in (tmp_path / "data").glob("shard.*")]
    proxy.set_rules()
    alone = read_all(s3_folder, tmp_path / "alone", has_peers=False)
    without = shards_fetched(proxy)
    proxy.set_rules()
    shared = read_all(s3_folder, tmp_path / "shared", has_peers=True)
    assert [each["digest"] for each in shared] == [each["digest"] for each in alone]
    assert shards_fetched(proxy) == dict.fromkeys(names, 1)
    assert sum(without.values()) > 2 * len(names)
    counts = [each["fetched"] for each in shared]
    assert sum(each["misses"] for each in counts) == len(names)
    assert sum(each["misses"] + each["from_peers"] for each in counts) == sum(without.values())
    assert [each["peer_failures"] for each in counts] == [0] * NUM_NODES
    assert sum(each["peer_bytes"] for each in counts) > 1.5 * sum(
        path.stat().st_size for path in (tmp_path / "data").glob("shard.*")
    ) / (1 if compression is None else 1e9)


def shards_fetched(proxy: FaultProxy) -> dict[str, int]:
    """How often each shard was fetched since the rules were set, by name."""
    found: Counter[str] = Counter()
    for (method, path), count in proxy.traffic().requests.items():
        name = path.rpartition("/")[2]
        if method == "GET" and name.startswith("shard."):
            found[name] += count
    return dict(found)


def test_a_dataset_that_is_read_where_it_lies_has_nothing_to_share(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=50)
    dataset = PackedDataset([StreamConfig(remote=tmp_path / "data")])
    assert join_peers(dataset, ["127.0.0.1:1", "127.0.0.1:2"], node=0, token=TOKEN, serves=False) is None
    assert dataset.one.cache.peers is None
    alone = World(rank=1, world_size=4)
    assert meet_peers(dataset, host="127.0.0.1", gather=lambda mine: [mine], world=alone) is None


def test_addresses_and_numbers_of_nodes_must_fit(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=50)
    dataset = PackedDataset([StreamConfig(remote=tmp_path / "data")])
    with pytest.raises(ConfigError, match="node must be from 0 to 1, the number of peers minus 1, got 2"):
        join_peers(dataset, ["127.0.0.1:1", "127.0.0.1:2"], node=2, token=TOKEN)
    with pytest.raises(ConfigError, match=r"peers cannot be served at 192\.0\.2\.1:7000"):
        join_peers([dataset], ["192.0.2.1:7000"], node=0, token=TOKEN)
