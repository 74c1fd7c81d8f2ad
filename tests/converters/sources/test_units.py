"""How sources are cut into units of rows, so that several workers share them whatever their rows look like."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.sources.arrow import Piece, RowGroups, cut
from lmms_stream.converters.sources.files import LocalFile
from lmms_stream.converters.sources.table import Location
from lmms_stream.converters.sources.units import UNIT_ROWS
from lmms_stream.doors.relax.row_groups import ParquetRows as NumberedGroups

from ...rounds import rounds
from .source_rows import json_lines, num_units, opened, read, write
from .test_tables import write_file, write_parquet, write_stream

NUM_ROWS = rounds(20_000, 60_000)
ROWS = [{"image": f"images/{number:06}.jpg", "label": str(number % 10)} for number in range(NUM_ROWS)]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


WRITERS: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": lambda path: write(path, json_lines(ROWS)),
    "rows.jsonl.gz": lambda path: write(path, gzip.compress(json_lines(ROWS))),
    "rows.json": lambda path: write(path, orjson.dumps(ROWS)),
    "rows.csv": lambda path: write(path, as_csv(ROWS)),
    "rows.parquet": lambda path: write_parquet(path, pyarrow.Table.from_pylist(ROWS), batch_rows=NUM_ROWS),
    "rows.arrow": lambda path: write_stream(path, pyarrow.Table.from_pylist(ROWS), batch_rows=NUM_ROWS),
    "rows.feather": lambda path: write_file(
        path, pyarrow.Table.from_pylist(ROWS), batch_rows=NUM_ROWS, compression="zstd"
    ),
}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_many_short_rows_are_several_units_whatever_they_lie_in(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name)
    assert path.stat().st_size < 4 << 20
    assert NUM_ROWS / UNIT_ROWS <= num_units(path, unit_bytes=1 << 24) <= 2 * NUM_ROWS / UNIT_ROWS
    assert read(path) == ROWS
    with opened(path) as ((source,), _):
        assert sum(unit.num_bytes for unit in source.units()) == source.num_bytes


@dataclass(frozen=True)
class Counted:
    """A file that counts how often it was opened."""

    path: Path
    opened: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return LocalFile(self.path).num_bytes

    @property
    def key(self) -> tuple[object, ...]:
        return LocalFile(self.path).key

    def open(self, *, until: int | None = None) -> Any:
        raise NotImplementedError

    def open_raw(self) -> io.RawIOBase:
        self.opened.append(1)
        return LocalFile(self.path).open_raw()


class _CountedBytes(io.FileIO):
    def __init__(self, path: Path, sizes: list[int]):
        super().__init__(path)
        self._sizes = sizes

    def readinto(self, buffer: Any) -> int | None:
        num_bytes = super().readinto(buffer)
        self._sizes.append(num_bytes or 0)
        return num_bytes

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._sizes.append(len(data))
        return data


class CountedBytes(Counted):
    """A file that counts the bytes of each read."""

    def open_raw(self) -> io.RawIOBase:
        return _CountedBytes(self.path, self.opened)


def test_the_footer_of_a_file_of_many_row_groups_is_read_once(tmp_path: Path) -> None:
    columns = {f"column{number}": [str(row) for row in range(400)] for number in range(10)}
    table = pyarrow.table(columns)
    path = write_parquet(tmp_path / "a.parquet", table, batch_rows=1)
    file = CountedBytes(path)
    groups = [Piece(number, number + 1, 0, 1, 1, False) for number in range(400)]
    rows = [row.values for piece in groups for row in RowGroups(file, "a", piece, None).rows()]
    assert rows == table.to_pylist()
    of_units = sum(file.opened)
    assert of_units < 3 * path.stat().st_size
    by_number = NumberedGroups(file, name="a", folder=None)
    assert by_number.read(np.arange(400)) == table.to_pylist()
    assert sum(file.opened) - of_units < 3 * path.stat().st_size


def slices_of(path: Path, file: Counted, *, unit_bytes: int) -> list[RowGroups]:
    location = Location(path=path, name="a", folder=None, key=None, scratch=path, unit_bytes=unit_bytes)
    size = pyarrow.parquet.read_metadata(path).row_group(0).total_byte_size
    pieces = cut([NUM_ROWS], [size], start=0, stop=None, location=location)
    return [RowGroups(file, "a", piece, None) for piece in pieces]


def names(unit: RowGroups) -> list[str]:
    return [row.values["image"] for row in unit.rows() if row.values]


def test_a_process_that_reads_every_other_slice_of_a_row_group_reads_the_group_once(tmp_path: Path) -> None:
    path = WRITERS["rows.parquet"](tmp_path / "a.parquet")
    file = Counted(path)
    units = slices_of(path, file, unit_bytes=1 << 24)
    assert len(units) == -(-NUM_ROWS // UNIT_ROWS)
    for first in (0, 1):
        for number in range(first, len(units), 2):
            begin = number * UNIT_ROWS
            assert names(units[number]) == [row["image"] for row in ROWS[begin : begin + UNIT_ROWS]]
        assert len(file.opened) == first + 1


def test_a_slice_that_was_not_read_to_its_end_leaves_no_group_open(tmp_path: Path) -> None:
    path = WRITERS["rows.parquet"](tmp_path / "a.parquet")
    file = Counted(path)
    units = slices_of(path, file, unit_bytes=1 << 24)
    rows = units[0].rows()
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert names(units[1])[0] == ROWS[UNIT_ROWS]["image"]
    assert names(units[0])[0] == ROWS[0]["image"]
    assert len(file.opened) == 3


def test_a_row_group_of_large_rows_is_cut_by_their_bytes(tmp_path: Path) -> None:
    rows = [{"image": bytes([number]) * 10_000} for number in range(100)]
    path = write_parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist(rows), batch_rows=100)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    assert 8 <= num_units(path, unit_bytes=100_000) <= 12
    assert read(path, unit_bytes=100_000) == rows


def test_a_row_group_that_was_written_again_is_read_anew(tmp_path: Path) -> None:
    path = WRITERS["rows.parquet"](tmp_path / "a.parquet")
    first, second, *_ = slices_of(path, Counted(path), unit_bytes=1 << 24)
    assert len(names(first)) == UNIT_ROWS
    others = [{"image": f"other/{number}.jpg", "label": "1"} for number in range(NUM_ROWS)]
    path.unlink()
    write_parquet(path, pyarrow.Table.from_pylist(others), batch_rows=NUM_ROWS)
    assert names(second)[0] == others[UNIT_ROWS]["image"]
