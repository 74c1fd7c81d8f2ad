"""Shards are known by the names of their files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from lmms_stream.mds.index import ShardInfo
from lmms_stream.mds.shard_list import UNKNOWN, ListedShards, ShardNumbers
from lmms_stream.mds.streams import StoredDataset, StreamConfig
from lmms_stream.storage.fetch_config import FetchConfig

from ..conftest import write_tokens


@pytest.fixture(scope="module")
def infos(tmp_path_factory: pytest.TempPathFactory) -> list[ShardInfo]:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=2000)
    return list(StoredDataset(StreamConfig(remote=Path(folder)), config=FetchConfig()).shards)


def renamed(infos: list[ShardInfo], name: str) -> list[ShardInfo]:
    return [dataclasses.replace(info, name=name.format(number)) for number, info in enumerate(infos)]


@pytest.mark.parametrize("name", ["shard.{:05}.mds", "2024-{:02}.mds", "part/shard.7{:05}.mds", "{:x}-x{:x}"])
def test_a_shard_is_found_by_its_name_whatever_that_says(infos: list[ShardInfo], name: str) -> None:
    of_names = renamed(infos, name.replace("{:x}-x{:x}", "{0:x}-x{0:x}"))
    names = [info.name for info in of_names]
    numbers = ShardNumbers(ListedShards(of_names))
    assert numbers.of(names[::-1]).tolist() == list(range(len(infos)))[::-1]
    assert numbers.of(["shard.00003.zip", names[4]]).tolist() == [UNKNOWN, 4]
    assert numbers.of([names[5]]).tolist() == [5]


def test_compressed_files_and_metadata_are_of_their_shard(infos: list[ShardInfo]) -> None:
    meta = dataclasses.replace(infos[1], name="shard.1.meta", zip_name="shard.1.meta.zstd")
    both = [infos[0], dataclasses.replace(infos[1], zip_name="shard.1.data.zstd", meta=meta)]
    names = [infos[1].name, "shard.1.meta", "shard.1.meta.zstd", "shard.1.data.zstd", infos[0].name]
    assert ShardNumbers(ListedShards(both)).of(names).tolist() == [1, 1, 1, 1, 0]
