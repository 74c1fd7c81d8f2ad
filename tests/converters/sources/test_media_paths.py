"""What paths of media start from: the folder in which their source lies, and nothing outside of it."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import DataError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.storage import open_storage

from ..media_files import image_bytes
from .source_rows import json_lines, opened, write
from .test_folders import write_tar
from .test_tables import write_file

ROW = {"question": "What?", "answer": "That.", "image": "images/a.png"}
OUTSIDE = "leads out of the media root {}: only what lies below it is read: move it there, or pass another --media-root"


def save(path: Path) -> None:
    datasets.Dataset.from_list([ROW]).save_to_disk(path)


def write_csv(path: Path) -> None:
    with path.open("w") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerow(ROW)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": lambda path: write(path, json_lines([ROW])),
    "rows.json": lambda path: write(path, orjson.dumps([ROW])),
    "rows.csv": write_csv,
    "rows.jsonl.zst": lambda path: write(path, pyarrow.compress(json_lines([ROW]), codec="zstd", asbytes=True)),
    "rows.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), path),
    "rows.arrow": lambda path: write_file(path, pyarrow.Table.from_pylist([ROW])),
}


def media(target: Path) -> list[bytes]:
    return [sample["media"] for sample in PackedStreamingDataset(target)[:]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with an image in a folder below it, and another image of that name beside it."""
    write(tmp_path / "data" / "images" / "a.png", image_bytes(color=1))
    write(tmp_path / "images" / "a.png", image_bytes(color=2))
    return tmp_path / "data"


@pytest.mark.parametrize("name", WRITERS)
def test_paths_start_from_the_folder_of_their_file(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name](data / name)
    monkeypatch.chdir(tmp_path)
    sources = [str(data / name), f"data/{name}", f"d*/{name}", "data/**/rows.*", f"file://{data}/{name}"]
    for number, source in enumerate(sources):
        convert([source], f"out{number}", num_workers=2 if number == 1 else 1)
        assert media(tmp_path / f"out{number}") == [image_bytes(color=1)], source


def test_paths_of_a_saved_dataset_start_from_its_folder(data: Path, tmp_path: Path) -> None:
    save(data / "saved")
    shutil.copytree(data / "images", data / "saved" / "images")
    write(tmp_path / "list.yaml", b"datasets: [{path: data/saved, data_type: hf_dataset}]")
    for number, source in enumerate((data / "saved", tmp_path / "list.yaml")):
        convert([source], str(tmp_path / f"out{number}"))
        assert media(tmp_path / f"out{number}") == [image_bytes(color=1)]


def test_paths_in_an_archive_start_from_the_folder_of_the_archive(data: Path, tmp_path: Path) -> None:
    write_tar(data / "rows.tar", [("1.json", b'"images/a.png"'), ("1.cls", b"cat")])
    with opened(data / "rows.tar") as ((source,), _):
        assert [unit.folder for unit in source.units()] == [str(data)]
    convert(
        [data / "rows.tar"], str(tmp_path / "out"), schema=SchemaOptions(columns={"images": "json", "label": "cls"})
    )
    assert [sample["image"] for sample in PackedStreamingDataset(tmp_path / "out")[:]] == [image_bytes(color=1)]


def test_each_file_of_a_folder_has_its_own(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "all" / f"{number}" / "rows.jsonl", json_lines([ROW]))
        write(tmp_path / "all" / f"{number}" / "images" / "a.png", image_bytes(color=number + 3))
    convert([tmp_path / "all"], str(tmp_path / "out"), format="jsonl")
    assert media(tmp_path / "out") == [image_bytes(color=3), image_bytes(color=4)]


def test_another_folder_may_be_named(data: Path, tmp_path: Path) -> None:
    rows = write(data / "rows.jsonl", json_lines([ROW]))
    convert([rows], str(tmp_path / "a"), schema=SchemaOptions(media_root=str(tmp_path)))
    write(tmp_path / "lists" / "all.yaml", b"datasets: [{path: ../data/rows.jsonl, data_folder: ..}]")
    convert([tmp_path / "lists" / "all.yaml"], str(tmp_path / "b"))
    write(tmp_path / "lists" / "none.yaml", b"datasets: [{path: ../data/rows.jsonl}]")
    convert([tmp_path / "lists" / "none.yaml"], str(tmp_path / "c"))
    assert media(tmp_path / "a") == media(tmp_path / "b") == [image_bytes(color=2)]
    assert media(tmp_path / "c") == [image_bytes(color=1)]


@pytest.mark.parametrize("path", ["../images/a.png", "images/../../images/a.png", "link.png", "links/images/a.png"])
def test_nothing_outside_of_that_folder_is_read_unless_it_is_named(path: str, data: Path, tmp_path: Path) -> None:
    (data / "link.png").symlink_to("../images/a.png")
    (data / "links").symlink_to(tmp_path)
    rows = write(data / "rows.jsonl", json_lines([ROW | {"image": path}]))
    with pytest.raises(DataError) as raised:
        convert([rows], str(tmp_path / "out"))
    assert f"rows.jsonl:1: media {path!r} {OUTSIDE.format(data)}" in str(raised.value)
    write(rows, json_lines([ROW | {"image": str(data / path)}]))
    with pytest.raises(DataError, match="leads out of the media root"):
        convert([rows], str(tmp_path / "out"))
    convert([rows], str(tmp_path / "out"), schema=SchemaOptions(media_root=str(tmp_path)))
    assert media(tmp_path / "out") == [image_bytes(color=2)]


def test_paths_of_an_object_start_from_its_prefix(s3_folder: str, tmp_path: Path) -> None:
    for index, folder in enumerate((f"{s3_folder}/a", f"{s3_folder}/b/c/d")):
        store = open_storage(folder)
        store.write("rows.jsonl", json_lines([ROW]))
        store.write("images/a.png", image_bytes(color=1))
        open_storage(folder.rpartition("/")[0]).write("images/a.png", image_bytes(color=2))
        sources = [f"{folder}/rows.jsonl", f"{folder}/*.jsonl", f"{folder.rpartition('/')[0]}/*/rows.jsonl"]
        for number, source in enumerate(sources):
            convert([source], str(tmp_path / f"out{index}-{number}"))
            assert media(tmp_path / f"out{index}-{number}") == [image_bytes(color=1)], source
        store.write("rows.jsonl", json_lines([ROW | {"image": "../images/a.png"}]))
        with pytest.raises(DataError) as raised:
            convert([sources[0]], str(tmp_path / "out"))
        assert f"{folder}/rows.jsonl:1: media '../images/a.png' {OUTSIDE.format(folder)}" in str(raised.value)


def test_images_beside_rows_are_their_media_and_no_rows(data: Path, tmp_path: Path) -> None:
    WRITERS["rows.jsonl"](data / "rows.jsonl")
    assert convert([data], str(tmp_path / "out"), num_workers=1).num_rows == 1
    assert media(tmp_path / "out") == [image_bytes(color=1)]


def test_the_error_of_a_missing_medium_names_the_folder_above_its_rows_that_holds_the_medium(tmp_path: Path) -> None:
    write(tmp_path / "top" / "images" / "a.png", image_bytes())
    rows = write(tmp_path / "top" / "data" / "train" / "rows.jsonl", json_lines([ROW]))
    with pytest.raises(DataError, match=rf"pass --media-root {tmp_path}/top, where it is"):
        convert([rows], str(tmp_path / "out"), num_workers=1)
