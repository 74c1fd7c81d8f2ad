"""Rows of a unit by their index are those that it gives in order, and no other row is parsed."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from lmms_stream.converters.sources.arrow import python_values
from lmms_stream.converters.sources.sources import open_sources
from lmms_stream.converters.sources.table import by_index, json_row

ROWS = [{"text": f"row {number}", "tags": [number, -number]} for number in range(200)]


@contextmanager
def parsed_rows() -> Iterator[list[CodeType]]:
    """Inside, the list grows by one for each row that is parsed."""
    seen: list[CodeType] = []

    def note(frame: FrameType, event: str, result: Any) -> None:
        if event == "call" and frame.f_code is json_row.__code__:
            seen.append(frame.f_code)
        if event == "return" and frame.f_code is python_values.__code__:
            seen.extend([frame.f_code] * len(result))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def _lines() -> bytes:
    return b"\n" + b"".join(json.dumps(row).encode() + b"\n\n" for row in ROWS)


def _jsonl(folder: Path) -> Path:
    (folder / "rows.jsonl").write_bytes(_lines())
    return folder / "rows.jsonl"


def _compressed(folder: Path) -> Path:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(_lines()))
    return folder / "rows.jsonl.gz"


def _json(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return folder / "rows.json"


def _parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=30)
    return folder / "rows.parquet"


def _arrow(folder: Path) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    return folder / "rows.arrow"


def _saved(folder: Path) -> Path:
    Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def _hub(folder: Path) -> str:
    return f"hf:json?data_files={_jsonl(folder)}&split=train&streaming=1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of datasets
@pytest.mark.parametrize("write", [_jsonl, _compressed, _json, _parquet, _arrow, _saved, _hub])
def test_only_the_rows_that_are_asked_for_are_parsed(write: Callable[[Path], Any], tmp_path: Path) -> None:
    (source,) = open_sources([str(write(tmp_path))], scratch=tmp_path / "scratch", unit_bytes=lambda _: 2000)
    found: list[Any] = []
    rng = np.random.default_rng([7])
    for unit in source.units():
        expected = list(unit.rows())
        rows = by_index(unit)
        assert len(rows) == len(expected)
        order = rng.permutation(len(expected)).tolist()
        asked: list[Sequence[int]] = [order, order[: len(order) // 3], range(len(order) // 2, len(order)), []]
        for indices in asked:
            with parsed_rows() as parsed:
                assert list(rows.rows(indices)) == [expected[index] for index in indices]
            assert len(parsed) == len(indices)
        found += [row.values for row in expected]
    source.close()
    assert found == ROWS
