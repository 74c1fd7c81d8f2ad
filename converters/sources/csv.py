"""CSV and TSV -> units. Quoted fields may hold line ends: rows are found only by reading, and units carry their rows.

Without quotes each line is a row, and units are byte ranges of a plain file.
"""

from __future__ import annotations

import codecs
import csv
import io
import mimetypes
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from ...errors import ConfigError, DataError, did_you_mean
from .files import REST_BYTES, DecompressedFile, File
from .jsonl import line_ranges, lines_between
from .table import BOM, MAX_ROW_BYTES, Delimited, Location, carried, carry, in_units
from .units import Row, Unit

_DELIMITERS = (";", "\t", "|", ",")  # usual delimiters
_QUOTED = re.compile(r'"(?:[^"]|"")++"')  # a quoted field with doubled quotes inside
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
_DIGIT = re.compile(r"\d")
_LOOK_ROWS = 20  # first rows that show whether the first row is a header
_TOO_LONG = f"longer than {MAX_ROW_BYTES >> 20} MiB: break it into rows"


@dataclass(frozen=True, slots=True)
class _Header:
    """Header of a table. names: of the columns. is_guess: quotes are taken for text without a setting of the user."""

    names: tuple[str, ...]
    is_guess: bool

    def quoted(self, fields: list[str]) -> str | None:
        """Return the first field that seems to be quoted, if quotes are taken for text by a guess."""
        found = (field for field in fields if _QUOTED.fullmatch(field) and '""' in field[1:-1])
        return next(found, None) if self.is_guess else None


@dataclass(slots=True)
class FieldBlock:
    """Lists of fields, carried in JSON; a text instead of a list is the error of this row."""

    payload: bytes | Path
    header: _Header
    num_rows: int
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        for number, line in enumerate(carried(self.payload).splitlines()):
            yield _row(self.header, number, orjson.loads(line))

    def count(self) -> int:
        return self.num_rows


@dataclass(slots=True)
class FieldLines:
    """Rows (lines) that start in a byte range of a file. num_bytes: includes a header before the range."""

    file: File
    delimiter: str
    header: _Header
    start: int
    stop: int
    num_bytes: int
    folder: str | None
    num_rows: int = -1

    def rows(self) -> Iterator[Row]:
        number = -1
        with self.file.open(until=self.stop + REST_BYTES) as file:
            lines = _texts(lines_between(file, start=self.start, stop=self.stop))
            for number, fields in enumerate(_rows(_reader(lines, self.delimiter, ""))):
                yield _row(self.header, number, _TOO_LONG if isinstance(fields, str) else _decoded(fields, "utf-8"))
        self.num_rows = number + 1

    def count(self) -> int:
        return self.num_rows


def _row(header: _Header, number: int, fields: list[str] | str) -> Row:
    names = header.names
    if isinstance(fields, str):
        return Row(number, None, fields)
    if len(fields) != len(names):
        quotes = header.is_guess and any(field.startswith('"') for field in fields)
        remedy = "pass --quote double if fields stand in quotes, or correct the row" if quotes else "correct the row"
        return Row(number, None, f"{len(fields)} fields, where the header names {len(names)}: {remedy}")
    if len(fields) > 1 and (first := fields[0].removeprefix("\ufeff")) in names:
        again = (first, *fields[1:])
        if again == names:
            return Row(number, None, "it is the header again, as where files were joined: remove the row")
        if sorted(again) == sorted(names):
            return Row(
                number,
                None,
                "it names the columns in another order, as where files were joined, and the rows after it would be "
                "read by the first order: convert each file on its own",
            )
    if quoted := header.quoted(fields):
        return Row(
            number, None, f"{quoted[:60]!r} seems to stand in quotes: pass --quote double, or none if it is text"
        )
    values = dict(zip(names, fields, strict=True))
    values.pop("", None)
    return Row(number, values)


class _Quoted(csv.excel):
    strict = True


class _Unquoted(_Quoted):
    quoting = csv.QUOTE_NONE


class DelimitedTable:
    """A file whose first row names the columns. Values are unchanged text; blank lines are not rows.

    A first column without a name is the index of a pandas table, and is left out.

    delimiter: between fields. quote: around fields, not part of the field ("" for none: a quote is plain text). The
    location's settings override both, and set the encoding.
    """

    def __init__(self, location: Location, *, delimiter: str, quote: str):
        said = location.delimited
        self._location = location
        self._delimiter = said.delimiter or delimiter
        self._quote = quote if said.quote is None else said.quote
        self._encoding = "utf-8" if said.is_utf8 else said.encoding or "utf-8"
        if self._quote == self._delimiter:
            raise DataError(
                f"{location.name}: {self._delimiter!r} separates fields and cannot be the quote, too: pass another "
                "--quote"
            )

    def num_rows(self) -> int:
        with self._open() as (_, rows):
            return sum(1 for _ in rows) - (not self._location.delimited.header)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        with self._open() as (stream, _):
            has_lines = stream.compression is None and not self._quote and self._location.delimited.is_utf8
        rows_from = self._end_of_header() if has_lines and start == 0 and stop is None else None
        return self._blocks(start, stop) if rows_from is None else self._ranges(rows_from)

    def _end_of_header(self) -> int | None:
        """Return the offset after the header, the first line that is not blank; None for a lone carriage return."""
        if self._location.delimited.header:
            return 0
        with self._location.file.open(until=REST_BYTES) as file:
            for line in iter(partial(file.readline, MAX_ROW_BYTES + 1), b""):
                texts = list(_texts([line.removeprefix(BOM)]))
                if len(texts) > 1:
                    return None
                if texts[0].strip("\r\n"):
                    break
            return file.tell()

    def _ranges(self, rows_from: int) -> Iterator[Unit]:
        location, before = self._location, 0
        with self._open() as (_, rows):
            header = self._header(rows)
        for begin, end in line_ranges(location, rows_from, location.file.num_bytes):
            yield FieldLines(location.file, self._delimiter, header, begin, end, end - before, location.folder)
            before = end

    def _blocks(self, start: int, stop: int | None) -> Iterator[Unit]:
        with self._open() as (stream, rows):
            header = self._header(rows)
            location, before = self._location, 0
            encoded = (_encode(fields, self._encoding) for fields in islice(rows, start, stop))
            for block in in_units(encoded, len, unit_bytes=location.unit_bytes):
                payload = carry(b"\n".join(block), location)
                yield FieldBlock(payload, header, len(block), stream.position() - before, location.folder)
                before = stream.position()

    def _header(self, rows: Iterator[list[str] | str]) -> _Header:
        """Return the user's header, or else read the header from the rows."""
        name, given = self._location.name, self._location.delimited.header
        is_guess = not self._quote and self._location.delimited.quote is None
        if given:
            return _Header(given, is_guess)
        fields = next(rows, [])
        if isinstance(fields, str):
            raise DataError(f"{name}: its first row, the header with the column names, is broken: {fields}")
        if self._quote != '"' and all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields):
            raise DataError(f"{name}: the columns of its header are in quotes, {fields[0]}: pass --quote double")
        if given is None:
            self._check_names(fields)
        for number, field in enumerate(fields):
            if not field and number == 0 and len(fields) > 1 and fields.count("") == 1:
                continue
            if not field.strip() or fields.count(field) > 1:
                raise DataError(
                    f"{name}: its first row is to name the columns, each once: {field!r} does not: correct the header"
                )
            if not "".join(field.split()).isprintable():
                raise DataError(
                    f"{name}: column {field!r} of the header is not text in {self._encoding.upper()}: write the file "
                    "as UTF-8, or name its encoding with --encoding"
                )
        self._check_delimiter(fields)
        return _Header(tuple(fields), is_guess)

    def _guess(self) -> tuple[str, list[list[str]]]:
        """Return the first delimiter by which the first rows have equally many fields, and these rows."""
        tries = [(self._delimiter, self._quote), *((each, "") for each in _DELIMITERS if each != self._delimiter)]
        for delimiter, quote in tries:
            with self._open(delimiter, quote) as (_, rows):
                first = [row if isinstance(row, list) else [] for row in islice(rows, _LOOK_ROWS)]
            if len(first[0]) > 1 and {*map(len, first)} == {len(first[0])}:
                return delimiter, first
        return self._delimiter, []

    def _check_names(self, fields: list[str]) -> None:
        """Raise DataError for a field of the first row that looks like a value, with options that read the row."""
        delimiter, first = self._guess()
        is_usual = delimiter == self._delimiter
        rows = [row for row in first[1:] if {*fields} != {each.removeprefix("\ufeff") for each in row} and is_usual]
        value = fields[0] if not is_usual and len(fields) > 1 else None
        is_numbered = [*fields] == [*map(str, range(len(fields)))]  # by pandas
        for field, values in zip(fields, [*zip(*rows, strict=True)] or [()] * len(fields), strict=True):
            words, is_again = field.split(), values.count(field) > 1 and len({*values}) > 1
            is_sentence = max(5 * len(words), len(field)) > 60 or (len(words) > 2 and words[-1][-1] in ".!")
            is_number = values and not is_numbered and all(map(_NUMBER.fullmatch, (field, *values)))
            if words and (is_sentence or is_number or is_again or _kind(field) not in ("", "text")):
                value = value or field
        if value is not None:
            by = "" if is_usual else f" --delimiter '{'tab' if delimiter == chr(9) else delimiter}' --quote none"
            raise DataError(
                f"{self._location.name}: its first row is to name the columns, and {value[:60]!r} looks like a value: "
                f"pass --header {_names(first) or 'text'}{by} to name the columns of a file without a header, or "
                "--header first if its first row is the header"
            )

    def _check_delimiter(self, fields: list[str]) -> None:
        others = [each for each in _DELIMITERS if each != self._delimiter and len(fields) == 1 and each in fields[0]]
        if others:
            shown = "tab" if others[0] == "\t" else others[0]
            raise DataError(
                f"{self._location.name}: its header names one column, {fields[0]!r}: pass --delimiter '{shown}' if "
                "this character separates its fields, or rename the column"
            )

    @contextmanager
    def _open(
        self, delimiter: str | None = None, quote: str | None = None
    ) -> Iterator[tuple[DecompressedFile, Iterator[list[str] | str]]]:
        """Open the file; yield it with its rows, header first: lists of fields, or the error of a row."""
        delimiter, quote = delimiter or self._delimiter, self._quote if quote is None else quote
        with DecompressedFile(self._location.file, name=self._location.name) as stream:
            # Invalid bytes become surrogates: only their row is an error.
            encoding = "utf-8-sig" if self._location.delimited.is_utf8 else self._encoding
            buffered = io.BufferedReader(stream, 1 << 20)
            text = io.TextIOWrapper(buffered, encoding=encoding, errors="surrogateescape", newline="")
            yield stream, self._checked(_rows(_reader(text, delimiter, quote)))

    def _checked(self, rows: Iterator[list[str] | str]) -> Iterator[list[str] | str]:
        """Raise DataError for bytes that cannot be decoded at all, such as half a character of UTF-16."""
        try:
            yield from rows
        except UnicodeError as error:
            raise DataError(
                f"{self._location.name}: not text in {self._encoding.upper()} ({error}): name its encoding with "
                "--encoding, or copy it again"
            ) from error


def _kind(field: str) -> str:
    """Return the kind of media that a path names, "" for a number and an id, and "text" for others."""
    kind = (mimetypes.guess_type(field)[0] or "").partition("/")[0]
    is_word = len(field.split()) < 2
    return (
        kind if is_word and kind in ("image", "audio", "video") else "" if is_word and _DIGIT.search(field) else "text"
    )


def _names(rows: Sequence[Sequence[str]]) -> str:
    """Return names for columns by most of their values."""
    kinds = [Counter(map(_kind, column)).most_common(1)[0][0] for column in zip(*rows, strict=True)]
    if kinds.count("text") > 1 and {*kinds} <= {"text", ""}:
        texts = ["".join(column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True) if kind]
        is_title = len(texts[1]) > 3 * len(texts[0]) and not re.search("[?？]", texts[0])  # or a summary of the second
        is_pair = len(texts) == 2 and not is_title
        roles = iter(("prompt", "response") if is_pair else [""] * len(kinds))
        kinds = [next(roles) if kind == "text" else kind for kind in kinds]
    return ",".join(kind if kind and kind not in kinds[:at] else f"column{at + 1}" for at, kind in enumerate(kinds))


def _reader(lines: Iterable[str], delimiter: str, quote: str) -> Any:
    # The csv module's own limit is 128 KiB, for all of a process.
    csv.field_size_limit(max(MAX_ROW_BYTES, csv.field_size_limit()))
    return csv.reader(lines, _Quoted if quote else _Unquoted, delimiter=delimiter, quotechar=quote or None)


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield lines in the way of text streams: a carriage return also ends a line."""
    for line in lines:
        text = line.decode(errors="surrogateescape")
        if len(line) > MAX_ROW_BYTES:  # a truncated long line becomes a field above the limit, an error
            text = "x" * (MAX_ROW_BYTES + 1)
        if "\r" in text.removesuffix("\n").removesuffix("\r"):
            yield from re.split(r"(?<=\r)(?!\n)", text)
        else:
            yield text


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


def _encode(fields: list[str] | str, encoding: str) -> bytes:
    try:
        return orjson.dumps(fields)
    except TypeError:  # orjson refuses surrogates
        return orjson.dumps(_decoded(fields, encoding))


def _decoded(fields: list[str] | str, encoding: str) -> list[str] | str:
    """Return the fields, or an error if their bytes are not text in the encoding."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        bad = next(field for field in fields if any("\ud800" <= character <= "\udfff" for character in field))
        return f"not valid {encoding.upper()} near {bad[:60]!a}: write the file as UTF-8, or say its --encoding"
    return fields


# The user's settings of CSV and TSV -> a checked Delimited.

KEYS = ("delimiter", "quote", "encoding", "header")
_QUOTES = {"none": "", "double": '"'}
_NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}


def delimited(
    *, delimiter: str | None = None, quote: str | None = None, encoding: str | None = None, header: str | None = None
) -> Delimited:
    """Return checked settings of delimited text. delimiter: a character, or tab. quote: none, double, or a character.
    encoding: a Python name. header: names of columns between commas, or first.

    ConfigError for invalid settings.

    >>> delimited(delimiter="tab", quote="none").delimiter
    '\\t'
    """
    made = Delimited(
        delimiter=None if delimiter is None else _NAMED_DELIMITERS.get(delimiter, delimiter),
        quote=None if quote is None else _QUOTES.get(quote, quote),
        encoding=encoding,
        header=None if header is None else () if header == "first" else tuple(header.split(",")),
    )
    if made.header and (not all(map(str.strip, made.header)) or len({*made.header}) < len(made.header)):
        raise ConfigError(f"header {header!r} does not name each column once: write NAME,NAME, or first")
    if made.delimiter is not None and (len(made.delimiter) != 1 or made.delimiter in '\r\n"\0'):
        raise ConfigError(f"delimiter {delimiter!r} cannot separate fields: pass one character, or tab")
    if quote == "" or (made.quote and not (len(made.quote) == 1 and made.quote.isprintable())):
        raise ConfigError(f"quote {quote!r} is not a quote: pass none, double, or a single character")
    if encoding is not None:
        _check_encoding(encoding)
    return made


def _check_encoding(encoding: str) -> None:
    try:
        is_text = getattr(codecs.lookup(encoding), "_is_text_encoding", True)
    except LookupError:
        is_text = False
    if not is_text:
        nearest = did_you_mean(encoding, ("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "gb18030", "shift_jis"))
        raise ConfigError(f"encoding {encoding!r} is unknown to Python: {nearest}")


def delimited_of_entry(given: Any) -> Delimited:
    """Return settings from a list's entry: {delimiter, quote, encoding}, texts; ConfigError for invalid settings."""
    if not isinstance(given, dict):
        raise ConfigError(f"csv is {given!r}: write csv: {{{': …, '.join(KEYS)}: …}}")
    for key, value in given.items():
        if key not in KEYS:
            raise ConfigError(f"csv has no {key!r}: {did_you_mean(key, KEYS)}")
        if not isinstance(value, str):
            raise ConfigError(f"csv.{key} is {value!r}: expected text")
    return delimited(**given)
