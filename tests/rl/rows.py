"""Rows of prompts as files of each kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from streaming import MDSWriter


def prompt(number: int) -> dict[str, Any]:
    """A prompt of one word or more, whose label is its number."""
    return {"text": " ".join(["word"] * (number % 7 + 1)), "label": str(number), "metadata": {"number": number}}


def prompts(num_rows: int) -> list[dict[str, Any]]:
    return [prompt(number) for number in range(num_rows)]


def write_lines(path: Path, rows: Sequence[dict[str, Any]], *, blank_every: int = 0) -> Path:
    lines = [json.dumps(row) + "\n" for row in rows]
    if blank_every:
        lines = [line + "  \n" * (number % blank_every == 0) for number, line in enumerate(lines)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], *, group_rows: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=group_rows)
    return path


def write_shards(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    columns = {"text": "str", "label": "str", "metadata": "json"}
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=1 << 9) as writer:
        for row in rows:
            writer.write(row)
    return folder


def write_as(kind: str, folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if kind == "jsonl":
        return write_lines(folder / "rows.jsonl", rows, blank_every=5)
    if kind == "parquet":
        return write_parquet(folder / "rows.parquet", rows)
    if kind == "mds":
        return write_shards(folder / "shards", rows)
    half = len(rows) // 2
    write_lines(folder / "folder" / "a.jsonl", rows[:half])
    write_parquet(folder / "folder" / "b" / "c.parquet", rows[half:])
    return folder / "folder"


KINDS = ("jsonl", "parquet", "mds", "folder")
