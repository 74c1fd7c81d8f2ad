"""Source files -> rows. One generator per format; a row knows where it stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet
from pyarrow.lib import ArrowException

from ..errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """values: column name -> value. source and number (from 1: a line, or a row of a table) say where it is."""

    values: dict[str, Any]
    source: Path
    number: int

    @property
    def where(self) -> str:
        return f"{self.source}:{self.number}"


def read_jsonl(path: Path) -> Iterator[Row]:
    """One JSON object per line; blank lines are passed over. DataError names the file and the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not valid JSON ({error}): correct the line") from error
            if not isinstance(values, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, found {type(values).__name__}")
            yield Row(values, path, number)


def read_parquet(path: Path) -> Iterator[Row]:
    """Rows of a Parquet file, one row group's batches at a time."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, path, number)
    except ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}): write it again") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}


def read_rows(path: Path) -> Iterator[Row]:
    """All rows of a file, by its extension; DataError for another kind, a missing and an empty file."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind {path.suffix!r}: expected one of {', '.join(sorted(READERS))}")
    if not path.is_file():
        raise DataError(f"{path}: no such file: check the path")
    empty = True
    for row in reader(path):
        empty = False
        yield row
    if empty:
        raise DataError(f"{path} holds no rows: leave it out, or write it again")
