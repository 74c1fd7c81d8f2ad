"""Datasets as files of rows, and back: the same samples, byte by byte."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from lmms_stream.cli.main import main
from lmms_stream.converters.convert import convert
from lmms_stream.converters.exporting import export
from lmms_stream.converters.exporting.export import MARK, export_dataset
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import ConfigError, DataError, StorageError
from PIL import Image

from ..test_stored_sources import stored_samples, write_plain

FORMATS = ("parquet", "jsonl", "webdataset")
CALL = {"function": {"name": "look", "arguments": {"a": None, "b": 1.0, "c": 1 << 70}}}


def picture(folder: Path, number: int) -> str:
    image = io.BytesIO()
    Image.new("RGB", (10 + number, 12), (number, 0, 9)).save(image, "PNG" if number % 2 else "JPEG")
    (folder / f"{number}.img").write_bytes(image.getvalue())
    return f"{number}.img"


def chat(folder: Path, number: int) -> dict[str, Any]:
    asked = [
        {"type": "image_url", "image_url": {"url": picture(folder, number)}, "detail": "low"},
        {"type": "text", "text": "what is <image> ü?"},
    ]
    answers = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "assistant", "content": f"{number}"},
    ]
    tools = {"tools": [{"name": "look"}]} if number % 3 == 1 else {}
    return {"messages": [{"role": "user", "content": asked}, *answers], **tools}


def called(folder: Path, number: int) -> dict[str, Any]:
    said = [("human", "?"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "1"), ("gpt", "one")]
    return {"conversations": [{"from": who, "value": what} for who, what in said]}


def text(folder: Path, number: int) -> dict[str, Any]:
    return {"text": f"text {number} \u2028 <image>"}


def tokens(folder: Path, number: int) -> dict[str, Any]:
    return {"input_ids": list(range(number + 3)), "loss_spans": [[0, 1], [2, 3]]}


def image(folder: Path, number: int) -> dict[str, Any]:
    return {"image": picture(folder, number), "label": number - 1}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("row", [chat, called, text, tokens, image])
def test_an_export_is_converted_to_the_same_samples(
    row: Callable[[Path, int], dict[str, Any]], format: str, tmp_path: Path
) -> None:
    rows = "".join(json.dumps(row(tmp_path, number)) + "\n" for number in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    schema = SchemaOptions(kind="image" if row is image else None)
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "stored"), num_workers=1, num_shards=2, schema=schema)
    report = export_dataset(str(tmp_path / "stored"), str(tmp_path / "out"), format=format)
    assert (report.num_samples, report.num_files, report.num_skipped) == (9, 2, 0)
    words = shlex.split(report.back.replace("TARGET", str(tmp_path / "back")))
    assert main([*words[1:], "--workers", "1"]) == 0
    assert stored_samples(tmp_path / "back") == stored_samples(tmp_path / "stored")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_columns_come_back_with_their_encodings(format: str, tmp_path: Path) -> None:
    columns = {
        "s": ("str", "é"),
        "b": ("bytes", b"\0\1"),
        "i": ("int", 7),
        "r": ("float64", 0.1),
        "u": ("uint8", np.uint8(3)),
        "j": ("json", {"a": [1, None]}),
        "n": ("ndarray:float32", np.arange(6, dtype=np.float32).reshape(2, 3)),
        "f": ("ndarray:int16:2,2", np.ones((2, 2), np.int16)),
    }
    source = write_plain(tmp_path / "plain", columns)
    report = export_dataset(str(source), str(tmp_path / "out"), format=format)
    words = shlex.split(report.back.replace("TARGET", str(tmp_path / "back")))
    assert main([*words[1:], "--workers", "1"]) == 0
    assert stored_samples(tmp_path / "back") == stored_samples(source)


def test_files_of_images_are_exported_as_they_are(tmp_path: Path) -> None:
    made = Image.new("L", (4, 4))
    source = write_plain(tmp_path / "plain", {"x": ("png", made), "cls": ("int", 3)}, count=2)
    export_dataset(str(source), str(tmp_path / "out"), format="parquet")
    row = pyarrow.parquet.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()[0]
    assert row["cls"] == 3
    assert Image.open(io.BytesIO(row["x"])).size == (4, 4)


def test_an_export_that_was_ended_goes_on_and_replaces_nothing(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "plain", {"text": ("str", "x" * 200)})
    out = tmp_path / "out"
    export_dataset(str(source), str(out), format="jsonl")
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "part-00001.jsonl").unlink()
    (out / "part-00000.jsonl").write_text("mine\n")
    report = export_dataset(str(source), str(out), format="jsonl")
    assert report.num_skipped == report.num_files - 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {**whole, "part-00000.jsonl": b"mine\n"}
    with pytest.raises(StorageError, match="holds an export of another dataset or format: choose another target"):
        export_dataset(str(source), str(out), format="parquet")


def test_a_folder_of_other_files_is_no_target(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "plain", {"text": ("str", "x")})
    with pytest.raises(StorageError, match=r"holds 'index\.json', which no export wrote: choose an empty target"):
        export_dataset(str(source), str(source), format="jsonl")


def test_an_export_to_a_store_is_converted_from_there(s3_folder: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat(tmp_path, 1)) + "\n")
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "stored"), num_workers=1)
    export_dataset(str(tmp_path / "stored"), s3_folder, format="jsonl")
    convert([s3_folder], str(tmp_path / "back"), num_workers=1)
    assert stored_samples(tmp_path / "back") == stored_samples(tmp_path / "stored")


@pytest.mark.parametrize(
    ("columns", "format", "error", "message"),
    [
        ({"x": ("pil", Image.new("L", (2, 2)))}, "jsonl", ConfigError, "'x' has the encoding 'pil', which other"),
        ({"x": ("float64", float("nan"))}, "jsonl", DataError, "sample 0: column 'x' holds NaN or Infinity"),
        ({"x": ("bytes", b"")}, "jsonl", DataError, "column 'x' holds no bytes, which JSON cannot give back"),
        ({"x": ("int", 1)}, "xml", ConfigError, "format 'xml' is not one of parquet, jsonl, webdataset"),
        ({"x": ("str_int", 1 << 70)}, "parquet", DataError, "rows do not fit the columns of Parquet"),
    ],
)
def test_what_rows_cannot_hold_is_named(
    columns: dict[str, Any], format: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = write_plain(tmp_path / "plain", columns, count=2)
    with pytest.raises(error, match=message):
        export_dataset(str(source), str(tmp_path / "out"), format=format)


def test_the_mark_says_of_what_the_files_are(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "plain", {"text": ("str", "x")})
    export_dataset(str(source), str(tmp_path / "out"), format="jsonl")
    assert json.loads((tmp_path / "out" / MARK).read_bytes())["format"] == "jsonl"
    assert export.MARK.startswith("_")  # so that convert does not take it for data
