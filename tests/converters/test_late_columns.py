"""Columns that first appear behind the rows by which a source's kind is found: counted and named, or an error."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lmms_stream.cli.console_datasets import unread_lines
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.part import convert_part
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.row_counts import Unread
from lmms_stream.converters.writing.reading import LOOK_ROWS
from lmms_stream.errors import DataError
from streaming import StreamingDataset

from .media_files import image_bytes

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def late_notes() -> list[dict[str, Any]]:
    """Rows with a note in every third row behind the first 100 and an empty one before."""
    rows: list[dict[str, Any]] = [{"messages": CHAT, "note": ""}] * LOOK_ROWS
    return rows + [{"messages": CHAT} | ({"note": f"n{n}"} if n % 3 == 2 else {}) for n in range(3000)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_column_that_comes_late_is_counted_with_its_first_row(num_workers: int, tmp_path: Path) -> None:
    sources = [write(tmp_path / "a.jsonl", late_notes()), write(tmp_path / "b.jsonl", late_notes())]
    settings: dict[str, Any] = {"num_workers": num_workers, "unit_bytes": 1 << 14, "allow_repeats": True}
    for _ in ("converted", "there already"):
        report = convert(sources, str(tmp_path / "data"), **settings)
        assert report.unread == {"note": Unread(first=f"{sources[0]}:103", num_rows=2000)}
    described = json.loads((tmp_path / "data" / "_lmms" / "dataset.json").read_text())
    assert described["unread"] == {"note": {"first": f"{sources[0]}:103", "num_rows": 2000}}
    ((_, line),) = unread_lines(report.unread)
    assert line.startswith(f"column note in 2,000 rows, first in {sources[0]}:103: the first rows of its source have")


def test_a_filled_column_in_whose_place_another_is_read_is_counted(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(color=number))
    rows = [
        {"text": "x", "image": "0.png"},
        {"text": "x", "image": "1.png", "images": []},
        {"text": "x", "images": ["2.png"]},
        {"text": "x", "image": "3.png", "images": ["2.png"]},
    ]
    source = write(tmp_path / "a.jsonl", rows)
    report = convert([source], str(tmp_path / "out"), num_workers=1)
    assert report.unread == {"image": Unread(first=f"{source}:4", num_rows=1)}
    assert "another column is read in its place (--keep image:json" in unread_lines(report.unread)[0][1]
    dataset = StreamingDataset(local=str(tmp_path / "out"), batch_size=1)
    assert [dataset[number]["media"] for number in range(4)] == [image_bytes(color=color) for color in (0, 1, 2, 2)]


@pytest.mark.parametrize("rest", [{}, {"system": "s"}, {"tools": [{"name": "f"}]}])
def test_slots_for_media_that_stay_text_are_counted(rest: dict[str, Any], tmp_path: Path) -> None:
    asks = [{"role": "user", "content": "<image>\na"}, CHAT[1]]
    rows = [{"messages": chat, **rest} for chat in (CHAT, asks, asks, [{"role": "user", "content": "a < b"}, CHAT[1]])]
    report = convert([write(tmp_path / "a.jsonl", rows)], str(tmp_path / "out"), num_workers=1)
    assert report.unread == {"messages[].<image>": Unread(first=f"{tmp_path}/a.jsonl:2", num_rows=2)}
    assert unread_lines(report.unread)[0][1].endswith(
        "a.jsonl:2: it stays text, for no column of images is read (--columns images=COLUMN reads one)"
    )
    stored = json.loads(StreamingDataset(local=str(tmp_path / "out"), batch_size=1)[1]["messages"])
    assert "<image>\na" in json.dumps(stored).replace("\\n", "\n")


def test_slots_in_answers_that_are_compared_are_counted(tmp_path: Path) -> None:
    row = {"prompt": "<image>", "chosen": "<video>", "rejected": "c"}
    report = convert([write(tmp_path / "a.jsonl", [row])], str(tmp_path / "out"), num_workers=1)
    assert report.unread.keys() == {"messages[].<image>", "messages[].<video>"}


def test_media_in_keys_of_messages_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes())
    shown = {"role": "user", "content": "see", "images": ["a.png"]}
    for name, row in (
        ("chat", {"messages": [shown, CHAT[1]]}),
        ("pair", {"prompt": [shown], "chosen": [CHAT[1]], "rejected": [{"role": "assistant", "content": "c"}]}),
    ):
        report = convert([write(tmp_path / f"{name}.jsonl", [row])], str(tmp_path / name), num_workers=1)
        assert not report.unread
        assert StreamingDataset(local=str(tmp_path / name), batch_size=1)[0]["media"] == image_bytes()


def test_late_columns_are_counted_up_to_the_limit_in_parts_and_in_dry_runs(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", late_notes())
    limited = convert([source], str(tmp_path / "limited"), limit=106, unit_bytes=1 << 12)
    assert limited.unread == {"note": Unread(first=f"{source}:103", num_rows=2)}
    for part in ("0/2", "1/2"):
        convert_part([source], str(tmp_path / "parts"), part, unit_bytes=1 << 14, num_workers=1)
    whole = {"note": Unread(first=f"{source}:103", num_rows=1000)}
    assert convert([source], str(tmp_path / "parts"), unit_bytes=1 << 14, num_workers=1).unread == whole
    assert dry_run([source]).unread == whole


def test_a_grown_and_a_merged_dataset_count_the_late_columns_of_both(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{name}.jsonl", late_notes()[:size]) for name, size in (("a", 2000), ("b", 3100))]
    for name, source in zip("xy", sources, strict=True):
        convert([source], str(tmp_path / "all" / name), num_workers=1)
    merge_datasets(str(tmp_path / "all"), [str(tmp_path / "all" / name) for name in "xy"])
    convert([sources[0]], str(tmp_path / "grown"), num_workers=1)
    assert append([sources[1]], str(tmp_path / "grown"), num_workers=1).num_new_sources == 1
    for folder in ("all", "grown"):
        described = json.loads((tmp_path / folder / "_lmms" / "dataset.json").read_text())
        assert described["unread"] == {"note": {"first": f"{sources[0]}:103", "num_rows": 633 + 1000}}


def test_a_late_column_is_kept_if_it_is_named_with_its_encoding(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": "x"}] * LOOK_ROWS + [{"text": "y", "note": [1]}])
    report = convert([source], str(tmp_path / "all"), schema=SchemaOptions(keep=True), num_workers=1)
    assert list(report.unread) == ["note"]
    option = re.search(r"--keep (\S+) keeps", unread_lines(report.unread)[0][1])
    assert option is not None
    with pytest.raises(DataError, match=r"--keep note: no such column in the first rows, .*--keep note:json for a col"):
        convert([source], str(tmp_path / "kept"), schema=SchemaOptions(keep=("note",)), num_workers=1)
    kept = convert([source], str(tmp_path / "kept"), schema=SchemaOptions(keep=(option[1],)), num_workers=1)
    assert not kept.unread
    assert "keeps note (json, in none of the first rows)" in kept.kind
    dataset = StreamingDataset(local=str(tmp_path / "kept"), batch_size=1)
    assert [dataset[number]["note"] for number in (0, LOOK_ROWS)] == [None, [1]]


def test_a_late_column_of_bytes_is_kept_as_bytes(tmp_path: Path) -> None:
    rows = [{"text": "x", "blob": None}] * LOOK_ROWS + [{"text": "y", "blob": b"\x00z"}]
    source = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows), source)

    def kept(name: str, path: str = source) -> Any:
        schema = SchemaOptions(keep=(name,))
        return convert([path], str(tmp_path / "out"), schema=schema, num_workers=1, overwrite=True)

    with pytest.raises(DataError, match=r"'blob' holds bytes here and json in the first rows: .* as blob:bytes if"):
        kept("blob:json")
    assert kept("blob:bytes").num_rows == LOOK_ROWS + 1
    dataset = StreamingDataset(local=str(tmp_path / "out"), batch_size=1)
    assert [dataset[number]["blob"] for number in (0, LOOK_ROWS)] == [b"", b"\x00z"]
    other = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([{"text": "x"}] * LOOK_ROWS), other)
    with pytest.raises(DataError, match=r"--keep blob: no such column .*--keep blob:json for .* \(blob:bytes for"):
        kept("blob", other)
    assert kept("blob:bytes", other).num_rows == LOOK_ROWS


def test_a_column_of_bytes_that_some_rows_lack_is_kept_as_bytes() -> None:
    rows: list[dict[str, Any]] = [{"text": "x", "blob": b"y"}, {"text": "y", "blob": None}]
    with pytest.raises(DataError, match=r"'blob' holds bytes and json, .*: keep it as blob:bytes if all its rows that"):
        find_mapper(rows, SchemaOptions(keep=("blob",)))
    late = find_mapper(rows[:1], SchemaOptions(keep=("blob",)))
    with pytest.raises(DataError, match=r"'blob' holds null here and bytes in the first rows: .* as blob:bytes if all"):
        late(rows[1], None)
    mapper = find_mapper(rows, SchemaOptions(keep=("blob:bytes",)))
    assert [mapper(row, None)["blob"] for row in rows] == [b"y", b""]


@pytest.mark.parametrize(
    ("first", "late", "message"),
    [
        ({"text": "x"}, {"image": "a.png"}, "column image: .* their kind is text, but this row's kind is caption"),
        ({"text": "x"}, {"messages": CHAT}, "column messages: .* their kind is text, but this row's kind is messages"),
        (
            {"messages": CHAT},
            {"chosen": "x", "rejected": "y"},
            "columns chosen, rejected: .* this row's kind is preference",
        ),
        (
            {"label": "cat", "image": "a.png"},
            {"caption": "x"},
            "column caption: .* kind is image-label, but .* is caption",
        ),
    ],
)
def test_a_late_column_that_changes_the_kind_is_an_error_of_its_row(
    first: dict[str, Any], late: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes())
    source = write(tmp_path / "a.jsonl", [first] * LOOK_ROWS + [first | late, first])
    with pytest.raises(DataError, match=rf"a\.jsonl:{LOOK_ROWS + 1}: {message}") as raised:
        convert([source], str(tmp_path / "fails"), num_workers=1)
    skipping = convert([source], str(tmp_path / "skips"), num_workers=1, on_error="skip")
    assert (skipping.num_rows, skipping.num_rejected) == (LOOK_ROWS + 1, 1)
    option = re.search(r"--kind (\S+) to leave", str(raised.value))
    assert option is not None
    report = convert([source], str(tmp_path / "told"), num_workers=1, schema=SchemaOptions(kind=option[1]))
    assert report.num_rows == LOOK_ROWS + 2
    assert {name: unread.num_rows for name, unread in report.unread.items()} == dict.fromkeys(late, 1)


def test_an_image_column_of_nulls_in_the_first_rows_of_a_table_changes_the_kind_too(tmp_path: Path) -> None:
    rows = [{"text": "x", "image": None}] * LOOK_ROWS + [{"text": "y", "image": b"\x89PNG"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=rf"a\.parquet:{LOOK_ROWS + 1}: column image: the first rows have no such column"
    ):
        convert([str(tmp_path / "a.parquet")], str(tmp_path / "out"), num_workers=1)


def test_late_media_of_a_chat_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes())
    shown = [{"role": "user", "content": "<image>a"}, CHAT[1]]
    rows = [{"messages": CHAT}] * LOOK_ROWS + [{"messages": shown, "images": ["a.png"]}]
    report = convert([write(tmp_path / "a.jsonl", rows)], str(tmp_path / "out"), num_workers=1)
    assert not report.unread
    assert StreamingDataset(local=str(tmp_path / "out"), batch_size=1)[LOOK_ROWS]["media"] == image_bytes()
