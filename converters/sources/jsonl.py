"""Lines, of JSON or of text -> units: byte ranges of a plain file, blocks of lines of a compressed one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO

from ...errors import DataError
from .files import REST_BYTES, DecompressedFile, File
from .table import (
    BOM,
    MAX_ROW_BYTES,
    Location,
    RowOf,
    RowTexts,
    carried,
    carry,
    in_units,
    json_row,
    not_utf8,
    rows_of,
    wide_text,
)
from .units import UNIT_ROWS, Row, Unit

CHUNK_BYTES = 1 << 20
GROUP_BYTES = 1 << 17  # of lines that are parsed together: their values stay in the CPU's caches
ENDLESS = 1 << 62
PROBE_BYTES = 1 << 16  # first bytes of a unit, to estimate its number of rows


@dataclass(slots=True)
class LineRange:
    """Lines of a file that start in a range of its bytes, the last line to its end."""

    file: File
    start: int
    stop: int
    folder: str | None
    row_of: RowOf = json_row
    num_lines: int = -1

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def rows(self) -> Iterator[Row]:
        with self.file.open(until=self.stop + REST_BYTES) as file:
            self.num_lines = yield from rows_of(line_groups(file, start=self.start, stop=self.stop), self.row_of)

    def by_index(self) -> RowTexts:
        with self.file.open(until=self.stop + REST_BYTES) as file:
            return RowTexts.of(lines_between(file, start=self.start, stop=self.stop), self.row_of)

    def count(self) -> int:
        return self.num_lines


@dataclass(slots=True)
class LineBlock:
    """Whole lines, carried. num_bytes: of the compressed file."""

    payload: bytes | Path
    num_bytes: int
    folder: str | None
    row_of: RowOf = json_row
    num_lines: int = -1

    def rows(self) -> Iterator[Row]:
        groups = line_groups(io.BytesIO(carried(self.payload)), start=0, stop=ENDLESS)
        self.num_lines = yield from rows_of(groups, self.row_of)

    def by_index(self) -> RowTexts:
        return RowTexts.of(lines_between(io.BytesIO(carried(self.payload)), start=0, stop=ENDLESS), self.row_of)

    def count(self) -> int:
        return self.num_lines


def lines_between(file: IO[bytes], *, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines whose first byte is at start <= position < stop, without the file's byte order mark.

    A line longer than MAX_ROW_BYTES is cut to MAX_ROW_BYTES + 1 bytes.
    """
    return chain.from_iterable(line_groups(file, start=start, stop=stop))


def line_groups(file: IO[bytes], *, start: int, stop: int) -> Iterator[list[bytes]]:
    """Yield the lines of lines_between in groups of about GROUP_BYTES."""
    position = start
    if start:
        file.seek(start - 1)
        position += _pass_line(file, stop - start) - 1
    while position < stop and (text := file.read(min(GROUP_BYTES, stop - position))):
        begun = len(text) - (text.rfind(b"\n") + 1)  # bytes of the last line, unless the text ends with a line
        if begun:
            text += file.readline(MAX_ROW_BYTES + 1 - begun)
        position += len(text)
        lines = io.BytesIO(text if position > len(text) else text.removeprefix(BOM)).readlines()
        if len(lines[-1]) > MAX_ROW_BYTES and not text.endswith(b"\n"):
            position += _pass_line(file, None)
        yield lines


def line_ranges(location: Location, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield byte ranges of a file of lines, each of at most unit_bytes.

    The first PROBE_BYTES of each unit_bytes estimate the number of lines; ranges are smaller for more than UNIT_ROWS.
    """
    for start in range(first, last, location.unit_bytes):
        stop = min(start + location.unit_bytes, last)
        with location.file.open_raw() as file:
            file.seek(start)
            probe = file.read(min(PROBE_BYTES, stop - start)) or b""
        num_rows = probe.count(b"\n") * (stop - start) // max(1, len(probe))
        num_ranges = max(1, min(-(-num_rows // UNIT_ROWS), stop - start))
        yield from pairwise(start + (stop - start) * number // num_ranges for number in range(num_ranges + 1))


def _pass_line(file: IO[bytes], limit: int | None) -> int:
    """Read to the end of the line, or stop behind `limit` bytes of a longer line; return the number of bytes read."""
    passed = 0
    while limit is None or passed <= limit:
        piece = file.readline(CHUNK_BYTES)
        passed += len(piece)
        if not piece or piece.endswith(b"\n"):
            break
    return passed


class LinesTable:
    """A file of lines, each parsed by row_of (default: JSON). Every line counts as a row, also a blank line."""

    def __init__(self, location: Location, *, row_of: RowOf = json_row):
        self._location = location
        self._row_of = row_of

    def num_rows(self) -> int:
        with DecompressedFile(self._location.file, name=self._location.name) as stream:
            num_lines, last = 0, b"\n"
            while chunk := stream.read(CHUNK_BYTES):
                num_lines += chunk.count(b"\n")
                last = chunk[-1:]
        return num_lines + (last != b"\n")

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        with DecompressedFile(self._location.file, name=self._location.name) as stream:
            compressed, head = stream.compression is not None, stream.read(PROBE_BYTES) or b""
        if b"\r" in head.rstrip() and b"\n" not in head:
            raise DataError(
                f"{self._location.name}: its lines end only in carriage returns, and would be read as a single line: "
                "replace carriage returns by line feeds, with tr '\\r' '\\n'"
            )
        return self._blocks(start, stop) if compressed else self._ranges(start, stop)

    def _ranges(self, start: int, stop: int | None) -> Iterator[Unit]:
        location = self._location
        first, last = 0, location.file.num_bytes
        if start or stop is not None:
            with location.file.open() as file:
                first = _offset_of_line(file, start)
                last = last if stop is None else first + _offset_of_line(file, max(0, stop - start))
        for begin, end in line_ranges(location, first, last):
            yield LineRange(location.file, begin, end, location.folder, self._row_of)

    def _blocks(self, start: int, stop: int | None) -> Iterator[Unit]:
        location, before = self._location, 0
        with DecompressedFile(location.file, name=location.name) as stream:
            file = io.BufferedReader(stream, CHUNK_BYTES)  # closes the stream when garbage-collected
            lines = islice(lines_between(file, start=0, stop=ENDLESS), start, stop)
            for block in in_units(lines, len, unit_bytes=location.unit_bytes):
                payload = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in block)
                num_bytes = stream.position() - before
                yield LineBlock(carry(payload, location), num_bytes, location.folder, self._row_of)
                before = stream.position()


def _offset_of_line(file: IO[bytes], number: int) -> int:
    """Move to the start of a line, counted from 0 at the current position; return the number of bytes passed."""
    start = file.tell()
    while number and (chunk := file.read(CHUNK_BYTES)):
        num_ends = chunk.count(b"\n")
        if num_ends < number:
            number -= num_ends
            continue
        at = -1
        for _ in range(number):
            at = chunk.find(b"\n", at + 1)
        file.seek(at + 1 - len(chunk), io.SEEK_CUR)
        break
    return file.tell() - start


# Lines of text -> units of rows {"text": a line}: corpora that hold a sentence or a document on each line.


def text_row(number: int, line: bytes) -> Row:
    """Return the row of a line without its line end; other white space stays. Invalid text: a row with an error."""
    if len(line) > MAX_ROW_BYTES:
        return Row(number, None, f"longer than {MAX_ROW_BYTES >> 20} MiB: break it into several lines")
    if problem := wide_text(line):
        return Row(number, None, problem)
    try:
        return Row(number, {"text": line.removesuffix(b"\n").removesuffix(b"\r").decode()})
    except UnicodeDecodeError as error:
        return Row(number, None, not_utf8(line, error))


TextLinesTable = partial(LinesTable, row_of=text_row)
