"""Reads sources as a conversion does, one unit after another, each of them pickled on its way."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from lmms_stream.converters.sources.sources import open_sources
from lmms_stream.converters.sources.table import Delimited
from lmms_stream.converters.sources.units import UNIT_BYTES, Row, Source, Unit

MESSY = [{"id": number, "text": "x" * (number % 40) + '"\\,[{é\n'} for number in range(100)]


@contextmanager
def opened(
    *specs: str | Path, format: str | None = None, quote: str | None = None, unit_bytes: int = UNIT_BYTES
) -> Iterator[tuple[list[Source], Path]]:
    """The sources, and their folder for what they fetch; closed at the end, and then nothing is left in it."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = open_sources(
            list(map(str, specs)),
            format=format,
            delimited=Delimited(quote=quote),
            scratch=Path(scratch),
            unit_bytes=unit_bytes,
        )
        yield sources, Path(scratch)
        for source in sources:
            source.close()
        assert not list(Path(scratch).iterdir())


def numbered_rows(source: Source, *, on_unit: Callable[[Unit], None] = lambda unit: None) -> Iterator[tuple[int, Row]]:
    """All rows with their numbers in the source, from 1."""
    first = source.first_row
    for unit in source.units():
        travelled: Unit = pickle.loads(pickle.dumps(unit))
        on_unit(travelled)
        for row in travelled.rows():
            assert row.number < travelled.count() or travelled.count() == -1
            assert (row.values is None) == bool(row.error)
            yield first + row.number + 1, row
        first += travelled.count()


def read(
    *specs: str | Path, format: str | None = None, quote: str | None = None, unit_bytes: int = UNIT_BYTES
) -> list[dict[str, Any]]:
    """Values of all rows of all sources, which have no errors."""
    with opened(*specs, format=format, quote=quote, unit_bytes=unit_bytes) as (sources, _):
        rows = [row for source in sources for _, row in numbered_rows(source)]
    assert not [row.error for row in rows if row.error]
    return [row.values for row in rows if row.values is not None]


def read_numbered(
    spec: str | Path, *, format: str | None = None, unit_bytes: int = UNIT_BYTES
) -> list[tuple[int, Any]]:
    """(number in the source, values or the error) of all rows of one source."""
    with opened(spec, format=format, unit_bytes=unit_bytes) as ((source,), _):
        return [(number, row.values or row.error) for number, row in numbered_rows(source)]


def num_units(spec: str | Path, *, unit_bytes: int) -> int:
    with opened(spec, unit_bytes=unit_bytes) as ((source,), _):
        return sum(1 for _ in source.units())


def json_lines(rows: Sequence[Any]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
