"""Our writers give the files of MosaicML's, byte for byte. mosaic_files.json has checksums of those of its 0.13.0."""

from __future__ import annotations

import inspect
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lmms_stream
import numpy as np
import pytest
import xxhash
from lmms_stream.converters.writing.mosaic_writers import Writer
from lmms_stream.errors import ConfigError, DataError, StorageError, TargetExistsError
from lmms_stream.storage.storage import open_storage
from streaming.base.format.base.writer import Writer as MosaicWriter
from streaming.base.storage.upload import CloudUploader
from torch.utils.data import DataLoader

from ...rounds import in_long_rounds

FILES = json.loads(Path(__file__).with_name("mosaic_files.json").read_text())
OF_MDS = {
    "text": "str", "data": "bytes", "count": "int", "small": "uint8", "ratio": "float32", "about": "json",
    "ids": "ndarray:int32", "grid": "ndarray:float16:2,3", "any": "ndarray", "price": "str_decimal",
}  # fmt: skip
OF_TEXT = {"text": "str", "count": "int", "ratio": "float"}
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "mds": ("MDSWriter", {"size_limit": 2500}),
    "mds in words": ("MDSWriter", {"size_limit": "3kb", "hashes": ["sha1", "xxh3_64"]}),
    "mds of one shard": ("MDSWriter", {"size_limit": None, "compression": "bz2:3", "hashes": ["md5"]}),
    "json": ("JSONWriter", {"size_limit": 700}),
    "json with newline": ("JSONWriter", {"newline": "\r\n", "compression": "bz2", "hashes": ["blake2b"]}),
    "xsv": ("XSVWriter", {"separator": "|", "size_limit": 200}),
    "csv": ("CSVWriter", {"size_limit": "1kb", "hashes": ["xxh64"]}),
    "tsv": ("TSVWriter", {"newline": "\n\n", "compression": "bz2"}),
}


def sample(number: int, columns: Mapping[str, str]) -> dict[str, Any]:
    rng = random.Random(number)
    values = {
        "text": "naïve 試 " * rng.randrange(6),
        "data": rng.randbytes(rng.randrange(40)),
        "count": rng.randrange(-(1 << 40), 1 << 40),
        "small": rng.randrange(256),
        "ratio": rng.random(),
        "about": {"b": [1, None], "a": "ü"},
        "ids": np.arange(1 + rng.randrange(300), dtype=np.int32),
        "grid": np.arange(6, dtype=np.float16).reshape(2, 3),
        "any": np.full((1, 2), rng.random()),
        "price": Decimal("1.10") * rng.randrange(9),
    }
    return {name: values[name] for name in columns}


def written(module: Any, case: str, folder: Path) -> dict[str, str]:
    """Checksums of the files that a module's writer makes."""
    name, settings = CASES[case]
    columns = OF_MDS if name == "MDSWriter" else OF_TEXT
    with getattr(module, name)(columns=columns, out=str(folder), **settings) as writer:
        for number in range(30):
            writer.write(sample(number, columns))
    return {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_mosaicmls_writers(case: str, tmp_path: Path) -> None:
    assert written(lmms_stream, case, tmp_path / "ours") == FILES[case]
    assert len(lmms_stream.LocalDataset(tmp_path / "ours")) == 30


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_what_the_package_makes(case: str, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    assert written(streaming, case, tmp_path / "theirs") == FILES[case]


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz:1", "br:2", "snappy"])
def test_compressed_files_are_read(compression: str, tmp_path: Path) -> None:
    with lmms_stream.MDSWriter(columns=OF_MDS, out=tmp_path / "data", compression=compression) as writer:
        for number in range(9):
            writer.write(sample(number, OF_MDS))
    dataset = lmms_stream.LocalDataset(tmp_path / "data")
    for number in range(9):
        np.testing.assert_equal(dataset[number], sample(number, OF_MDS) | {"ratio": dataset[number]["ratio"]})
    num_workers = 2 if compression == "zstd" else 0
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=2, num_workers=num_workers, collate_fn=list, sampler=[8, 0, 3]
    )
    assert [[each["count"] for each in batch] for batch in loader] == [
        [sample(number, OF_MDS)["count"] for number in numbers] for numbers in ([8, 0], [3])
    ]
    assert dataset.spanner[8] == (0, 8)
    assert dataset.shards[0].compression == compression


def names(place: Path | str) -> set[str]:
    return {each.key for each in open_storage(place).list_objects("")}


NUMBERS = {"number": "int"}


def write(out: Any, count: int, **settings: Any) -> None:
    with lmms_stream.MDSWriter(columns=NUMBERS, out=out, size_limit=1024, **settings) as writer:
        for number in range(count):
            writer.write({"number": number})


def test_shards_are_uploaded_and_files_of_ours_go(s3_folder: str, tmp_path: Path) -> None:
    write(s3_folder, 300)
    whole = names(s3_folder)
    assert {"index.json", "shard.00000.mds", "shard.00003.mds"} <= whole
    assert [each["number"] for each in lmms_stream.StreamingDataset(remote=s3_folder, batch_size=1)[:]] == [*range(300)]
    with pytest.raises(TargetExistsError, match=r"Directory is not empty: s3://.*exist_ok=True"):
        write((tmp_path / "pair", s3_folder), 3)
    write((tmp_path / "pair", s3_folder), 3, exist_ok=True, keep_local=True)
    assert names(s3_folder) == names(tmp_path / "pair") == {"index.json", "shard.00000.mds"}
    write((tmp_path / "gone", s3_folder), 300, exist_ok=True, max_workers=1)
    assert (names(s3_folder), names(tmp_path / "gone")) == (whole, set())


def test_a_dataset_that_is_there_gives_way_if_asked_for_and_nothing_else_does(tmp_path: Path) -> None:
    write(tmp_path, 300)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="Directory is not empty"):
        write(tmp_path, 3)
    write(tmp_path, 3, exist_ok=True)
    assert names(tmp_path) == {"index.json", "notes.txt", "shard.00000.mds"}


def test_a_damaged_dataset_and_one_of_pickled_columns_give_way_if_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 300)
    index = tmp_path / "index.json"
    whole = index.read_text()
    (tmp_path / "_lmms").mkdir()
    for text in (whole[:40], whole.replace('"int"', '"pkl"'), "[]"):
        index.write_text(text)
        (tmp_path / "_lmms" / "dataset.json").write_text(whole[:40])
        write(tmp_path, 3, exist_ok=True)
        assert names(tmp_path) == {"index.json", "shard.00000.mds"}
        assert stored(tmp_path) == [0, 1, 2]


def test_what_ends_by_an_error_has_no_index_and_leaves_no_thread(s3_folder: str, tmp_path: Path) -> None:
    def interrupted(out: Any) -> None:
        with lmms_stream.MDSWriter(columns=NUMBERS, out=out, size_limit=1024) as writer:
            for number in range(300):
                writer.write({"number": number})
            raise KeyboardInterrupt

    before = {*threading.enumerate()}
    for out in (s3_folder, tmp_path / "out"):
        with pytest.raises(KeyboardInterrupt):
            interrupted(out)
        assert names(out)
        assert "index.json" not in names(out)
    assert {each for each in threading.enumerate() if "ThreadPool" in each.name} <= before


def test_an_upload_that_fails_is_the_writers_error(s3_folder: str) -> None:
    with pytest.raises(StorageError, match="s3://no-such-bucket/data"):
        write("s3://no-such-bucket/data", 3, retry=0)


@pytest.mark.parametrize("pause_s", [0, 0.002], ids=["fails as it waits", "fails before"])
def test_a_program_that_goes_on_after_a_failed_upload_gets_no_index_without_its_shard(
    pause_s: float, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "far" / "shard.00000.mds"
    in_the_way.mkdir(parents=True)
    writer = lmms_stream.MDSWriter(
        columns=NUMBERS, out=(tmp_path / "near", tmp_path / "far"), size_limit=1024, max_workers=1, retry=0
    )
    refused = 0
    for number in range(1000):
        time.sleep(0 if refused else pause_s)
        try:
            writer.write({"number": number})
        except StorageError:
            refused += 1
            shutil.rmtree(in_the_way, ignore_errors=True)
    assert refused
    with pytest.raises(StorageError, match=r"shard\.00000\.mds"):
        writer.finish()
    assert not (tmp_path / "far" / "index.json").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: lmms_stream.MDSWriter(columns=NUMBERS, out=out, max_worker=1), "did you mean 'max_workers'"),
        (lambda out: lmms_stream.MDSWriter(columns=NUMBERS, out=out, size_limit=1 << 32), "must be less than 2"),
        (lambda out: lmms_stream.MDSWriter(columns=NUMBERS, out=out, hashes=["sha1", "md5"]), "in sorted order"),
        (lambda out: lmms_stream.MDSWriter(columns=NUMBERS, out=out, hashes=["sha0"]), "no checksum 'sha0'"),
        (lambda out: lmms_stream.MDSWriter(columns=NUMBERS, out=out, compression="zip"), "compression 'zip'"),
        (lambda out: lmms_stream.MDSWriter(columns={"a": "pkl"}, out=out), "'pkl' is not an encoding"),
        (lambda out: lmms_stream.MDSWriter(columns=NUMBERS, out=out, retry=-1), "retry must be 0 or more"),
        (lambda out: lmms_stream.JSONWriter(columns={"a": "bytes"}, out=out), "choose one of str, int, float"),
        (lambda out: lmms_stream.XSVWriter(columns=NUMBERS, out=out, separator=""), "separator must be a text"),
    ],
)
def test_settings_that_fit_nothing_are_named(make: Callable[[Path], Writer], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_that_are_not_said_are_those_of_mosaicmls_writers() -> None:
    ours, theirs = (inspect.signature(writer.__init__).parameters for writer in (Writer, MosaicWriter))
    uploads = inspect.signature(CloudUploader.__init__).parameters  # what its writers pass on
    for name, setting in ours.items():
        if setting.kind is setting.KEYWORD_ONLY and name not in ("columns", "max_workers"):
            assert setting.default == (uploads if name not in theirs else theirs)[name].default, name


def test_a_sample_that_does_not_fit_is_not_written_and_others_are(tmp_path: Path) -> None:
    for kind in (lmms_stream.MDSWriter, lmms_stream.JSONWriter, lmms_stream.CSVWriter):
        folder = tmp_path / kind.__name__
        with kind(columns={"text": "str"}, out=folder) as writer:
            writer.write({"text": "one", "more": 1})
            for bad in ({"text": 5}, {"other": "x"}):
                with pytest.raises(DataError, match="column 'text'"):
                    writer.write(bad)
            if kind is lmms_stream.CSVWriter:
                with pytest.raises(DataError, match="write the samples with MDSWriter"):
                    writer.write({"text": "a,b"})
            writer.write({"text": "two"})
        assert [each["text"] for each in lmms_stream.LocalDataset(folder)[:]] == ["one", "two"]
        with pytest.raises(ConfigError, match="which is finished"):
            writer.write({"text": "three"})


def test_a_value_that_ends_as_the_separator_begins_is_not_written(tmp_path: Path) -> None:
    with lmms_stream.XSVWriter(columns={"a": "str", "b": "str"}, out=tmp_path, separator="||") as writer:
        with pytest.raises(DataError, match=r"'x\|\|\|y' has the separator '\|\|' .* write the samples with MDSWriter"):
            writer.write({"a": "x|", "b": "y"})
        writer.write({"a": "x", "b": "|y"})
    assert lmms_stream.LocalDataset(tmp_path)[:] == [{"a": "x", "b": "|y"}]


def stored(place: Any) -> list[Any]:
    return [each["number"] for each in lmms_stream.LocalDataset(place)[:]]


def test_two_writers_do_not_mix_their_samples(s3_folder: str, tmp_path: Path) -> None:
    for place in (tmp_path / "one", s3_folder):
        writers = [lmms_stream.MDSWriter(columns=NUMBERS, out=place, size_limit=1024) for _ in range(2)]
        with pytest.raises(TargetExistsError, match=r"written by another writer .* join these by .*merge_index"):
            write_in_turn(writers)
        with pytest.raises((ConfigError, TargetExistsError), match=r"was not finished|another writer"):
            writers[1].finish()


def write_in_turn(writers: list[Any]) -> None:
    for number in range(300):
        for writer in writers:
            writer.write({"number": number})
    for writer in writers:
        writer.finish()


def test_a_writer_is_of_one_process_and_of_all_its_threads(tmp_path: Path) -> None:
    def write_some(first: int) -> None:
        for number in range(first, first + 2500):
            writer.write({"number": number})

    with lmms_stream.MDSWriter(columns=NUMBERS, out=tmp_path / "data", size_limit=200) as writer:
        process = get_context("fork").Process(target=write_some, args=(0,))
        process.start()
        process.join(60)
        assert process.exitcode == 1
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write_some, range(0, 10000, 2500)))
    assert sorted(stored(tmp_path / "data")) == [*range(10000)]


def test_a_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for out, place in (("data", "data"), (("~/local", "~/far"), "home/far"), (("part", "far"), "far")):
        with lmms_stream.MDSWriter(columns=NUMBERS, out=out, size_limit=200) as writer:
            for number in range(100):
                os.chdir(tmp_path if number < 50 else tmp_path / "home")
                writer.write({"number": number})
        os.chdir(tmp_path)
        assert stored(tmp_path / place) == [*range(100)]
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(ConfigError, match="name it once"):
        write((tmp_path / "data", tmp_path / "link"), 3, exist_ok=True)
    assert stored(tmp_path / "data") == [*range(100)]


def test_what_failed_to_be_finished_is_not_said_to_be(tmp_path: Path) -> None:
    writer = lmms_stream.MDSWriter(columns=NUMBERS, out=tmp_path / "data")
    writer.write({"number": 1})
    (tmp_path / "data").rmdir()
    with pytest.raises(StorageError, match="No such file"):
        writer.finish()
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="was not finished, because of an error: write all of it again"):
        writer.finish()


def test_truth_values_are_whole_numbers_in_columns_of_text(tmp_path: Path) -> None:
    given = {"text": "red", "count": True, "ratio": np.float64(1.5)}
    for kind in (lmms_stream.JSONWriter, lmms_stream.CSVWriter):
        with kind(columns=OF_TEXT, out=tmp_path / kind.__name__) as writer:
            writer.write(given)
        assert lmms_stream.LocalDataset(tmp_path / kind.__name__)[0] == {"text": "red", "count": 1, "ratio": 1.5}


@pytest.mark.parametrize("kind", ["MDSWriter", pytest.param("JSONWriter", marks=in_long_rounds)])
def test_indexes_of_parts_are_merged(kind: str, s3_folder: str, tmp_path: Path) -> None:
    def parts(place: str) -> list[str]:
        for part in range(3):
            with getattr(lmms_stream, kind)(columns=NUMBERS, out=f"{place}/{part}", compression="zstd") as writer:
                for number in range(4):
                    writer.write({"number": 4 * part + number})
        return [f"{place}/{part}/index.json" for part in range(3)]

    for place in (s3_folder, str(tmp_path / "data")):
        urls = parts(place)
        for _ in range(2):  # an index that is there is replaced
            lmms_stream.merge_index(place)
            dataset = lmms_stream.StreamingDataset(remote=place, batch_size=1)
            assert [each["number"] for each in dataset[:]] == [*range(12)]
        lmms_stream.merge_index(urls[::-1], out=place)
        dataset = lmms_stream.StreamingDataset(remote=place, batch_size=1)
        assert [each["number"] for each in dataset[:5]] == [8, 9, 10, 11, 4]
    lmms_stream.merge_index([("", url) for url in parts(f"{s3_folder}/pair")], (tmp_path / "pair", f"{s3_folder}/pair"))
    assert json.loads((tmp_path / "pair" / "index.json").read_bytes())["shards"]
