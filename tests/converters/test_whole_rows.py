"""A row that gives several samples is stored whole or rejected whole, whatever makes several samples of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import DataError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TextProcessor

from .test_convert_runs import written

OWN = """
def texts(row):
    return [{"text": text} for text in row["texts"]]

def pairs(row):
    return [{"prompt": "2 + 2?", "chosen": text, "rejected": "5"} for text in row["texts"]]

def tokens(row):
    return [{"input_ids": [number + 1 for number in ids]} for ids in row["ids"]]
"""
SMALL: dict[str, Any] = {"unit_bytes": 2000, "shard_bytes": 1 << 11}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with functions in own.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rejected_rows(target: str) -> list[int]:
    path = Path(target, "_lmms", "rejects.jsonl")
    return [json.loads(line)["row"] for line in path.read_text().splitlines()]


def rows_of(name: str, value: Any, bad: Any) -> list[dict[str, Any]]:
    """Hundred rows of three values; row 4 and each tenth row after it have a bad one, at each place in turn."""
    rows = []
    for number in range(100):
        values = [value(number, place) for place in range(3)]
        if number % 10 == 3:
            values[number // 10 % 3] = bad
        rows.append({name: values})
    return rows


def text(number: int, place: int) -> str:
    return f"text {place} of row {number}"


BAD_ROWS = list(range(4, 101, 10))
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a value that is no text": (rows_of("texts", text, [7]), {"map": "own:texts"}, "rows.jsonl"),
    "a text that UTF-8 cannot hold": (rows_of("texts", text, "\ud800"), {"map": "own:texts"}, "rows.jsonl"),
    "two equal answers": (rows_of("texts", text, "5"), {"map": "own:pairs"}, "rows.parquet"),
    "a token below 0": (
        rows_of("ids", lambda number, place: [number, place, 5], [-2]),
        {"map": "own:tokens"},
        "rows.parquet",
    ),
    "documents": (
        rows_of("ids", lambda number, place: [number, place, 5], [-2]),
        {"map": "own:tokens", "concat": 16},
        "rows.parquet",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_of_which_the_map_makes_a_bad_sample_is_rejected_whole(own: Path, case: str) -> None:
    rows, options, name = CASES[case]
    source = write_rows(own / name, rows)
    good = write_rows(own / f"good-{name}", [row for number, row in enumerate(rows) if number % 10 != 3])
    expected = convert([good], "expected", num_workers=1, **options, **SMALL)
    for num_workers in (1, 2):
        target = f"out-{num_workers}"
        report = convert([source], target, num_workers=num_workers, on_error="skip", **options, **SMALL)
        assert (report.num_rows, report.num_rejected) == (expected.num_rows, 10)
        assert rejected_rows(target) == BAD_ROWS
        assert shards(target) == shards("expected")
    tried = dry_run([source], on_error="skip", **options)
    assert (tried.num_rejected, tried.num_rows) == (10, 100)
    assert tried.num_samples == (270 if "concat" in options else expected.num_rows)
    with pytest.raises(DataError, match=rf"{name}:4: "):
        convert([source], "resumed", num_workers=1, **options, **SMALL)
    convert([source], "resumed", num_workers=1, on_error="skip", **options, **SMALL)
    assert written("resumed") == written("out-1")


def shards(target: str) -> dict[str, bytes]:
    return {name: data for name, data in written(target).items() if name.endswith(".mds")}


# Chats without their thoughts; a chat whose last message is "no" is an error.
TEMPLATE = """{%- if messages[-1]['content'] == 'no' %}{{ raise_exception('no is no answer') }}{% endif -%}
{%- for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize("tokenize", [False, True])
def test_a_chat_of_which_one_answer_does_not_fit_gives_no_sample_of_another(
    own: Path, tokenizer: Path, tokenize: bool
) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    loaded.chat_template = TEMPLATE
    processor = ChatProcessor(loaded)
    chats = [
        [
            {
                "role": ("user", "assistant")[turn % 2],
                "content": "no" if at == row and turn == 3 else f"{turn} of {row}",
            }
            for turn in range(6)
        ]
        for row in range(30)
        for at in [row if row % 7 == 2 else -1]
    ]
    source = write_rows(own / "chats.jsonl", [{"messages": chat} for chat in chats])
    bad = [row + 1 for row in range(30) if row % 7 == 2]
    options: dict[str, Any] = {"processor": processor, "tokenize": tokenize, "schema": SchemaOptions(learn="each")}
    for num_workers in (1, 2):
        target = f"out-{num_workers}"
        report = convert([source], target, num_workers=num_workers, on_error="skip", **options, **SMALL)
        assert (report.num_rows, report.num_rejected) == (3 * (30 - len(bad)), len(bad))
        assert rejected_rows(target) == bad
    assert written("out-1") == written("out-2")


def test_samples_of_a_row_are_left_out_one_by_one_for_their_length_and_without_text(own: Path, tokenizer: Path) -> None:
    long = "word " * 200
    rows = [["a", "", "b"], ["a", long, "b"], ["a", "", [7]], [long, long, [7]], ["", long]]
    source = write_rows(own / "rows.jsonl", [{"texts": row} for row in rows])
    processor = TextProcessor.from_pretrained(str(tokenizer))
    report = convert([source], "out", processor=processor, map="own:texts", longest=100, on_error="skip", num_workers=1)
    assert [sample["text"] for sample in PackedStreamingDataset("out")[:]] == ["a", "b", "a", "b"]
    assert (report.num_rejected, report.num_filtered, report.num_empty) == (2, 2, 2)
    assert rejected_rows("out") == [3, 4]


def test_the_limit_ends_before_a_row_of_which_a_later_sample_does_not_fit(own: Path) -> None:
    rows: list[dict[str, Any]] = [{"texts": ["a", "b"]}, {"texts": ["c", [7]]}, {"texts": ["d"]}, {"texts": ["e"]}]
    source = write_rows(own / "rows.jsonl", rows)
    report = convert([source], "out", map="own:texts", limit=3, on_error="skip", num_workers=1)
    assert [sample["text"] for sample in PackedStreamingDataset("out")[:]] == ["a", "b", "d"]
    assert (report.num_rows, report.num_rejected) == (3, 1)


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 1}, {"dedup": "exact"}, {"num_workers": 2}])
def test_the_limit_ends_behind_a_row_and_the_others_can_be_appended(own: Path, options: dict[str, Any]) -> None:
    rows = [{"texts": [text(number, 0), "", text(number, 1), text(number, 2)]} for number in range(4)]
    source = write_rows(own / "rows.jsonl", rows)
    report = convert([source], "out", map="own:texts", limit=4, **options)
    assert (report.num_rows, report.num_empty) == (6, 2)
    append([f"{source}@[2:]"], "out", schema=SchemaOptions(map="own:texts"), dedup=options.get("dedup"))
    stored = sorted(sample["text"] for sample in PackedStreamingDataset("out")[:])
    assert stored == sorted(text(number, place) for number in range(4) for place in range(3))
