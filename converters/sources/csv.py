"""CSV and TSV -> units, read as a stream: quoted fields may hold line ends, so that only reading finds the rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from ...errors import DataError
from .compression import PlainStream
from .table import MAX_ROW_BYTES, Location, carried, carry, in_units
from .units import Row, Unit


@dataclass(slots=True)
class FieldBlock:
    """Lists of fields, carried as JSON; a text instead of a list says why that row cannot be read."""

    payload: bytes | Path
    header: tuple[str, ...]
    num_rows: int
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        for number, line in enumerate(carried(self.payload).splitlines()):
            yield self._row(number, orjson.loads(line))

    def _row(self, number: int, fields: list[str] | str) -> Row:
        if isinstance(fields, str):
            return Row(number, None, fields)
        if len(fields) != len(self.header):
            return Row(
                number, None, f"{len(fields)} fields, where the header names {len(self.header)}: correct the row"
            )
        values = dict(zip(self.header, fields, strict=True))
        values.pop("", None)
        return Row(number, values)

    def count(self) -> int:
        return self.num_rows


class _Quoted(csv.excel):
    strict = True


class _Unquoted(_Quoted):
    quoting = csv.QUOTE_NONE


class DelimitedTable:
    """A file whose first row names the columns. Values are text, as they stand; blank lines are no rows.

    A first column without a name is the index of a pandas table, and left out.

    quoted: whether fields may stand in double quotes, which are no part of them; otherwise a quote is text like other
    text.
    """

    def __init__(self, location: Location, *, delimiter: str, quoted: bool):
        self._location = location
        self._delimiter = delimiter
        self._quoted = quoted

    def num_rows(self) -> int:
        with self._open() as (_, rows):
            return sum(1 for _ in rows) - 1

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        with self._open() as (stream, rows):
            header = self._header(next(rows, []))
            location, before = self._location, 0
            encoded = (_encode(fields) for fields in islice(rows, start, stop))
            for block in in_units(encoded, len, unit_bytes=location.unit_bytes):
                payload = carry(b"\n".join(block), location)
                yield FieldBlock(payload, header, len(block), stream.position() - before, location.folder)
                before = stream.position()

    def _header(self, fields: list[str] | str) -> tuple[str, ...]:
        name = self._location.name
        if isinstance(fields, str):
            raise DataError(f"{name}: its first row, which names the columns, is broken: {fields}")
        if not self._quoted and all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields):
            kind = "csv" if self._delimiter == "," else "tsv-quoted"
            raise DataError(f"{name}: the columns of its header stand in quotes, {fields[0]}: pass --format {kind}")
        for number, field in enumerate(fields):
            if not field and number == 0 and len(fields) > 1 and fields.count("") == 1:
                continue
            if not field.strip() or fields.count(field) > 1:
                raise DataError(
                    f"{name}: its first row is to name the columns, each once: {field!r} does not: correct the header"
                )
            if not field.isprintable():
                raise DataError(f"{name}: column {field!r} of the header is not text in UTF-8: write the file as UTF-8")
        return tuple(fields)

    @contextmanager
    def _open(self) -> Iterator[tuple[PlainStream, Iterator[list[str] | str]]]:
        """The file, and its rows with the header: lists of fields, or what is wrong with one."""
        # The csv module's own limit is 128 KiB, for all of a process.
        csv.field_size_limit(max(MAX_ROW_BYTES, csv.field_size_limit()))
        with PlainStream(self._location.path, name=self._location.name) as stream:
            # Bytes that are no UTF-8 become surrogates, which only the row that holds them cannot be written with.
            text = io.TextIOWrapper(
                io.BufferedReader(stream, 1 << 20), encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            dialect = _Quoted if self._quoted else _Unquoted
            yield stream, _rows(csv.reader(text, dialect, delimiter=self._delimiter))


def _rows(reader: Any) -> Iterator[list[str] | str]:
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"not valid CSV ({error}) up to line {reader.line_num} of the file: correct its quotes"
            continue
        if fields:
            yield fields


def _encode(fields: list[str] | str) -> bytes:
    try:
        return orjson.dumps(fields)
    except TypeError:  # what orjson raises for surrogates
        bad = next(field for field in fields if any("\ud800" <= character <= "\udfff" for character in field))
        return orjson.dumps(f"not valid UTF-8 near {bad[:60]!a}: write the file as UTF-8")
