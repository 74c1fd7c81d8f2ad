"""Places of a source's rows on this machine, and cuts into units; parts that all formats share."""

from __future__ import annotations

import codecs
import json
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import orjson
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.json_text import excerpt, parsed, parsed_all
from ...storage.failures import disk_errors
from .files import Fetch, File, LocalFile, StoredFile
from .units import UNIT_ROWS, NoRowsError, Row, Unit

MAX_ROW_BYTES = 1 << 28  # of text; if a row is longer, a bracket, a quote or the end of a line is missing
MAX_CARRIED_BYTES = 30 << 20  # maximum bytes of rows in a unit; longer payloads are stored in a file
BOM = b"\xef\xbb\xbf"
Item = TypeVar("Item")
RowOf = Callable[[int, bytes], Row]  # number and text of a row -> the row, with an error for invalid text


@dataclass(frozen=True, kw_only=True, slots=True)
class Delimited:
    """Settings of CSV and TSV; None for the default of the format.

    delimiter: between fields. quote: around fields, "" for none. encoding: Python's name of the text's encoding
    (default: UTF-8). header: names of the columns of a file without a header; () if the first row is the header,
    whatever it holds.
    """

    delimiter: str | None = None
    quote: str | None = None
    encoding: str | None = None
    header: tuple[str, ...] | None = None

    @property
    def is_utf8(self) -> bool:
        """Whether lines end at the byte of a line feed, and each can be decoded by itself."""
        return self.encoding is None or codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig", "ascii")


USUAL = Delimited()


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Place of a source. path: a file or folder. name: for messages. folder: root of media paths.

    key: member of a JSON object with the rows. scratch: own folder of the source, removed when closed. unit_bytes:
    approximate bytes of a unit. delimited: settings of delimited text. stored: file of a store to read in ranges; the
    path then has no file.
    """

    path: Path
    name: str
    folder: str | None
    key: str | None
    scratch: Path
    unit_bytes: int
    delimited: Delimited = USUAL
    stored: StoredFile | None = None

    @property
    def file(self) -> File:
        return self.stored or LocalFile(self.path)


class Table(Protocol):
    """Rows of one format at a location. DataError for content of another format, OSError for failed reads."""

    def num_rows(self) -> int:
        """Count the rows, by reading all of the source if necessary; blank lines of text count, too."""
        ...

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        """Yield rows start <= number < stop (None: to the end), in order; no unit without rows."""
        ...


def in_units(
    items: Iterable[Item], num_bytes: Callable[[Item], int], *, unit_bytes: int, max_items: int = UNIT_ROWS
) -> Iterator[list[Item]]:
    """Yield groups of consecutive items; a group ends when it reaches unit_bytes or max_items."""
    together: list[Item] = []
    total = 0
    for item in items:
        together.append(item)
        total += num_bytes(item)
        if total >= unit_bytes or len(together) == max_items:
            yield together
            together, total = [], 0
    if together:
        yield together


def carry(payload: bytes, location: Location) -> bytes | Path:
    """Return the payload of a unit, or a file with the payload if it is long."""
    if len(payload) <= MAX_CARRIED_BYTES:
        return payload
    location.scratch.mkdir(parents=True, exist_ok=True)
    path = location.scratch / f"unit-{sum(1 for _ in location.scratch.iterdir())}"
    path.write_bytes(payload)
    return path


def carried(payload: bytes | Path) -> bytes:
    return payload if isinstance(payload, bytes) else payload.read_bytes()


def json_row(number: int, text: bytes) -> Row:
    """Return the row of a JSON object's text; for invalid text, a row with the error and its position."""
    if len(text) > MAX_ROW_BYTES:
        return Row(number, None, f"longer than {MAX_ROW_BYTES >> 20} MiB: break it into rows, or name media by path")
    try:
        values = parsed(text)
    except orjson.JSONDecodeError as error:
        return Row(number, None, _json_error(text, error))
    return _row_of_value(number, text, values)


def _row_of_value(number: int, text: bytes, values: Any) -> Row:
    if isinstance(values, dict):
        return Row(number, values)
    if isinstance(values, list) and values and all(isinstance(each, dict) for each in values):
        return Row(number, {"messages": values})  # a conversation without a name
    return Row(number, None, f"expected a JSON object, found {type(values).__name__}: {excerpt(text, 0)}")


_new_row = partial(tuple.__new__, Row)


def rows_of(groups: Iterable[Sequence[bytes]], row_of: RowOf) -> Generator[Row, None, int]:
    """Yield the rows of groups of texts, without blank ones; return the number of texts.

    JSON objects of a group are parsed together, in less time.
    """
    number = 0
    for texts in groups:
        values: Sequence[Any] = ()
        if row_of is json_row and max(map(len, texts)) <= MAX_ROW_BYTES:
            with suppress(ValueError):  # a row of its own has the error
                values = parsed_all(texts)
        if not values:
            yield from (row_of(at, text) for at, text in enumerate(texts, start=number) if not text.isspace())
        elif {*map(type, values)} == {dict}:
            yield from map(_new_row, zip(count(number), values, repeat(""), repeat(None)))  # without a call of Python
        else:
            yield from map(_row_of_value, count(number), texts, values)
        number += len(texts)
    return number


def _json_error(text: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text.decode()
    except UnicodeDecodeError as invalid:
        return not_utf8(text, invalid)
    if not text.strip():
        return "not valid JSON (nothing stands here): remove the comma too many"
    offset = len(error.doc[: error.pos].encode())
    return f"not valid JSON ({error.msg} at byte {offset + 1}): correct it, near {excerpt(text, offset)}"


def not_utf8(text: bytes, error: UnicodeDecodeError) -> str:
    """Describe the error and its position in text with invalid UTF-8."""
    return (
        f"not valid UTF-8 (byte {text[error.start]:#04x} at byte {error.start + 1}): write it as UTF-8, "
        f"near {excerpt(text, error.start)}"
    )


def wide_text(text: bytes) -> str:
    """Return an error for text with a quarter of zero bytes, such as UTF-16 without a mark; "" for other text."""
    if 4 * text.count(0) < max(1, len(text)):
        return ""
    return f"text in UTF-16 or UTF-32, or no text: write it as UTF-8, near {excerpt(text, 0)}"


def share_of(total: int, *, before: int, whole: int) -> int:
    """Return `total` * `before` / `whole`, rounded down: differences of shares add up to `total`."""
    return total * before // max(1, whole)


# A source whose rows are a table, fetched and opened at its turn.


class TableSource:
    """A source whose table is opened at its turn.

    pieces: for a source of several files, yields place and number of rows of each file in order; None for one file.
    files: paths of local files.
    """

    def __init__(
        self,
        name: str,
        open_table: Callable[[], Table],
        *,
        identity: Mapping[str, Any],
        num_bytes: int,
        rows: slice,
        settings: Mapping[str, Any],
        scratch: Path,
        fetch: Fetch | None = None,
        is_part: bool = False,
        pieces: Callable[[], Iterator[tuple[str, int]]] | None = None,
        files: Sequence[Path] = (),
    ):
        self.name = name
        self.files = files
        self.identity = identity
        self.num_bytes = num_bytes
        self._fetch = fetch
        self._open_table = open_table
        self.rows = rows
        self.settings = settings
        self.is_part = is_part
        self.pieces = pieces
        self._scratch = scratch
        self._table: Table | None = None

    @property
    def fetch(self) -> Fetch | None:
        return None if self._table is not None else self._fetch

    @property
    def first_row(self) -> int:
        """Counts the rows if the slice counts from their end."""
        return self._bounds()[0]

    def units(self) -> Iterator[Unit]:
        start, stop = self._bounds()
        found = False
        with disk_errors(self.name):
            for unit in self._opened().units(start, stop):
                found = True
                yield unit
        if not found:
            what = "" if self.rows == slice(None) else f" from {start} to {'its end' if stop is None else stop}"
            raise NoRowsError(
                f"{self.name} holds no rows{what}: leave it out, or {'correct the slice' if what else 'write it again'}"
            )

    def take_first(self, limit: int) -> None:
        """Leave out rows behind the first `limit`."""
        start, stop = self._bounds()
        self.rows = slice(start, start + limit if stop is None else min(stop, start + limit))

    def count(self) -> int:
        """Number of rows in the slice; fetches and reads the source if necessary."""
        start, stop = self._bounds()
        try:
            with disk_errors(self.name):
                num_rows = self._opened().num_rows()
        except NoRowsError:
            if not self.is_part:
                raise
            num_rows = 0
        self.close()
        return max(0, (num_rows if stop is None else min(stop, num_rows)) - start)

    def num_rows(self) -> int:
        """Number of rows, including rows outside of the slice."""
        with disk_errors(self.name):
            return self._opened().num_rows()

    def first_rows(self, num_rows: int) -> tuple[str | None, list[Row]]:
        """Return the folder that media paths start from, and the first rows; None and [] without rows."""
        with closing(self.all_rows()) as rows:
            found = list(islice(rows, num_rows))
        return (found[0][0] if found else None), [row for _, row in found]

    @property
    def has_rows(self) -> bool:
        return bool(self.first_rows(1)[1])

    def all_rows(self) -> Generator[tuple[str | None, Row]]:
        """Yield each row with the folder of its media paths; the source is closed at the end."""
        try:
            for unit in self.units():
                yield from ((unit.folder, row) for row in unit.rows())
        except NoRowsError:
            return
        finally:
            self.close()

    def close(self) -> None:
        self._table = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _opened(self) -> Table:
        if self._table is None:
            with disk_errors(self.name):
                if self._fetch is not None and not self._fetch.path.exists():
                    self._fetch()
                self._table = self._open_table()
        return self._table

    def _bounds(self) -> tuple[int, int | None]:
        start, stop = self.rows.start or 0, self.rows.stop
        if start < 0 or (stop is not None and stop < 0):
            with disk_errors(self.name):
                start, stop, _ = self.rows.indices(self._opened().num_rows())
        return start, stop


_counted: dict[str, int] = {}  # numbers of rows counted by this process, by the identity of the source


def limited(sources: Sequence[TableSource], limit: int) -> list[TableSource]:
    """Return the first `limit` rows of consecutive sources, without sources behind the limit.

    The last source is not counted, and other sources are counted once: a conversion opens its sources several times,
    and counting fetches a stored source.
    """
    taken: list[TableSource] = []
    for source, is_last in zip(sources, [False] * (len(sources) - 1) + [True], strict=True):
        num_rows = 0 if is_last else _count_once(source)
        source.take_first(limit)
        taken.append(source)
        limit -= num_rows
        if limit <= 0:
            break
    return taken


def _count_once(source: TableSource) -> int:
    """Return the number of rows of a source; count again after its content changed."""
    about = json.dumps([source.name, source.rows.start, source.rows.stop, dict(source.identity)], sort_keys=True)
    if about not in _counted:
        _counted[about] = source.count()
    return _counted[about]


# Rows of a unit by index; only the requested rows are parsed, to resume inside a unit.


class RowsByIndex(Protocol):
    """Rows of a unit, in the order of its rows(), from index 0."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield rows in the order of distinct indices; no other row is parsed. Raise the errors of rows()."""
        ...


@runtime_checkable
class HasIndex(Protocol):
    """A unit with random access to its rows without parsing them."""

    def by_index(self) -> RowsByIndex: ...


def by_index(unit: Unit) -> RowsByIndex:
    """Return random access to the rows of any unit; a unit without HasIndex is parsed completely."""
    return unit.by_index() if isinstance(unit, HasIndex) else ParsedRows(list(unit.rows()))


@dataclass(frozen=True, slots=True)
class ParsedRows:
    parsed: Sequence[Row]

    def __len__(self) -> int:
        return len(self.parsed)

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        return (self.parsed[index] for index in indices)


@dataclass(frozen=True, slots=True)
class RowTexts:
    """Rows from texts. texts: row number and text. row_of: parses a text into a row."""

    texts: Sequence[tuple[int, bytes]]
    row_of: RowOf = json_row

    @staticmethod
    def of(lines: Iterable[bytes], row_of: RowOf) -> RowTexts:
        """Rows from all lines but blank ones."""
        return RowTexts([(number, line) for number, line in enumerate(lines) if not line.isspace()], row_of)

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        return (self.row_of(*self.texts[index]) for index in indices)


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """Rows by number. wanted: yields the rows of ascending numbers, equal to their indices. name: of the file."""

    num_rows: int
    wanted: Callable[[NDArray[np.int64]], Iterator[Row]]
    name: str

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        numbers = np.asarray(indices, np.int64)
        ascending = np.sort(numbers)
        if np.array_equal(numbers, ascending):
            yield from self.wanted(ascending)
            return
        found = {row.number: row for row in self.wanted(ascending)}
        for number in numbers.tolist():
            if number not in found:
                raise DataError(f"{self.name}: row {number + 1} of a unit of {self.num_rows} is missing: copy it again")
            yield found[number]
