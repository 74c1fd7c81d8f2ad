"""A folder that is named as local is filled, from a store and from a folder, and is a dataset by itself afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import streaming
from lmms_stream import (
    FetchConfig,
    PackedStreamingDataset,
    PackingConfig,
    Stream,
    StreamingDataset,
    TokensProcessor,
)
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import LengthsError, StorageError
from lmms_stream.mds.lengths import lengths_names
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus

from ..conftest import write_tokens
from ..rounds import rounds
from ..storage.test_foreign_files import uploaded, written

VALUES = list(range(24))  # of a shard each


def values_of(dataset: Any) -> list[int]:
    return [int(dataset[number]["x"]) for number in range(len(dataset))]


def moved(folder: Path, where: str, s3_folder: str) -> tuple[str, Any]:
    """A dataset's URL in a store or its folder, and what takes it away."""
    if where == "folder":
        return str(folder), lambda: shutil.rmtree(folder)
    remote = uploaded(folder, s3_folder)
    storage = open_storage(remote)

    def delete() -> None:
        for each in storage.list_objects(""):
            storage.delete(each.key)

    return remote, delete


@pytest.mark.parametrize(
    ("keep_zip", "where"),
    [*product((None, False, True), ["folder"]), (None, "store"), *rounds([], [(False, "store"), (True, "store")])],
)
def test_what_was_read_once_is_read_without_its_source_by_us_and_by_mosaicml(
    where: str, keep_zip: bool | None, s3_folder: str, tmp_path: Path
) -> None:
    zipped: dict[str, Any] = {} if keep_zip is None else {"compression": "zstd", "hashes": ["xxh64"]}
    remote, take_away = moved(written(tmp_path / "source", VALUES, **zipped), where, s3_folder)
    local = tmp_path / "local"
    dataset = StreamingDataset(remote=remote, local=str(local), batch_size=1, keep_zip=bool(keep_zip))
    assert values_of(dataset) == VALUES
    names = {path.suffix for path in local.iterdir() if not path.name.startswith((".", "_"))}
    assert names == ({".json", ".mds", ".zstd"} if keep_zip else {".json", ".mds"})
    take_away()
    assert values_of(StreamingDataset(local=str(local), batch_size=1)) == VALUES
    assert values_of(PackedStreamingDataset(local)) == VALUES
    theirs: dict[str, Any] = (
        {"remote": remote} if keep_zip is False else {}
    )  # as the class looks for compressed files without it
    assert values_of(streaming.StreamingDataset(local=str(local), batch_size=1, **theirs)) == VALUES


@pytest.mark.parametrize("where", ["store", "folder"])
def test_packs_are_the_same_without_the_source(where: str, s3_folder: str, tmp_path: Path) -> None:
    source, local = tmp_path / "source", tmp_path / "local"
    write_tokens(source, num_samples=900)
    remote = str(source) if where == "folder" else _all_uploaded(source, s3_folder)
    options: dict[str, Any] = {"processor": TokensProcessor(), "packing": PackingConfig(packing_length=128)}
    dataset = PackedStreamingDataset(remote, local, **options)
    fingerprint, lengths = dataset.plan.fingerprint, dataset.length_index().content_hash
    expected = dataset.plan.packs(0, 0, dataset.plan.num_packs(0)).sample_ids.tolist()
    assert len(dataset[:]) == 900
    shutil.rmtree(source)
    again = PackedStreamingDataset(local, **options)
    assert (again.plan.fingerprint, again.length_index().content_hash) == (fingerprint, lengths)
    assert again.plan.packs(0, 0, again.plan.num_packs(0)).sample_ids.tolist() == expected
    assert len(again[:]) == 900


def _all_uploaded(folder: Path, remote: str) -> str:
    storage = open_storage(remote)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, path.relative_to(folder).as_posix())
    return remote


def test_a_folder_without_another_one_as_local_is_read_in_place(tmp_path: Path) -> None:
    source = written(tmp_path / "source", VALUES)
    before = {path.name for path in source.iterdir()}
    names: list[dict[str, Any]] = [{}, {"local": str(source)}]
    for named in names:
        dataset = StreamingDataset(remote=str(source), batch_size=1, **named)
        assert values_of(dataset) == VALUES
        assert dataset.core.one.cache.tally.total.misses == 0
        assert not dataset.core.one.is_copied
    assert {path.name for path in source.iterdir() if not path.name.startswith(("_", "."))} == before


@pytest.mark.parametrize("local", [None, "local"])
def test_relative_folders_stay_those_of_when_the_dataset_was_opened(
    local: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("source"), VALUES)
    dataset = PackedStreamingDataset("source", local)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert values_of(dataset) == VALUES
    assert not [*Path().iterdir()]


def test_the_index_follows_its_source_and_one_of_others_stays(s3_folder: str, tmp_path: Path) -> None:
    remote, local = s3_folder, tmp_path / "local"
    uploaded(written(tmp_path / "one", VALUES, hashes=["xxh64"]), remote)
    assert len(PackedStreamingDataset(remote, local)) == len(VALUES)
    first = (local / "index.json").read_bytes()
    uploaded(written(tmp_path / "two", VALUES[:-6], hashes=["xxh64"]), remote)
    assert len(PackedStreamingDataset(remote, local)) == len(VALUES) - 6
    second = (local / "index.json").read_bytes()
    assert first != second == (tmp_path / "two/index.json").read_bytes()
    other = json.dumps({"version": 2, "shards": []}).encode()
    (local / "index.json").write_bytes(other)
    with pytest.raises(StorageError, match=r"index\.json differs from s3://.*, and was not downloaded by lmms-stream"):
        PackedStreamingDataset(remote, local)
    assert (local / "index.json").read_bytes() == other


def test_the_index_is_no_part_of_what_gives_way_to_a_limit(s3_folder: str, tmp_path: Path) -> None:
    remote = uploaded(written(tmp_path / "one", VALUES, hashes=["xxh64"]), s3_folder)
    size = max(path.stat().st_size for path in (tmp_path / "one").glob("*.mds"))
    dataset = PackedStreamingDataset(remote, tmp_path / "local", fetch=FetchConfig(cache_limit=2 * size + 1, ahead=1))
    assert values_of(dataset) == VALUES
    assert len(list((tmp_path / "local").glob("*.mds"))) <= 2
    assert (tmp_path / "local/index.json").exists()


def test_a_store_that_cannot_be_reached_is_done_without_where_all_is_here(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remote, local = uploaded(written(tmp_path / "one", VALUES, hashes=["xxh64"]), s3_folder), tmp_path / "local"
    dataset, fetch = PackedStreamingDataset(remote, local), FetchConfig(attempts=1, timeout_s=2)
    dataset[0]
    with monkeypatch.context() as changed:
        changed.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StorageError, match=r"index\.json"):  # some shards are not here
            PackedStreamingDataset(remote, local, fetch=fetch)
    assert values_of(dataset) == VALUES
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    assert values_of(PackedStreamingDataset(remote, local, fetch=fetch)) == VALUES
    assert f"reading the dataset in {local}, which holds all of it: s3://" in caplog.text


def test_where_the_source_is_gone_the_error_says_how_to_read_what_is_here(tmp_path: Path) -> None:
    source, local = written(tmp_path / "source", VALUES), tmp_path / "local"
    assert values_of(PackedStreamingDataset(source, local)) == VALUES
    shutil.rmtree(source)
    with pytest.raises(StorageError, match=rf"or, because {local} holds a whole dataset, leave remote out and name"):
        PackedStreamingDataset(source, local)
    assert values_of(PackedStreamingDataset(local=local)) == VALUES


@pytest.mark.parametrize("hashes", [["xxh64"], []])
def test_a_folder_is_filled_with_one_dataset_and_another_one_is_refused(hashes: list[str], tmp_path: Path) -> None:
    one = written(tmp_path / "one", VALUES, hashes=hashes)
    two = written(tmp_path / "two", [1000 + value for value in VALUES], hashes=hashes)
    local = tmp_path / "local"
    refusal = rf"{local} holds copies of the dataset at {one}, which copies of {two} would replace: name another folder"
    with pytest.raises(StorageError, match=refusal):
        StreamingDataset(streams=[Stream(remote=one, local=local), Stream(remote=two, local=local)], batch_size=1)
    with pytest.raises(StorageError, match=refusal):
        PackedStreamingDataset(two, local)
    assert values_of(PackedStreamingDataset(one, local)) == VALUES
    both = [Stream(remote=one, local=local), Stream(remote=two, local=tmp_path / "another")]
    dataset = StreamingDataset(streams=both, batch_size=1)
    assert sorted(values_of(dataset)) == [*VALUES, *(1000 + value for value in VALUES)]


def test_the_folder_of_a_dataset_that_has_moved_is_used_again_once_notes_and_index_are_removed(
    tmp_path: Path,
) -> None:
    source, local = written(tmp_path / "source", VALUES), tmp_path / "local"
    assert values_of(PackedStreamingDataset(source, local)) == VALUES
    moved = source.rename(tmp_path / "moved")
    notes = local / "_lmms/filled.json"
    with pytest.raises(StorageError, match=rf"or, for the same dataset, remove {notes} and index\.json there"):
        PackedStreamingDataset(moved, local)
    for path in (notes, local / "index.json"):
        path.unlink()
    dataset = PackedStreamingDataset(moved, local)
    assert values_of(dataset) == VALUES
    assert dataset.core.one.cache.tally.total.misses == 0


def test_a_dataset_with_checksums_is_known_by_its_shards_whatever_path_leads_to_it(tmp_path: Path) -> None:
    one = written(tmp_path / "one", VALUES, hashes=["xxh64"])
    local, mounted = tmp_path / "local", shutil.copytree(one, tmp_path / "mounted")
    assert values_of(PackedStreamingDataset(one, local)) == VALUES
    for source in (mounted, one, mounted):
        dataset = PackedStreamingDataset(source, local)
        assert values_of(dataset) == VALUES
        assert dataset.core.one.cache.tally.total.misses == 0
    shutil.rmtree(one)
    longer = written(one, [*VALUES, 24, 25, 26], hashes=["xxh64"])  # it has grown meanwhile
    assert values_of(PackedStreamingDataset(longer, local)) == [*VALUES, 24, 25, 26]
    other = written(tmp_path / "other", [0, *(1000 + value for value in VALUES[1:])], hashes=["xxh64"])
    with pytest.raises(StorageError, match=rf"{local} holds copies of the dataset at {one}"):
        PackedStreamingDataset(other, local)


def test_a_folder_that_is_filled_with_another_dataset_does_not_stand_in_for_a_store_out_of_reach(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, local = uploaded(written(tmp_path / "one", VALUES), s3_folder), tmp_path / "local"
    assert values_of(PackedStreamingDataset(one, local)) == VALUES
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=rf"{local} holds copies of the dataset at {one}"):
        PackedStreamingDataset(f"{s3_folder}-two", local, fetch=FetchConfig(attempts=1, timeout_s=2))


def test_compressed_shards_without_checksums_are_read_without_their_source(tmp_path: Path) -> None:
    source, local = written(tmp_path / "source", VALUES, compression="zstd"), tmp_path / "local"
    assert values_of(StreamingDataset(remote=str(source), local=str(local), batch_size=1)) == VALUES
    shutil.rmtree(source)
    assert values_of(StreamingDataset(local=str(local), batch_size=1)) == VALUES
    assert not list(local.glob("*.zstd"))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("can_write", [True, False])
def test_copies_without_checksums_that_were_copied_to_another_disk_are_read(
    can_write: bool, compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, local = written(tmp_path / "source", VALUES, compression=compression), tmp_path / "local"
    assert values_of(PackedStreamingDataset(source, local)) == VALUES
    moved = shutil.copytree(local, tmp_path / "moved")  # keeps times, as cp -a does
    if not can_write:
        monkeypatch.setattr("os.access", lambda path, mode: not Path(path).is_relative_to(moved))
    dataset = PackedStreamingDataset(source, moved)
    assert values_of(dataset) == VALUES
    assert dataset.core.one.cache.tally.total.misses == 0


def test_a_filled_folder_that_was_measured_is_filled_from_its_source_again(
    corpus: Corpus, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    source, local = tmp_path / "source", tmp_path / "local"
    convert([corpus.functions], str(source), shard_bytes=1 << 16)
    num_samples = len(PackedStreamingDataset(source, local)[:])
    described = (source / "_lmms/dataset.json").read_bytes()
    assert (local / "_lmms/dataset.json").read_bytes() == described
    index_dataset(str(local), chat_processor, num_workers=1)
    assert (local / "_lmms/dataset.json").read_bytes() != described
    assert len(PackedStreamingDataset(local).length_index().lengths) == num_samples
    assert len(PackedStreamingDataset(source, local)[:]) == num_samples
    assert (local / "_lmms/dataset.json").read_bytes() == described
    packing = PackingConfig(packing_length=8192)
    by_itself = PackedStreamingDataset(local, processor=chat_processor, packing=packing)
    assert len(by_itself.length_index().lengths) == num_samples


def test_a_filled_folder_passes_verify_which_names_files_that_were_not_read(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    PackedStreamingDataset(dataset_folder, local)[:]
    array = lengths_names(processor_fingerprint(chat_processor))[0]
    report = verify_dataset(str(local))
    assert not report.problems
    said = f"not here, as this folder is filled from {dataset_folder} with files that are read: verify {dataset_folder}"
    assert any(array in note and said in note for note in report.notes)
    packing = PackingConfig(packing_length=8192)
    dataset = PackedStreamingDataset(dataset_folder, local, processor=chat_processor, packing=packing)
    assert dataset.plan.num_packs(0)
    assert (local / array).read_bytes() == (dataset_folder / array).read_bytes()
    report = verify_dataset(str(local))
    assert (report.problems, report.num_lengths_indexes) == ((), 1)
    shard = next(local.glob("*.mds"))
    shard.unlink()
    assert [problem.where for problem in verify_dataset(str(local)).problems] == [shard.name]


def test_an_array_of_lengths_that_is_missing_is_named_as_the_dataset_names_it(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    source = shutil.copytree(dataset_folder, tmp_path / "source")
    array = lengths_names(processor_fingerprint(chat_processor))[0]
    (source / array).unlink()
    for local in (None, tmp_path / "local"):
        with pytest.raises(LengthsError, match=rf"description of a lengths index without the index \({array}\)"):
            PackedStreamingDataset(source, local).length_index()


def test_nothing_is_filled_where_the_notes_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, local = written(tmp_path / "source", VALUES, hashes=["xxh64"]), tmp_path / "local"
    (local / "_lmms").mkdir(parents=True)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != local / "_lmms")
    assert values_of(PackedStreamingDataset(source, local)) == VALUES
    assert not (local / "index.json").exists()
    assert not list((local / "_lmms").iterdir())


def test_a_copy_of_a_filled_folder_follows_its_source_that_has_grown(tmp_path: Path) -> None:
    source, local, moved_to = tmp_path / "source", tmp_path / "local", tmp_path / "moved"
    write_tokens(source, num_samples=50)
    options: dict[str, Any] = {"processor": TokensProcessor(), "packing": PackingConfig(packing_length=128)}
    assert len(PackedStreamingDataset(source, local, **options)[:]) == 50
    subprocess.run(["cp", "-a", local, moved_to], check=True)
    shutil.rmtree(source)
    write_tokens(source, num_samples=80)
    assert len(PackedStreamingDataset(source, moved_to, **options)[:]) == 80
    assert not [*moved_to.rglob("*.changed-*")]  # the copies of copies are downloads of ours, too
