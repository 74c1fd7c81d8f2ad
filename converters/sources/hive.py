"""Folders whose names are a column and a value (lang=en/part-0.parquet) -> columns of the rows below them.

As hive partitioning of pyarrow reads them: https://arrow.apache.org/docs/python/generated/pyarrow.dataset.HivePartitioning
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from .table import RowsByIndex, Table, by_index
from .units import Row, Unit

_NULL = "__HIVE_DEFAULT_PARTITION__"
Columns = Mapping[str, str | None]


def columns_of(key: str) -> dict[str, str | None]:
    """Return the columns that the folders of a file name.

    >>> columns_of("lang=en/date=2024%2F01/part-0.parquet")
    {'lang': 'en', 'date': '2024/01'}
    """
    pairs = (folder.partition("=") for folder in key.split("/")[:-1])
    return {unquote(name): None if value == _NULL else unquote(value) for name, is_pair, value in pairs if is_pair}


@dataclass(frozen=True, slots=True)
class _Rows:
    rows_by_index: RowsByIndex
    columns: Columns

    def __len__(self) -> int:
        return len(self.rows_by_index)

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        return _filled(self.rows_by_index.rows(indices), self.columns)


@dataclass(frozen=True, slots=True)
class _Unit:
    unit: Unit
    columns: Columns

    @property
    def num_bytes(self) -> int:
        return self.unit.num_bytes

    @property
    def folder(self) -> str | None:
        return self.unit.folder

    def rows(self) -> Iterator[Row]:
        return _filled(self.unit.rows(), self.columns)

    def by_index(self) -> RowsByIndex:
        return _Rows(by_index(self.unit), self.columns)

    def count(self) -> int:
        return self.unit.count()


class TableWithColumns:
    """A table whose rows have more columns, with the same values in all rows; columns of the rows themselves stay."""

    def __init__(self, open_table: Callable[[], Table], columns: Columns):
        self._table = open_table()
        self._columns = columns

    def num_rows(self) -> int:
        return self._table.num_rows()

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        return (_Unit(unit, self._columns) for unit in self._table.units(start, stop))


def _filled(rows: Iterator[Row], columns: Columns) -> Iterator[Row]:
    for row in rows:
        if row.values is not None:
            row.values.update({name: value for name, value in columns.items() if name not in row.values})
        yield row
