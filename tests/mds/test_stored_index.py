"""Datasets of thousands of shards: their index is made into a table once a node, which every process maps."""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xxhash
from lmms_stream.errors import ConfigError, ShardError, StorageError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.index import parse_index
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.shard import map_file
from lmms_stream.mds.shard_list import identity_of
from lmms_stream.mds.shard_table import ShardTable
from lmms_stream.mds.stored_index import LONG_INDEX_BYTES, StoredIndex, read_index
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.storage.cache import default_cache_folder
from lmms_stream.storage.locks import locked
from lmms_stream.storage.storage import open_storage
from streaming import MDSWriter

from ..proxy import FaultProxy
from ..rounds import rounds

SHARDS = rounds(400, 4000)
NOTE_BYTES = rounds(3000, 0)  # in the entry of each shard: few shards have as long an index as thousands
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of hundreds of shards of 3 to 5 samples, all hard links to three of them; with a dataset.json."""
    root = tmp_path_factory.mktemp("long")
    for count in (3, 4, 5):
        with MDSWriter(columns={"number": "int"}, out=str(root / f"{count}"), hashes=["sha1"]) as writer:
            for number in range(count):
                writer.write({"number": 10 * count + number})
    kinds = [json.loads((root / f"{count}/index.json").read_bytes())["shards"][0] for count in (3, 4, 5)]
    folder = root / "data"
    entries, described = [], []
    for number in range(SHARDS):
        count = 3 + number % 3
        name = f"part-{number // (SHARDS // 2)}/shard.{number:05}.mds"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(root / f"{count}" / "shard.00000.mds", folder / name)
        entry = kinds[count - 3]
        entries.append({**entry, "raw_data": {**entry["raw_data"], "basename": name}, "note": "x" * NOTE_BYTES})
        data = (folder / name).read_bytes()
        described.append(
            {"name": name, "size": len(data), "num_samples": count, "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}, sort_keys=True))
    (folder / "_lmms").mkdir()
    parts = [{"num_samples": 8}]
    (folder / "_lmms/dataset.json").write_text(json.dumps({"lengths": [], "shards": described, "parts": parts}))
    assert (folder / "index.json").stat().st_size > LONG_INDEX_BYTES
    return folder


def read(folder: Path, cache: Path, validate_hash: str | None = None) -> StoredIndex:
    return read_index(open_storage(folder), cache, validate_hash=validate_hash, timeout_s=60)


def tables(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.glob("_lmms/index/*/about.json"))


@pytest.mark.parametrize("validate_hash", [None, "sha1"])
def test_a_long_index_says_the_same_from_a_table_as_from_memory(
    long: Path, validate_hash: str | None, tmp_path: Path
) -> None:
    index, dataset = (long / "index.json").read_bytes(), (long / "_lmms/dataset.json").read_bytes()
    expected = parse_index(index, source="index", dataset=dataset, validate_hash=validate_hash)
    found = read(long, tmp_path, validate_hash)
    assert isinstance(found.shards, ShardTable)
    assert [*found.shards] == expected
    assert found.shards[3:5] == expected[3:5]
    assert [dict(each.entry) for each in found.shards] == json.loads(index)["shards"]
    assert found.shards.samples.tolist() == [each.num_samples for each in expected]
    assert found.shards.sizes.tolist() == [each.size for each in expected]
    assert not found.shards.zip_sizes.any()
    assert found.shards.columns == {each.columns for each in expected}
    assert found.shards.folders == {"part-0", "part-1"}
    assert found.dataset == {"lengths": [], "parts": [{"num_samples": 8}]}
    assert [*found.shards.first(7)] == expected[:7]
    assert found.shards.identity == identity_of(expected) != found.shards.first(7).identity == identity_of(expected[:7])


def test_samples_are_read_through_a_table_in_this_process_and_in_another_from_its_path(
    long: Path, tmp_path: Path
) -> None:
    dataset = PackedDataset([StreamConfig(remote=long, local=tmp_path), StreamConfig(remote=long, local=tmp_path)])
    assert dataset.num_samples == 2 * (SHARDS * 4 - 1)
    assert [each["number"] for each in dataset.read([0, 3, 11, SHARDS * 4 - 1, -1])] == [30, 40, 54, 30, 32]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled).read([SHARDS * 4 + 2]) == [{"number": 40}]
    assert len(tables(tmp_path)) == 1


class Numbers:
    """Measures a sample by its number."""

    columns: ClassVar[tuple[str, ...]] = ("number",)
    schema: ClassVar[str] = "text"

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "numbers"}

    def measure(self, sample: Mapping[str, Any]) -> int:
        return int(sample["number"])

    def process(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError


def test_samples_of_a_long_index_are_measured_through_its_table(
    long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the table lies in the dataset's default cache folder
    folder = tmp_path / "data"
    shutil.copytree(long, folder, copy_function=os.link)
    (folder / "_lmms/dataset.json").unlink()  # a plain dataset: nothing in it is written to
    index = index_dataset(str(folder), Numbers(), num_workers=1)
    numbers = [10 * count + number for count in (3, 4, 5) for number in range(count)]
    assert index.lengths[:24].tolist() == 2 * numbers
    assert len(index.lengths) == SHARDS * 4 - 1
    cache = default_cache_folder(open_storage(folder).url)
    (table,) = tables(cache)
    made = (table / "about.json").stat().st_mtime_ns
    read = PackedDataset([StreamConfig(remote=folder, local=cache)])
    assert isinstance(read.one.shards, ShardTable)
    assert (table / "about.json").stat().st_mtime_ns == made


def test_a_grown_dataset_is_read_as_it_was_from_a_table(long: Path, tmp_path: Path) -> None:
    before = PackedDataset([StreamConfig(remote=long, local=tmp_path, num_parts=0)])
    assert before.num_samples == SHARDS * 4 - 1 - 8
    with pytest.raises(ConfigError, match=r"num_parts is 2, and .* has 1"):
        PackedDataset([StreamConfig(remote=long, local=tmp_path, num_parts=2)])


def test_one_of_many_that_open_a_dataset_at_once_reads_its_index_from_the_store(
    long: Path, running_proxy: FaultProxy, s3: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    url = f"{s3}/long"
    for name in ("index.json", "_lmms/dataset.json"):
        open_storage(url).upload(long / name, name)

    def digest(_: int) -> str:
        return read_index(open_storage(url), tmp_path, validate_hash=None, timeout_s=60).digest

    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(digest, range(8))}) == 1
    assert proxy.traffic().num_requests("GET", "index.json") == 1
    assert proxy.traffic().num_requests("GET", "dataset.json") == 1


def test_the_table_of_an_index_that_was_replaced_gives_way(long: Path, tmp_path: Path) -> None:
    folder, cache = copy(long, tmp_path)
    first = read(folder, cache)
    by_sha1 = read(folder, cache, "sha1")
    old = tables(cache)
    assert len(old) == 2
    change(folder, lambda index, dataset: [each["shards"].pop() for each in (index, dataset)])
    second = read(folder, cache)
    assert len(second.shards) == SHARDS - 1
    assert first.digest != second.digest
    assert len(first.shards) == len(by_sha1.shards) == SHARDS
    assert first.shards[SHARDS - 1].num_samples == 3  # who has it open reads on
    assert pickle.loads(pickle.dumps(first.shards))[SHARDS - 1].num_samples == 3  # and so do its workers
    assert len(tables(cache)) == 3
    del first
    gc.collect()
    change(folder, lambda index, dataset: [each["shards"].pop() for each in (index, dataset)])
    third = read(folder, cache)
    assert len({*tables(cache)} & {*old}) == 1  # that of the other checksums
    assert len(tables(cache)) == 3  # that of `second`, too
    assert [len(each.shards) for each in (second, third, by_sha1)] == [SHARDS - 1, SHARDS - 2, SHARDS]
    assert tables(cache)[0].parent.joinpath(".lock").exists()


def test_no_more_files_are_open_than_the_limit_allows_however_many_shards_are_read(long: Path, tmp_path: Path) -> None:
    dataset = PackedDataset([StreamConfig(remote=long, local=tmp_path)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = num_open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 30, limits[1]))
    try:
        shards = np.arange(300)
        addresses, _ = dataset.pack_reader.addresses(shards)  # of shards that are all open at a time
        assert len({*addresses.tolist()}) == len(shards)
        assert sum(sample["number"] for sample in dataset.read(range(0, 1200, 4))) > 0
        assert num_open_files() < num_open + 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_readers_that_are_idle_give_their_mappings_to_those_that_read(
    long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/part-")

    monkeypatch.setattr("lmms_stream.mds.reader.MAX_MAPPINGS", 60)
    datasets = [PackedDataset([StreamConfig(remote=long, local=tmp_path)]) for _ in range(6)]
    readers = [dataset.reader for dataset in datasets]
    for _ in range(2):
        for dataset in datasets:
            assert len([*dataset.read(range(0, 80, 4))]) == 20
    assert 50 <= num_mappings() <= 60
    assert len([*datasets[3].read(range(0, 160, 4))]) == 40
    assert [len(reader._open) for reader in readers] == [0, 0, 0, 40, 0, 20]  # the last, and what fits beside it
    addresses, opened = datasets[0].pack_reader.addresses(np.arange(50))
    assert len([*datasets[3].read(range(0, 800, 4))]) == 200
    assert len(datasets[0].pack_reader._open) == 0
    assert [opened[number].address for number in range(50)] == addresses.tolist()  # of a kernel in another thread, say
    assert num_mappings() <= 60 + 50
    del opened
    assert 50 <= num_mappings() <= 60
    many = np.arange(100)
    again = [datasets[0].pack_reader.addresses(many)[0] for _ in range(2)]  # all of them whatever the limit is
    assert again[0].all()
    assert np.array_equal(again[0], again[1])


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_mapping_ends_with_the_last_array_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1000)

    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    array = np.frombuffer(map_file(path), np.uint8)
    part = array[3:6]
    del array
    assert (bytes(part), part.flags.writeable, num_mappings()) == (b"abc", False, 1)
    del part
    assert num_mappings() == 0
    (tmp_path / "empty").touch()
    assert len(map_file(tmp_path / "empty")) == 0


@pytest.mark.parametrize("name", ["index.json", "shards.npy", "about.json"])
@pytest.mark.parametrize("left", [0, 100, None], ids=["emptied", "cut short", "gone"])
def test_a_table_that_is_not_whole_is_made_again(name: str, left: int | None, long: Path, tmp_path: Path) -> None:
    expected = len(read(long, tmp_path).shards)
    gc.collect()
    (folder,) = tables(tmp_path)
    (tmp_path / "_lmms/index/.writing-killed").mkdir()
    if left is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:left])
    if (name, left) == ("index.json", 100):
        with pytest.raises(ShardError, match="delete this folder, it is made again"):
            read(long, tmp_path).shards[SHARDS - 1]
        return
    found = read(long, tmp_path)
    assert isinstance(found.shards, ShardTable)
    assert (len(found.shards), found.shards[SHARDS - 1].num_samples) == (expected, 3)
    assert {path.name for path in (tmp_path / "_lmms/index").iterdir()} == {".lock", folder.name}


REFUSED: dict[str, tuple[str, Change]] = {
    "a path": ("is not a plain path below", lambda index, _: index["shards"][9]["raw_data"].update(basename="../x")),
    "a name twice": (
        "'part-0/shard.00000.mds' is named twice",
        lambda index, _: index["shards"][1]["raw_data"].update(basename="part-0/shard.00000.mds"),
    ),
    "a folder": (
        "'part-1' is a shard, and a folder of",
        lambda index, dataset: (
            index["shards"][0]["raw_data"].update(basename="part-1"),
            dataset["shards"][0].update(name="part-1"),
        ),
    ),
    "another version": ("MDS version 3 is not supported", lambda index, _: index.update(version=3)),
    "no version": ("not a valid MDS index", lambda index, _: index.pop("version")),
    "another size": ("list other shards", lambda _, dataset: dataset["shards"][7].update(size=9)),
    "a shard less": ("list other shards", lambda _, dataset: dataset["shards"].pop()),
    "a shard more": ("list other shards", lambda _, dataset: dataset["shards"].append({})),
    "a checksum": ("gives the checksum 'beef'", lambda _, dataset: dataset["shards"][7].update(xxh3_64="beef")),
    "an entry that is none": ("not a valid MDS index", lambda index, _: index["shards"].append(3)),
    "pickled": (
        "unpickling can run code: write it in another encoding",
        lambda index, _: index["shards"][5].update(column_encodings=["pkl"]),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_long_index_that_is_not_safe_is_refused_and_leaves_no_table(case: str, long: Path, tmp_path: Path) -> None:
    message, make = REFUSED[case]
    folder, cache = copy(long, tmp_path)
    change(folder, make)
    with pytest.raises(ShardError, match=message):
        read(folder, cache)
    assert [path.name for path in (cache / "_lmms/index").iterdir()] == [".lock"]


def test_a_long_index_that_ends_early_is_refused(long: Path, tmp_path: Path) -> None:
    folder, cache = copy(long, tmp_path)
    (folder / "index.json").write_bytes((long / "index.json").read_bytes()[:-100])
    with pytest.raises(ShardError, match="not a valid MDS index"):
        read(folder, cache)


def test_a_checksum_that_a_long_index_does_not_have_is_refused(long: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checksum of the kind validate_hash asks for"):
        read(long, tmp_path, "md5")


def test_a_table_that_was_damaged_is_named(long: Path, tmp_path: Path) -> None:
    shards = read(long, tmp_path).shards
    (folder,) = tables(tmp_path)
    (folder / "index.json").write_bytes(b"x" * (long / "index.json").stat().st_size)
    with pytest.raises(ShardError, match="delete this folder, it is made again"):
        shards[5]


def test_a_process_that_makes_a_table_for_too_long_is_an_error(long: Path, tmp_path: Path) -> None:
    (tmp_path / "_lmms/index").mkdir(parents=True)
    with (
        locked(tmp_path / "_lmms/index/.lock", timeout_s=0),
        pytest.raises(StorageError, match=r"was held by another process for 0\.1 s: does it still read"),
    ):
        read_index(open_storage(long), tmp_path, validate_hash=None, timeout_s=0.1)


def copy(long: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The index and the dataset.json in a folder that a test may change, and a folder for a cache."""
    folder = tmp_path / "data"
    (folder / "_lmms").mkdir(parents=True)
    for name in ("index.json", "_lmms/dataset.json"):
        (folder / name).write_bytes((long / name).read_bytes())
    return folder, tmp_path / "cache"


def change(folder: Path, make: Change) -> None:
    paths = folder / "index.json", folder / "_lmms/dataset.json"
    index, dataset = (json.loads(path.read_bytes()) for path in paths)
    make(index, dataset)
    for path, value in zip(paths, (index, dataset), strict=True):
        path.write_text(json.dumps(value))
