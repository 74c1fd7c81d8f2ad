"""Datasets that are stored already as sources: their samples are moved, chosen, measured or mapped again."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.sources.mds import DatasetFiles
from lmms_stream.converters.stored.catalog import open_lengths, read_catalog
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.writing.work import work_folder
from lmms_stream.errors import ConfigError, DataError, ObjectMissingError, ShardError
from lmms_stream.mds.index import DATASET_NAME
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.provenance import Provenance
from lmms_stream.mds.shard import Shard, fetch_shard
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.cache import LocalCache
from lmms_stream.storage.s3 import S3Storage
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import StoredObject
from numpy.typing import NDArray
from streaming import MDSWriter

from ..conftest import run_command
from ..rounds import LONG
from .test_convert_runs import written

ALL_ENCODINGS: Mapping[str, tuple[str, Any]] = {
    "words": ("str", "é"),
    "data": ("bytes", b"\0\1"),
    "whole": ("int", 7),
    "real": ("float64", 0.1),
    "small": ("uint8", np.uint8(3)),
    "object": ("json", {"a": [1, None]}),
    "array": ("ndarray:float32", np.arange(3, dtype=np.float32)),
    "fixed": ("ndarray:int16:2,2", np.ones((2, 2), np.int16)),
    "any": ("ndarray", np.ones(2, np.int8)),
    "digits": ("str_int", 10**30),
}


def stored_samples(url: str | Path) -> list[bytes]:
    """The bytes of all samples of a dataset, in their order."""
    catalog = read_catalog(open_storage(str(url)))
    with tempfile.TemporaryDirectory() as folder:
        cache = LocalCache(catalog.storage, Path(folder))
        shards = [Shard(fetch_shard(cache, info), info) for info in catalog.shards]
        return [bytes(shard.stored(number, number + 1)) for shard in shards for number in range(len(shard))]


def lengths_of(url: str | Path, fingerprint: str) -> NDArray[np.integer[Any]]:
    index = open_lengths(open_storage(str(url)), fingerprint, folder=Path("unused"))
    assert index is not None
    return np.asarray(index.lengths)


def num_samples_of_shards(url: Path) -> list[int]:
    return [info.num_samples for info in read_catalog(open_storage(url)).shards]


def write_plain(folder: Path, columns: Mapping[str, tuple[str, Any]], *, count: int = 20, **settings: Any) -> Path:
    encodings = {name: encoding for name, (encoding, _) in columns.items()}
    with MDSWriter(out=str(folder), columns=encodings, size_limit=1 << 11, **settings) as writer:
        for _ in range(count):
            writer.write({name: value for name, (_, value) in columns.items()})
    return folder


def test_other_shards_hold_the_same_bytes_whatever_the_number_of_workers(dataset_folder: Path, tmp_path: Path) -> None:
    samples = stored_samples(dataset_folder)
    for number, num_workers in enumerate((1, 2)):
        convert([dataset_folder], str(tmp_path / f"{number}"), num_workers=num_workers, shard_bytes=1 << 15)
    assert stored_samples(tmp_path / "0") == samples
    assert len(num_samples_of_shards(tmp_path / "0")) > len(num_samples_of_shards(dataset_folder))
    for path in (tmp_path / "0").glob("*.mds"):
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()
    said = [json.loads((folder / DATASET_NAME).read_bytes()) for folder in (dataset_folder, tmp_path / "0")]
    assert said[0]["schema"] == said[1]["schema"] == "messages"


def test_shuffled_split_and_compressed_samples_keep_their_lengths_and_rows(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    source = f"{dataset_folder}@[5:60]"
    convert([source], str(first), num_workers=1, processor=chat_processor, samples_per_shard=9)
    fingerprint = processor_fingerprint(chat_processor)
    split = {"a": 0.5, "b": 0.5}
    convert([first], str(tmp_path / "split"), num_workers=1, shuffle_seed=3, splits=split, compression="zstd")
    known = dict(zip(stored_samples(first), lengths_of(first, fingerprint).tolist(), strict=True))
    origins = Provenance.of(open_storage(first))
    assert origins is not None
    rows = {data: origins.source_of(number) for number, data in enumerate(stored_samples(first))}
    found: list[bytes] = []
    for name in split:
        samples = stored_samples(tmp_path / "split" / name)
        assert lengths_of(tmp_path / "split" / name, fingerprint).tolist() == [known[data] for data in samples]
        made_of = Provenance.of(open_storage(tmp_path / "split" / name))
        assert made_of is not None
        assert [made_of.source_of(number) for number in range(len(samples))] == [rows[data] for data in samples]
        found += samples
    assert sorted(found) == sorted(known)
    assert found != list(known)


def test_every_encoding_of_mdswriter_is_moved(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "plain", ALL_ENCODINGS, compression="gz", hashes=["sha1"])
    convert([source], str(tmp_path / "again"), num_workers=1, num_shards=3)
    assert stored_samples(tmp_path / "again") == stored_samples(source)
    assert num_samples_of_shards(tmp_path / "again") == [6, 7, 7]
    assert json.loads((tmp_path / "again" / DATASET_NAME).read_bytes())["schema"] == "columns"


def test_a_merged_dataset_is_a_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_plain(tmp_path / "all" / name, {"text": ("str", name)}, hashes=["xxh64"])
    merge_datasets(str(tmp_path / "all"), [str(tmp_path / "all" / name) for name in ("a", "b")])
    convert([tmp_path / "all"], str(tmp_path / "one"), num_workers=1)
    assert [sample["text"] for sample in PackedStreamingDataset(tmp_path / "one")[:]] == ["a"] * 20 + ["b"] * 20


def test_a_dataset_of_a_store_is_a_source_and_leaves_nothing_behind(
    s3_folder: str, dataset_folder: Path, tmp_path: Path
) -> None:
    remote = s3_folder
    convert([f"{dataset_folder}@[0:30]"], f"{remote}/a", num_workers=1, samples_per_shard=7, compression="zstd")
    convert([f"{remote}/a"], str(tmp_path / "here"), num_workers=1, work=tmp_path / "work")
    assert stored_samples(tmp_path / "here") == stored_samples(dataset_folder)[:30]
    assert not [path for path in (tmp_path / "work").rglob("*") if path.is_file()]


@pytest.mark.parametrize("is_array", [False, True])
def test_ids_choose_samples_in_the_order_of_the_dataset(is_array: bool, dataset_folder: Path, tmp_path: Path) -> None:
    ids = [70, 3, 4, 41]
    path = tmp_path / ("ids.npy" if is_array else "ids.txt")
    if is_array:
        np.save(path, np.array(ids))
    else:
        path.write_text("".join(f"{number}\n" for number in ids))
    convert([dataset_folder], str(tmp_path / "some"), num_workers=1, ids=str(path))
    samples = stored_samples(dataset_folder)
    assert stored_samples(tmp_path / "some") == [samples[number] for number in sorted(ids)]
    origins = Provenance.of(open_storage(tmp_path / "some"))
    source = Provenance.of(open_storage(dataset_folder))
    if source is None:
        assert origins is not None
        assert [origins.source_of(number).row for number in range(4)] == [4, 5, 42, 71]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n1\n", "holds the id 1 twice"),
        ("one\n", "holds no ids .*: write one number a line"),
        ("1000000\n", "has no sample 1000000: the ids of its samples are 0 to"),
        ("", r"holds int64\[0\], expected ids"),
    ],
)
def test_ids_that_choose_nothing_are_named(text: str, message: str, dataset_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        convert([dataset_folder], str(tmp_path / "some"), num_workers=1, ids=str(tmp_path / "ids.txt"))


def test_ids_are_of_one_dataset_without_a_slice(dataset_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("1\n")
    ids = str(tmp_path / "ids.txt")
    with pytest.raises(DataError, match="which need exactly one source, an MDS dataset"):
        convert([dataset_folder, dataset_folder], str(tmp_path / "some"), ids=ids)
    with pytest.raises(DataError, match="a slice and ids both select samples"):
        convert([f"{dataset_folder}@[0:2]"], str(tmp_path / "some"), ids=ids)


def test_samples_are_tokenized_as_their_rows_would_be(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    source = f"{dataset_folder}@[0:8]"
    report = convert([source], str(tmp_path / "t"), num_workers=1, processor=chat_processor, tokenize=True)
    tokens = PackedStreamingDataset(tmp_path / "t")
    expected = chat_processor.process(PackedStreamingDataset(dataset_folder)[3])["input_ids"]
    assert report.num_rows == 8
    assert tokens[3]["input_ids"].tolist() == list(expected)


def test_rows_are_mapped_again_where_that_is_asked_for(dataset_folder: Path, tmp_path: Path) -> None:
    source = f"{dataset_folder}@[0:8]"
    convert([source], str(tmp_path / "s"), num_workers=1, schema=SchemaOptions(system="Be brief."))
    before, after = PackedStreamingDataset(dataset_folder)[0], PackedStreamingDataset(tmp_path / "s")[0]
    assert json.loads(after["messages"]) == [
        {"role": "system", "content": "Be brief."},
        *json.loads(before["messages"]),
    ]


@pytest.mark.parametrize("name", ["system", "label", "images", "chosen", "input_ids"])
def test_a_kept_column_of_a_stored_dataset_is_not_read_for_its_name(name: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    source, columns = tmp_path / "rows.jsonl", {"images": "", "system": ""}
    source.write_text(json.dumps({"messages": messages, name: 1 if name == "label" else "x"}))
    convert(source, tmp_path / "a", num_workers=1, kind="messages", columns=columns, keep=[name])
    convert(tmp_path / "a", tmp_path / "b", num_workers=1, keep=[name])
    before, after = (PackedStreamingDataset(tmp_path / each)[0] for each in ("a", "b"))
    assert before == after
    convert(tmp_path / "a", tmp_path / "c", num_workers=1, columns={"system": name})
    assert "system" in PackedStreamingDataset(tmp_path / "c")[0]["messages"]


def test_a_dataset_cannot_be_its_own_source(dataset_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a source and the target: choose another target"):
        convert([dataset_folder], str(dataset_folder), overwrite=True)


def test_datasets_of_other_columns_are_not_mixed(tmp_path: Path) -> None:
    sources = [write_plain(tmp_path / "a", {"x": ("int", 1)}), write_plain(tmp_path / "b", {"x": ("str", "1")})]
    with pytest.raises(DataError, match=r"b gives samples with x \(str\) and .*a with x \(int\)"):
        convert(sources, str(tmp_path / "c"), num_workers=1)


def test_pickled_columns_are_refused(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "a", {"x": ("pkl", {1})})
    with pytest.raises(ShardError, match="column 'x' is pickled"):
        convert([source], str(tmp_path / "c"), num_workers=1)


def test_the_folder_above_datasets_names_them(tmp_path: Path) -> None:
    write_plain(tmp_path / "all" / "train", {"x": ("int", 1)})
    with pytest.raises(DataError, match=r"holds the datasets train: name each of them, for example .*/train"):
        convert([tmp_path / "all"], str(tmp_path / "c"), num_workers=1)


def test_a_damaged_shard_ends_the_conversion(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "a", {"x": ("int", 1)}, hashes=["xxh3_64"])
    path = source / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(Exception, match=r"shard\.00000\.mds"):
        convert([source], str(tmp_path / "c"), num_workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 2, "samples_per_shard": 2}, "--num-shards and --samples-per-shard both set the size of shards"),
        ({"num_shards": 2, "shard_bytes": 4096}, "--num-shards and --shard-size both set the size of shards"),
        ({"num_shards": 0}, "num_shards must be at least 1, got 0"),
        ({"samples_per_shard": -1}, "samples_per_shard must be at least 1, got -1"),
    ],
)
def test_sizes_of_shards_that_exclude_each_other_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(["rows.jsonl"], "target", **options)


def test_more_shards_than_samples_are_refused(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "a", {"x": ("int", 1)}, count=3)
    with pytest.raises(DataError, match="3 samples cannot fill 4 shards: ask for fewer with --num-shards"):
        convert([source], str(tmp_path / "c"), num_workers=1, num_shards=4)


KILLED = """
import os
import sys
from pathlib import Path

from lmms_stream.converters.convert import Progress, convert

journal = Path(sys.argv[2])

def killed_once_a_shard_is_kept(num_rows):
    if journal.exists() and journal.stat().st_size:
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    convert(
        ["plain"],
        "out",
        num_workers=int(sys.argv[1]),
        shard_bytes=1 << 14,
        progress=Progress(rows=killed_once_a_shard_is_kept),
    )
"""


@pytest.mark.parametrize("num_workers", [2, *([1] if LONG else [])])
def test_a_conversion_of_shards_that_is_killed_goes_on_to_the_same_bytes(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plain(Path("plain"), {"words": ("str", "some words"), "data": ("bytes", bytes(100))}, count=3000)
    Path("script.py").write_text(KILLED)
    journal = work_folder("out", None) / "shards.jsonl"
    killed = run_command(sys.executable, "script.py", str(num_workers), str(journal))
    assert killed.returncode == -9, killed.stderr
    kept = [Path("out", json.loads(line)[2]["raw_data"]["basename"]) for line in journal.read_text().splitlines()]
    made = {path: path.stat().st_mtime_ns for path in kept}
    assert made
    assert not Path("out/index.json").exists()
    report = convert(["plain"], "out", num_workers=num_workers, shard_bytes=1 << 14)
    assert report.num_rows == 3000
    assert made == {path: path.stat().st_mtime_ns for path in kept}
    convert(["plain"], "once", num_workers=3 - num_workers, shard_bytes=1 << 14)
    assert written("out") == written("once")
    assert stored_samples("out") == stored_samples("plain")


def test_shards_without_checksums_are_listed_and_not_asked_for_one_by_one(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_plain(tmp_path / "plain", {"words": ("str", "some words")}, count=200)
    store = open_storage(s3_folder)
    for path in plain.iterdir():
        store.upload(path, path.name)
    asked: list[str] = []
    stat = S3Storage.stat

    def noted(storage: S3Storage, key: str) -> StoredObject:
        asked.append(key)
        return stat(storage, key)

    monkeypatch.setattr(S3Storage, "stat", noted)

    def tag(url: str | Path) -> object:
        dataset = DatasetFiles.read(open_storage(url))
        assert dataset is not None
        assert len(dataset.shards) > 1
        return dataset.identity("plain")["tag"]

    for url, folder in ((s3_folder, store), (plain, open_storage(plain))):
        first = tag(url)
        assert tag(url) == first
        folder.write("shard.00001.mds", folder.read("shard.00001.mds")[::-1])
        assert tag(url) != first
        assert not asked
        folder.delete("shard.00001.mds")
        with pytest.raises(ObjectMissingError, match=r"shard\.00001\.mds"):
            tag(url)
        asked.clear()
