"""The command that `unload` prints gives the same samples again, byte by byte: over kinds of rows and formats."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.cli.main import main
from lmms_stream.converters.convert import convert
from lmms_stream.converters.exporting.export import export_dataset
from lmms_stream.converters.stored.catalog import read_catalog, schema_of
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.storage.storage import open_storage
from PIL import Image

from ..test_stored_sources import ALL_ENCODINGS, stored_samples, write_plain
from .test_export import FORMATS, chat, image, picture, text, tokens

NUM_ROWS = 130  # more than the first rows, by which a conversion finds kinds and columns


def kept(number: int) -> dict[str, Any]:
    """Columns to keep; some have values of another kind, or none, behind the first rows."""
    about = {"k": [number, None, "é"], "path": "0.png"}
    return {"score": number, "Lang": "日本", "x y": number / 3, "about": about if number % 2 else None, "a.b": "c"}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def kept_chat(folder: Path, number: int) -> dict[str, Any]:
    call = {"function": {"name": "open", "arguments": {"path": "0.png", "url": "0.jpg"}}}
    row = chat(folder, number) if number % 40 == 1 else {"messages": [said("user", "?"), said("assistant", "!")]}
    row["messages"].append({"role": "assistant", "content": "", "tool_calls": [call]})
    return {**row, **kept(number), "data": {"bytes": f"data:;base64,{'AA' * 20}", "path": None}}


def alike_chat(folder: Path, number: int) -> dict[str, Any]:
    """Kept columns are called like some that kinds read."""
    others = {"image": f"{number}", "system_prompt": "no", "conversations": "no", "text": "no", "label": "3"}
    return {"messages": [said("user", "?"), said("assistant", f"{number}")], **others, "input_ids": [1, 2]}


def pair(folder: Path, number: int) -> dict[str, Any]:
    asked = [said("user", f"{number}?")]
    if number % 50 == 2:
        asked[0]["content"] = [{"type": "image", "image": picture(folder, number)}, {"type": "text", "text": "what?"}]
    tools = {"tools": [{"name": "look"}]} if number > 110 else {}
    answers = {"chosen": [said("assistant", "yes")], "rejected": [said("assistant", "no"), said("assistant", "never")]}
    return {"prompt": asked, **answers, **tools}


def kept_pair(folder: Path, number: int) -> dict[str, Any]:
    return {**pair(folder, number), **kept(number), "input_ids": [number], "question": "no"}


def pair_of_texts(folder: Path, number: int) -> dict[str, Any]:
    return {"chosen": f"Human: {number}?\n\nAssistant: yes", "rejected": f"Human: {number}?\n\nAssistant: no"}


def kept_pair_of_texts(folder: Path, number: int) -> dict[str, Any]:
    return {**pair_of_texts(folder, number), "question": "no", "id": number}


def judged(folder: Path, number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "completion": "yes", "label": number % 3 > 0}


def kept_judged(folder: Path, number: int) -> dict[str, Any]:
    return {**judged(folder, number), **kept(number), "output": "no", "input_ids": [1]}


def kept_text(folder: Path, number: int) -> dict[str, Any]:
    return {**text(folder, number), **kept(number), "question": "no", "answer": "no"}


def kept_tokens(folder: Path, number: int) -> dict[str, Any]:
    return {**tokens(folder, number), "mask": [number, 1], "url": "https://x.y/z"}


def kept_image(folder: Path, number: int) -> dict[str, Any]:
    return {**image(folder, number % 200), "caption": f"{number}", "file_name": "x.png"}


def kept_columns(folder: Path, number: int) -> dict[str, Any]:
    return {**kept(number), "messages": "no", "text": "no", "data": {"bytes": "data:;base64,AAAA", "path": None}}


MORE = ("score", "Lang", "x y", "about:json", "a.b")
IMAGE = {"kind": "image"}
CASES: dict[str, tuple[Callable[[Path, int], dict[str, Any]], dict[str, Any]]] = {
    "chats": (kept_chat, {"keep": (*MORE, "data")}),
    "chats beside columns called alike": (
        alike_chat,
        {
            "kind": "messages",
            "keep": ("image", "system_prompt", "conversations", "text", "label", "input_ids:ndarray:int32"),
            "columns": {"images": "", "system": "", "messages": "messages"},
        },
    ),
    "pairs": (pair, {}),
    "pairs beside columns": (
        kept_pair,
        {"kind": "preference", "keep": (*MORE, "input_ids", "question"), "columns": {"prompt": "prompt"}},
    ),
    "pairs of texts": (pair_of_texts, {}),
    "pairs of texts beside columns": (kept_pair_of_texts, {"keep": ("question", "id"), "columns": {"prompt": ""}}),
    "judged answers": (judged, {}),
    "judged answers beside columns": (kept_judged, {"kind": "kto", "keep": (*MORE, "output", "input_ids:json")}),
    "texts": (kept_text, {"kind": "text", "keep": (*MORE, "question", "answer")}),
    "tokens": (kept_tokens, {"keep": ("mask:ndarray:uint8:2", "url")}),
    "documents": (tokens, {"concat": 32}),
    "images": (kept_image, {**IMAGE, "keep": ("caption", "file_name")}),
    "images and labels": (lambda folder, number: image(folder, number % 200), {"kind": "image-label"}),
    "columns": (kept_columns, {"kind": "columns", "keep": (*MORE, "messages", "text", "data")}),
}


def unloaded_and_back(
    stored: Path, folder: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> tuple[list[bytes], dict[str, str], str | None]:
    """Samples, columns and schema after unload and the command that it prints."""
    capsys.readouterr()
    assert main(["unload", str(stored), str(folder / "rows"), "--format", format]) == 0
    (printed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    program, *words = shlex.split(printed.removeprefix("next: ").replace("TARGET", shlex.quote(str(folder / "back"))))
    assert program == "lmms-stream"
    assert main([*words, "--workers", "1"]) == 0
    return stored_samples(folder / "back"), *told(folder / "back")


def told(folder: Path) -> tuple[dict[str, str], str | None]:
    """Columns and schema of a dataset."""
    catalog = read_catalog(open_storage(folder))
    return dict(catalog.shards[0].encodings), schema_of(catalog.shards, catalog.dataset)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_the_printed_command_gives_the_same_samples(
    case: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, options = CASES[case]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row(tmp_path, number)) + "\n" for number in range(1, NUM_ROWS + 1))
    )
    stored = tmp_path / "stored"
    report = convert([tmp_path / "rows.jsonl"], str(stored), num_workers=1, num_shards=2, **options)
    assert report.num_rows >= NUM_ROWS or "concat" in options
    assert unloaded_and_back(stored, tmp_path, format, capsys) == (stored_samples(stored), *told(stored))


ENCODED = {
    **{name: each for name, each in ALL_ENCODINGS.items() if each[0] not in ("ndarray", "str_int")},
    **{dtype: (dtype, np.dtype(dtype).type(3)) for dtype in ("uint16", "int32", "uint64", "float16", "float32")},
    "half": ("ndarray:float16", np.array([[0.1, -0.0]], np.float16)),
    "whole_text": ("str_int", 10**18),
    "real_text": ("str_float", 0.1),
    "exact": ("str_decimal", Decimal("0.10")),
    "png": ("png", Image.new("L", (4, 4))),
    "jpeg": ("jpeg", Image.new("RGB", (4, 4))),
    "more": ("json", [{"url": "0.bin"}, "1.bin", 1.0, 1 << 60]),
}


@pytest.mark.parametrize("format", FORMATS)
def test_columns_come_back_in_each_encoding(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = write_plain(tmp_path / "stored", ENCODED)
    assert unloaded_and_back(stored, tmp_path, format, capsys) == (stored_samples(stored), *told(stored))


@pytest.mark.parametrize(
    ("column", "format", "message", "other"),
    [
        (("float64", float("nan")), "jsonl", "holds NaN or Infinity, which JSON has not: export to parquet", "parquet"),
        (("float32", np.float32("inf")), "webdataset", "holds NaN or Infinity, which JSON has not", "parquet"),
        (("bytes", b""), "jsonl", "holds no bytes, which JSON cannot give back: export to parquet", "parquet"),
        (("bytes", b""), "webdataset", "holds no bytes, which JSON cannot give back: export to parquet", "parquet"),
        (("str_int", 1 << 70), "parquet", "do not fit the columns of Parquet .*: export them to jsonl", "jsonl"),
    ],
)
def test_the_format_that_an_error_names_holds_the_value(
    column: tuple[str, Any], format: str, message: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = write_plain(tmp_path / "stored", {"x": column}, count=3)
    with pytest.raises(DataError, match=message):
        export_dataset(str(stored), str(tmp_path / "refused"), format=format)
    assert unloaded_and_back(stored, tmp_path, other, capsys) == (stored_samples(stored), *told(stored))


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (judged, {"keep": "prompt"}, "column 'prompt' has the name of a column of preference rows"),
        (
            lambda folder, number: {"messages": [said("user", "?"), said("assistant", "!")], "tools": "no"},
            {"keep": "tools", "columns": {"tools": ""}},
            "column 'tools' has the name of a column of messages rows, and names in a row are unique: convert",
        ),
    ],
)
def test_a_column_in_place_of_one_that_rows_need_is_refused(
    row: Callable[[Path, int], dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(tmp_path, 1)) + "\n")
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "stored"), num_workers=1, **options)
    with pytest.raises(ConfigError, match=message):
        export_dataset(str(tmp_path / "stored"), str(tmp_path / "out"), format="jsonl")
