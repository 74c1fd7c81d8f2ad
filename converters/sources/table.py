"""Where the rows of a source lie on this machine, and how they are cut into units; what all formats share."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import orjson

from ...processors.json_text import parsed
from .files import File, LocalFile, StoredFile
from .units import UNIT_ROWS, Row, Unit

MAX_ROW_BYTES = 1 << 28  # of text; if a row is longer, a bracket, a quote or the end of a line is missing
MAX_CARRIED_BYTES = 30 << 20  # of rows in a unit; what is longer waits in a file
BOM = b"\xef\xbb\xbf"
EXCERPT_BYTES = 60
Item = TypeVar("Item")
RowOf = Callable[[int, bytes], Row]  # number and text of a row -> the row, with an error where the text is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Delimited:
    """How CSV and TSV are written; None as is usual for the format.

    delimiter: the character between fields. quote: the one that fields stand in, "" for none. encoding: of the text, as
    Python names it (default: UTF-8).
    """

    delimiter: str | None = None
    quote: str | None = None
    encoding: str | None = None

    @property
    def is_utf8(self) -> bool:
        """Whether lines end at the byte of a line feed, and each can be decoded by itself."""
        return self.encoding is None or codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig", "ascii")


USUAL = Delimited()


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """path: a file or folder. name: what messages call it. folder: what its media's paths start from, and do not leave.

    key: which member of a JSON object holds the rows. scratch: a folder of this source's own, gone at its close.
    unit_bytes: of a unit, about. delimited: how delimited text is written. stored: the file in a store whose ranges are
    read; then nothing lies at the path.
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
    """Rows of one format at a location. DataError for what is not of the format, OSError for what cannot be read."""

    def num_rows(self) -> int:
        """Reads all of it where nothing shorter tells; lines of text count even where they are blank."""
        ...

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        """Rows start <= number < stop, or to the end, in order; no unit where there are none."""
        ...


def in_units(
    items: Iterable[Item], num_bytes: Callable[[Item], int], *, unit_bytes: int, max_items: int = UNIT_ROWS
) -> Iterator[list[Item]]:
    """Consecutive items, as many together as first have unit_bytes, or max_items of them."""
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
    """The payload for a unit, or a file that holds it where it is long."""
    if len(payload) <= MAX_CARRIED_BYTES:
        return payload
    location.scratch.mkdir(parents=True, exist_ok=True)
    path = location.scratch / f"unit-{sum(1 for _ in location.scratch.iterdir())}"
    path.write_bytes(payload)
    return path


def carried(payload: bytes | Path) -> bytes:
    return payload if isinstance(payload, bytes) else payload.read_bytes()


def json_row(number: int, text: bytes) -> Row:
    """The row of a JSON object's text; with an error that says what is wrong, where and near what, if it is none."""
    if len(text) > MAX_ROW_BYTES:
        return Row(number, None, f"longer than {MAX_ROW_BYTES >> 20} MiB: break it into rows, or name media by path")
    try:
        values = parsed(text)
    except orjson.JSONDecodeError as error:
        return Row(number, None, _json_error(text, error))
    if isinstance(values, dict):
        return Row(number, values)
    return Row(number, None, f"expected a JSON object, found {type(values).__name__}: {excerpt(text, 0)}")


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
    """What is wrong with text that is not UTF-8, where and near what."""
    return (
        f"not valid UTF-8 (byte {text[error.start]:#04x} at byte {error.start + 1}): write it as UTF-8, "
        f"near {excerpt(text, error.start)}"
    )


def wide_text(text: bytes) -> str:
    """What is wrong with text of which a quarter is zero bytes, as in UTF-16 without a mark at its start; "" else."""
    if 4 * text.count(0) < max(1, len(text)):
        return ""
    return f"text in UTF-16 or UTF-32, or no text: write it as UTF-8, near {excerpt(text, 0)}"


def excerpt(text: bytes, offset: int) -> str:
    """A piece of it around a byte, printable."""
    start = max(0, offset - EXCERPT_BYTES // 2)
    piece = text[start : start + EXCERPT_BYTES].strip().decode(errors="replace")
    return repr(piece)


def share_of(total: int, *, before: int, whole: int) -> int:
    """`total` times `before` over `whole`, rounded down, so that differences of shares add up to `total`."""
    return total * before // max(1, whole)
