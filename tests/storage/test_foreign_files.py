"""A cache folder that holds files which are not copies of ours: read where they fit, and never replaced."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import boto3
import pytest
from lmms_stream.errors import StorageError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.storage.cache import LocalCache, Wanted
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.local import CopiedFolder
from lmms_stream.storage.s3 import S3Storage
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import StoredObject
from streaming import MDSWriter

from ..rounds import rounds


class SlowFolder(CopiedFolder):
    """A store whose user puts a file into the cache during a download."""

    def __init__(self, folder: Path, *, puts: bytes, cache: Path):
        super().__init__(folder)
        self._puts, self._cache = puts, cache

    def download(self, key: str, path: Path) -> None:
        super().download(key, path)
        (self._cache / key).write_bytes(self._puts)


def written(folder: Path, values: list[int], **options: object) -> Path:
    with MDSWriter(columns={"x": "int"}, out=str(folder), size_limit=64, **options) as writer:
        for value in values:
            writer.write({"x": value})
    return folder


def uploaded(folder: Path, remote: str) -> str:
    storage = open_storage(remote)
    for path in folder.iterdir():
        storage.upload(path, path.name)
    return remote


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("hashes", [["xxh3_64"], []])
def test_a_folder_that_holds_another_dataset_is_refused_and_left_as_it_is(
    hashes: list[str], s3_folder: str, tmp_path: Path
) -> None:
    remote = uploaded(written(tmp_path / "one", list(range(40)), hashes=hashes), s3_folder.replace("[", "-"))
    other = written(tmp_path / "two", list(range(100, 140)), hashes=hashes)
    before = contents(other)
    with pytest.raises(StorageError, match=r"(index\.json|\d\.mds) differs from .* and was not downl.*: name another"):
        PackedStreamingDataset(remote, other)[0]
    assert contents(other) == before
    assert [sample["x"] for sample in PackedStreamingDataset(other)[:]] == list(range(100, 140))


def test_copies_of_the_dataset_that_others_made_are_read(s3_folder: str, tmp_path: Path) -> None:
    remote = uploaded(written(tmp_path / "one", list(range(40)), hashes=["xxh3_64"]), s3_folder)
    dataset = PackedStreamingDataset(remote, tmp_path / "one")
    assert [sample["x"] for sample in dataset[:]] == list(range(40))
    assert dataset.core.one.cache.tally.total.misses == 0


@pytest.mark.parametrize("compression", ["zstd", None][: rounds(1, 2)])
@pytest.mark.parametrize("where", ["s3", "local"])
def test_a_dataset_that_was_written_again_at_the_same_size_gives_its_new_samples(
    where: str, compression: str | None, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums in its index, as MDSWriter writes it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = []
    for begin in (0, 100):
        folder = written(tmp_path / str(begin), list(range(begin, begin + 40)), compression=compression)
        if where == "local":
            folder.rename(tmp_path / "data")
            remote = str(tmp_path / "data")
        else:
            remote = uploaded(folder, f"{request.getfixturevalue('s3')}/written-again-{compression}")
        dataset = PackedStreamingDataset(remote)
        found.append([sample["x"] for sample in dataset[:]])
        assert [sample["x"] for sample in PackedStreamingDataset(remote)[:]] == found[-1]
        if where == "local":
            (tmp_path / "data").rename(tmp_path / f"old-{begin}")
        else:
            again = PackedStreamingDataset(remote)
            assert list(again.read(range(40))) == [{"x": x} for x in found[-1]]
            assert again.core.one.cache.tally.total.misses == 0
    assert found == [list(range(40)), list(range(100, 140))]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_compressed_dataset_that_was_written_again_in_its_folder_gives_its_new_samples(
    is_moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums, and of the same sizes; what was decoded before has a record that says so."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, other = (written(tmp_path / str(x), list(range(x, x + 40)), compression="zstd") for x in (100, 200))
    assert PackedStreamingDataset(local=folder)[0]["x"] == 100
    if is_moved:
        subprocess.run(["cp", "-a", folder, tmp_path / "moved"], check=True)
        folder = tmp_path / "moved"
        again = PackedStreamingDataset(local=folder)
        assert again[0]["x"] == 100
        assert again.core.one.cache.tally.total.misses == 0
    for path in other.iterdir():
        copyfile(path, folder / path.name)
    for dataset in (PackedStreamingDataset(folder), PackedStreamingDataset(local=folder)):
        assert dataset[0]["x"] == 200


def test_copies_of_earlier_releases_without_a_tag_are_kept_where_the_content_shows_that_they_are_current(
    s3_folder: str, tmp_path: Path
) -> None:
    remote = uploaded(written(tmp_path / "one", list(range(40))), s3_folder)
    cache = tmp_path / "cache"
    PackedStreamingDataset(remote, cache)[:]
    for path in cache.glob(".*.lock"):
        record = json.loads(path.read_bytes())
        path.write_text(json.dumps(record | {"identity": record["identity"].rpartition(" ")[0]}))
    dataset = PackedStreamingDataset(remote, cache)
    assert [sample["x"] for sample in dataset[:]] == list(range(40))
    assert dataset.core.one.cache.tally.total.misses == 0


def test_a_file_that_a_user_copies_over_a_copy_of_ours_is_never_deleted(s3_folder: str, tmp_path: Path) -> None:
    remote = uploaded(written(tmp_path / "one", list(range(40)), hashes=["xxh3_64"]), s3_folder)
    cache, mine = tmp_path / "cache", b"my notes"
    limit = sum((tmp_path / "one" / f"shard.0000{number}.mds").stat().st_size for number in (1, 2))
    PackedStreamingDataset(remote, cache)[0]
    (tmp_path / "mine").write_bytes(mine)
    copyfile(tmp_path / "mine", cache / "shard.00001.mds")  # as cp does it: into the same inode
    limited = PackedStreamingDataset(remote, cache, fetch=FetchConfig(cache_limit=limit))
    assert [sample["x"] for sample in limited[5:]] == list(range(5, 40))  # more than the limit: copies are evicted
    assert (cache / "shard.00001.mds").read_bytes() == mine
    assert PackedStreamingDataset(remote, cache)[0]["x"] == 0
    assert (cache / "shard.00001.mds.changed-1").read_bytes() == mine


class ByKey(CopiedFolder):
    """A store whose tags look like digests, as S3 gives them to objects that its keys encrypt."""

    def stat(self, key: str) -> StoredObject:
        return replace(super().stat(key), tag="0123456789abcdef" * 2, has_opaque_tag=True)


def test_a_copy_of_an_object_that_a_key_encrypts_is_read_as_it_is(s3: str, s3_folder: str, tmp_path: Path) -> None:
    store, cache = written(tmp_path / "store", [1, 2]), written(tmp_path / "cache", [1, 2])
    for folder in (cache, tmp_path / "empty"):
        dataset = PackedDataset(StreamConfig(remote=store, local=folder, source=ByKey(store)))
        assert [sample["x"] for sample in dataset.read([0, 1])] == [1, 2]
        assert (dataset.one.cache.tally.total.misses > 0) == (folder != cache)
    remote = open_storage(s3_folder)
    assert isinstance(remote, S3Storage)
    client: Any = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    for key, options in (("kms", {"ServerSideEncryption": "aws:kms"}), ("own", {})):
        client.put_object(Bucket=remote.bucket, Key=f"{remote.prefix}/{key}", Body=b"x", **options)
        assert remote.stat(key).has_opaque_tag == (key == "kms")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_a_user_puts_there_during_the_download_is_never_replaced(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = tmp_path / "store", tmp_path / "cache"
    for each in (store, folder):
        each.mkdir()
    (store / "object").write_bytes(b"content")
    if not has_links:  # as of FAT

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr("os.link", refuse)
    wanted = Wanted(name="object", identity="1", num_bytes=7, valid=lambda path: path.read_bytes() == b"content")
    with pytest.raises(StorageError, match=r"object differs from .*, and was not downloaded by lmms-stream"):
        LocalCache(SlowFolder(store, puts=b"my notes", cache=folder), folder).fetch("object", wanted)
    assert (folder / "object").read_bytes() == b"my notes"
    (folder / "object").unlink()
    mine = LocalCache(SlowFolder(store, puts=b"content", cache=folder), folder)
    assert mine.fetch("object", wanted) == folder / "object"
    mine.evict("object")  # it is the user's file
    assert sorted(path.name for path in folder.iterdir()) == [".object.lock", "object"]
