"""A dataset without packs, as MosaicML's: streams and their shares, replication, splits, workers, forks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, CursorError, ShardError, StorageError
from lmms_stream.mds.mosaic_streams import Stream
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import Sample, World
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

SIZES = {"a": 300, "b": 120, "c": 45}


def write_numbers(folder: Path, first: int, count: int) -> None:
    with MDSWriter(columns={"number": "int"}, out=str(folder), hashes=["sha1"], size_limit=1 << 9) as writer:
        for number in range(first, first + count):
            writer.write({"number": number})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streams")
    first = 0
    for name, size in SIZES.items():
        write_numbers(root / name, first, size)
        first += size
    return root


def numbers(dataset: PackedStreamingDataset) -> list[int]:
    return [sample["number"] for sample in dataset]


def per_stream(epoch: list[int]) -> dict[str, int]:
    counts = Counter("a" if n < 300 else "b" if n < 420 else "c" for n in epoch)
    return {name: counts[name] for name in SIZES}


def test_samples_of_several_streams_are_numbered_one_after_another(root: Path) -> None:
    dataset = PackedStreamingDataset(streams=[Stream(remote=root / name) for name in SIZES])
    assert dataset.size == len(dataset) == 465
    assert [dataset[i]["number"] for i in (0, 299, 300, -1)] == [0, 299, 300, 464]
    assert [sample["number"] for sample in dataset[298:302]] == [298, 299, 300, 301]
    assert [sample["number"] for sample in dataset[np.array([464, 0])]] == [464, 0]
    first, second = numbers(dataset), numbers(dataset)
    assert sorted(first) == sorted(second) == list(range(465))
    assert first != second


@pytest.mark.parametrize(
    ("shares", "epoch_size", "expected"),
    [
        ([{"repeat": 2}, {"repeat": 0.5}, {}], None, {"a": 600, "b": 60, "c": 45}),
        ([{"choose": 10}, {"choose": 240}, {"choose": 0}], None, {"a": 10, "b": 240, "c": 0}),
        ([{"proportion": 1}, {"proportion": 1}, {"proportion": 2}], 400, {"a": 100, "b": 100, "c": 200}),
        ([{}, {}, {}], 93, {"a": 60, "b": 24, "c": 9}),
    ],
)
def test_streams_give_their_shares_and_no_sample_comes_again_before_all_have(
    root: Path, shares: list[dict[str, float]], epoch_size: int | None, expected: dict[str, int]
) -> None:
    streams = [Stream(remote=root / name, **share) for name, share in zip(SIZES, shares, strict=True)]  # type: ignore[arg-type]
    dataset = PackedStreamingDataset(streams=streams, epoch_size=epoch_size)
    counts: Counter[int] = Counter()
    for _ in range(3):
        epoch = numbers(dataset)
        assert per_stream(epoch) == expected
        assert len(dataset) == len(epoch)
        counts.update(epoch)
    first = 0
    for name, size in SIZES.items():
        times = [counts[n] for n in range(first, first + size)]
        assert max(times) - min(times) <= 1
        assert sum(times) == 3 * expected[name]
        first += size


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_reshuffle_with_workers_too(root: Path, persistent: bool) -> None:
    dataset = PackedStreamingDataset(root / "a")
    loader: DataLoader[Sample] = DataLoader(
        dataset, batch_size=None, num_workers=2, timeout=60, persistent_workers=persistent
    )
    epochs = [[int(sample["number"]) for sample in loader] for _ in range(3)]
    assert all(sorted(epoch) == list(range(300)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert dataset.state_dict(0, True)["epoch"] == 2


def test_ranks_of_a_replica_group_read_the_same_and_groups_share_the_rest(root: Path) -> None:
    def read(rank: int) -> list[int]:
        return numbers(PackedStreamingDataset(root / "a", replication=2, world=World(rank=rank, world_size=6)))

    groups = [read(0), read(2), read(4)]
    assert [read(1), read(3), read(5)] == groups
    assert sorted(number for group in groups for number in group) == list(range(300))
    with pytest.raises(ConfigError, match="replication 4 does not divide the world size 6"):
        PackedStreamingDataset(root / "a", replication=4, world=World(world_size=6))


def test_the_world_of_torchrun_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    dataset = PackedStreamingDataset(root / "a")
    assert dataset.world == World(rank=3, world_size=4, num_nodes=2)
    assert len(dataset) == 75
    assert len(numbers(dataset)) == 75


def test_a_split_is_a_folder_and_a_local_folder_alone_will_do(root: Path, tmp_path: Path) -> None:
    assert numbers(PackedStreamingDataset(root, split="c", order=OrderConfig(shuffle=False))) == list(range(420, 465))
    assert PackedStreamingDataset(local=root / "b")[0]["number"] == 300
    assert PackedStreamingDataset(None, root, split="b")[0]["number"] == 300
    with pytest.raises(ConfigError, match=r"a dataset needs remote .* or local"):
        PackedStreamingDataset()
    with pytest.raises(ConfigError, match="either streams, or remote"):
        PackedStreamingDataset(root, streams=[Stream(remote=root / "a")])
    with pytest.raises(ConfigError, match="streams is empty"):
        PackedStreamingDataset(streams=[])
    assert PackedStreamingDataset(root / "b", streams=[])[0]["number"] == 300  # as llm-foundry names no stream


def test_a_dataset_of_one_stream_is_asked_for_by_name(root: Path) -> None:
    dataset = PackedStreamingDataset(streams=[Stream(remote=root / "a"), Stream(remote=root / "b")])
    assert dataset.core.names == ("a", "b")
    with pytest.raises(ConfigError, match=r"one stream, and .*a, .*b are 2 streams: open each by itself"):
        _ = dataset.core.one


def test_shards_whose_columns_differ_are_refused_for_packs(root: Path, tmp_path: Path) -> None:
    index = json.loads((root / "a" / "index.json").read_text())
    index["shards"][1]["column_names"] = ["other"]
    for path in (root / "a").glob("*.mds"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "index.json").write_text(json.dumps(index))
    dataset = PackedStreamingDataset(tmp_path, processor=TokensProcessor())
    assert dataset[0] == {"number": 0}
    with pytest.raises(ConfigError, match="differ in their columns"):
        _ = dataset.core.pack_reader


def test_a_dataset_that_was_read_here_is_read_by_forked_workers_too(root: Path, s3: str, tmp_path: Path) -> None:
    store = open_storage(f"{s3}/forked")
    for path in (root / "a").iterdir():
        store.upload(path, path.name)
    dataset = PackedStreamingDataset(store.url, tmp_path, fetch=FetchConfig(timeout_s=30, ahead=2, threads=2))
    iterator = iter(dataset)
    next(iterator)  # its threads are at work
    loader: DataLoader[Sample] = DataLoader(dataset, batch_size=None, num_workers=2, timeout=60)
    assert sorted(int(sample["number"]) for sample in loader) == list(range(300))
    assert len(list(iterator)) == 299


def test_checksums_of_any_kind_in_the_index_are_checked(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "b", tmp_path / "b")
    dataset = PackedStreamingDataset(tmp_path / "b")
    assert {str(info.checksum).partition(":")[0] for info in dataset.core.shard_infos} == {"sha1"}
    path = tmp_path / "b" / dataset.core.shard_infos[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="does not match the size or checksum in its index"):
        PackedStreamingDataset(tmp_path / "b", tmp_path / "cache", fetch=FetchConfig(attempts=1))[0]
    index = (root / "b" / "index.json").read_text().replace('"sha1"', '"sha9"')
    (tmp_path / "b" / "index.json").write_text(index)
    with pytest.raises(ShardError, match=r"has checksums of unknown kinds \(sha9\): expected one of xxh3_64"):
        PackedStreamingDataset(tmp_path / "b")


def test_positions_beyond_the_epoch_belong_to_other_streams(root: Path) -> None:
    dataset = PackedStreamingDataset(root / "a", epoch_size=100)
    state = dataset.state_dict(50, True)
    with pytest.raises(CursorError, match="the saved state has epoch_size 100, this dataset has 300"):
        PackedStreamingDataset(root / "a").load_state_dict(state)


def test_our_samples_are_those_of_the_parent(root: Path, tmp_path: Path) -> None:
    parent = StreamingDataset(local=str(root / "a"), batch_size=1, shuffle=True)
    assert sorted(sample["number"] for sample in parent) == sorted(numbers(PackedStreamingDataset(root / "a")))
