from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.errors import StorageError
from lmms_stream.mds.core import PackCountsFolder, PackedDataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.shard import fetch_shard
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.storage.cache import LocalCache, Wanted, default_cache_folder
from lmms_stream.storage.local import CopiedFolder, LocalStorage
from lmms_stream.storage.retry import Retry
from lmms_stream.storage.storage import open_storage
from streaming import MDSWriter


def test_many_processes_fetch_an_object_once(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "object").write_bytes(os.urandom(1 << 20))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from lmms_stream.storage.cache import LocalCache, Wanted\n"
        "from tests.storage.counting import CountingStorage\n"
        "store = CountingStorage(Path(sys.argv[1]) / 'store')\n"
        "cache = LocalCache(store, Path(sys.argv[1]) / 'cache')\n"
        "valid = lambda p: p.is_relative_to(cache.folder) and p.stat().st_size == 1 << 20\n"
        "path = cache.fetch('object', Wanted(name='object', identity='1', num_bytes=1 << 20, valid=valid))\n"
        "assert path.stat().st_size == 1 << 20\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert (tmp_path / "store" / "downloads").read_text() == "object\n"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".object.lock", "object"]


def test_a_corrupt_copy_is_fetched_again(dataset_folder: Path, s3: str, tmp_path: Path) -> None:
    remote = f"{s3}/corrupt-copy"
    for name in ("index.json", *(info.name for info in PackedStreamingDataset(dataset_folder).core.shard_infos)):
        open_storage(remote).upload(dataset_folder / name, name)
    dataset = PackedStreamingDataset(remote, tmp_path)
    expected = dataset[:]
    names = [info.name for info in dataset.core.shard_infos]
    good = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(good[:-1])
    (tmp_path / names[1]).write_bytes((tmp_path / names[1]).read_bytes()[:-1] + b"\xff")
    (tmp_path / names[2]).unlink()
    assert PackedStreamingDataset(remote, tmp_path)[:] == expected
    assert (tmp_path / names[0]).read_bytes() == good


def test_shards_without_checksums_of_two_versions_are_not_mixed(tmp_path: Path, s3: str) -> None:
    for name, first in (("old", 0), ("new", 1000)):
        with MDSWriter(columns={"x": "int"}, out=str(tmp_path / name), size_limit=256) as writer:
            for number in range(40):
                writer.write({"x": first + number})
    store = open_storage(f"{s3}/two-versions")
    for path in (tmp_path / "old").iterdir():
        store.upload(path, path.name)

    dataset = PackedDataset(tmp_path / "old")
    first_shard, *others = [info.name for info in dataset.shard_infos]
    assert dataset.read([0])[0]["x"] == 0
    later_s = dataset.stored[0].cache.as_of_s + 1
    for name in others:
        (tmp_path / "new" / name).replace(tmp_path / "old" / name)
        os.utime(tmp_path / "old" / name, (later_s, later_s))
    with pytest.raises(StorageError, match=rf"{others[-1]} was written after the dataset was opened, .* start again"):
        dataset.read([39])

    copied = PackedDataset(StreamConfig(remote=store.url, local=tmp_path / "copies")).stored[0]
    fetch_shard(copied.cache, copied.shards[0])
    copied.cache.evict(first_shard)  # as under a cache_limit
    store.upload(tmp_path / "new" / first_shard, first_shard)
    with pytest.raises(StorageError, match=f"{first_shard} was written after the dataset was opened"):
        fetch_shard(copied.cache, copied.shards[0])
    assert not (tmp_path / "copies" / first_shard).exists()


def test_an_object_that_is_damaged_at_its_source_is_an_error(dataset_folder: Path, s3: str, tmp_path: Path) -> None:
    store = open_storage(f"{s3}/damaged-source")
    info = PackedStreamingDataset(dataset_folder).core.shard_infos[0]
    store.write(info.name, (dataset_folder / info.name).read_bytes()[:-1])
    with pytest.raises(StorageError, match="what was downloaded does not match the size or checksum in its index"):
        fetch_shard(LocalCache(store, tmp_path), info)
    assert [path.name for path in tmp_path.iterdir()] == [f".{info.name}.lock"]


def test_a_download_that_another_process_holds_is_waited_for_in_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "object").write_bytes(b"x")
    cache = LocalCache(LocalStorage(tmp_path / "store"), tmp_path / "cache", retry=Retry(timeout_s=0.2))
    (tmp_path / "cache").mkdir()
    script = (
        "import fcntl, sys, time\n"
        "lock = open(sys.argv[1], 'a')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "cache" / ".object.lock")], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        def in_cache(path: Path) -> bool:
            return path.is_relative_to(cache.folder)

        wanted = Wanted(name="object", identity="1", num_bytes=1, valid=in_cache)
        assert cache.fetch("object", wanted, wait=False) is None
        with pytest.raises(StorageError, match=r"was held by another process for 0\.2 s"):
            cache.fetch("object", wanted)
        holder.kill()
        holder.wait(timeout=10)
        path = cache.fetch("object", wanted)
        assert path is not None
        assert path.read_bytes() == b"x"


def test_a_local_dataset_is_read_where_it_lies(dataset_folder: Path, tmp_path: Path) -> None:
    """Without a folder of its own for copies: one that is named is filled."""
    dataset = PackedStreamingDataset(dataset_folder)
    before = set(dataset_folder.rglob("*.mds*"))
    assert len(dataset[:]) == len(dataset)
    assert set(dataset_folder.rglob("*.mds*")) == before
    assert dataset.core.one.folder_of_files == dataset_folder


@pytest.mark.parametrize("remote", [False, True])
def test_a_shard_changed_in_place_is_noticed_at_any_size_and_time(
    dataset_folder: Path, tmp_path: Path, remote: bool
) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(dataset_folder, folder)
    cache = LocalCache(CopiedFolder(folder) if remote else LocalStorage(folder), tmp_path / "copies")
    read: list[Path] = []
    data = (folder / "shard.00000.mds").read_bytes()

    def is_valid(path: Path) -> bool:
        read.append(path)
        return path.read_bytes() == data

    wanted = Wanted(name="shard.00000.mds", identity="x", num_bytes=1, valid=is_valid, remember=True)
    path = cache.fetch("shard.00000.mds", wanted)
    assert path is not None
    assert cache.fetch("shard.00000.mds", wanted) == path
    num_read = len(read)
    path.chmod(0o600)
    os.link(path, tmp_path / "link")
    assert cache.fetch("shard.00000.mds", wanted) == path == cache.fetch("shard.00000.mds", wanted)
    assert len(read) == num_read + 1  # equal bytes are no change, and are not compared again
    before = path.stat()
    time.sleep(0.01)
    with path.open("r+b") as file:
        file.write(b"damaged")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if remote:
        fetched = cache.fetch("shard.00000.mds", wanted)
        assert fetched is not None
        assert fetched.read_bytes() == data
    else:
        with pytest.raises(StorageError, match="does not match the size or checksum"):
            cache.fetch("shard.00000.mds", wanted)


def test_default_folders_differ_by_remote() -> None:
    assert default_cache_folder("s3://a/x") != default_cache_folder("s3://b/x")
    assert f"lmms_stream-{os.getuid()}" in str(default_cache_folder("s3://a/x"))


def test_a_default_folder_that_somebody_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_cache_folder("s3://a/x").parent.stat().st_mode & 0o077 == 0
    (tmp_path / f"lmms_stream-{os.getuid()}").rmdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"lmms_stream-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(StorageError, match="belongs to somebody else: name a folder of yours as local"):
        default_cache_folder("s3://a/x")


def test_counts_on_disk_come_back_and_damaged_ones_are_missing(tmp_path: Path) -> None:
    counts = PackCountsFolder(tmp_path / "counts")
    assert len(counts) == 0
    counts["plan-0"] = np.array([[3, 10, 0]])
    counts["plan-1"] = np.array([[4, 11, 1]])
    assert counts["plan-0"].tolist() == [[3, 10, 0]]
    assert sorted(counts) == ["plan-0", "plan-1"]
    del counts["plan-1"]
    assert counts.get("plan-1") is None
    path = tmp_path / "counts" / "plan-0.npy"
    path.write_bytes(path.read_bytes()[:-3])
    assert counts.get("plan-0") is None


def test_a_path_from_two_working_directories_has_two_default_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert default_cache_folder("data/train") == default_cache_folder(str(tmp_path / name / "data" / "train"))
        found.append(default_cache_folder("data/train"))
    assert found[0] != found[1]
    assert default_cache_folder("s3://a/x").name == hashlib.blake2b(b"s3://a/x", digest_size=16).hexdigest()
    assert default_cache_folder("/a/x").name == hashlib.blake2b(b"/a/x", digest_size=16).hexdigest()


def test_datasets_of_one_relative_path_do_not_share_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two compressed datasets of the same sizes, each read from its own working directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = []
    for tokens in ([1, 2, 3], [4, 5, 6]):
        folder = tmp_path / str(tokens[0])
        folder.mkdir()
        monkeypatch.chdir(folder)
        with MDSWriter(columns={"input_ids": "ndarray:int32"}, out="data", compression="zstd") as writer:
            writer.write({"input_ids": np.array(tokens, np.int32)})
        found.append(PackedStreamingDataset("data")[0]["input_ids"].tolist())
    assert found == [[1, 2, 3], [4, 5, 6]]
