"""JSON texts -> values, with exact integers of any size, and Python's NaN and Infinity.

A JSON text longer than memory is read value by value.
"""

from __future__ import annotations

import io
import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson

from ..errors import DataError

JOINED_BYTES = 1 << 20
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"0" * 9)


def parsed(text: bytes) -> Any:
    """Return the value of a JSON text. orjson.JSONDecodeError for invalid text, for integers of more than 308
    digits, and for floats of more digits than Python reads of an integer.

    >>> parsed(b'{"id": 123456789012345678901234567890}')
    {'id': 123456789012345678901234567890}
    """
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        if b"NaN" in text or b"Infinity" in text:
            with suppress(ValueError, RecursionError):
                return json.loads(text.decode(), parse_float=number)
        raise
    return json.loads(text, parse_float=number) if _has_long_number(text) else values


def number(text: str) -> float:
    """Return the float of a text; ValueError for more digits than Python reads of an integer."""
    check_digits(text)
    return float(text)


def check_digits(text: str | bytes) -> None:
    """Raise orjson.JSONDecodeError for a number of more digits than Python reads of an integer."""
    most = sys.get_int_max_str_digits()
    if 0 < most < len(text):
        raise orjson.JSONDecodeError(f"a number has {len(text)} characters, more than {most}", "", 0)


def parsed_all(texts: Sequence[bytes]) -> list[Any]:
    """Return `parsed` of each text, in less time; ValueError if a text is invalid."""
    try:
        values = [*map(orjson.loads, texts)]
    except orjson.JSONDecodeError:
        return [*map(parsed, texts)]
    return [*map(parsed, texts)] if any(map(_has_long_number, _joined(texts))) else values


def _joined(texts: Sequence[bytes]) -> Iterator[bytes]:
    """Join texts in groups that end at JOINED_BYTES or more."""
    together: list[bytes] = []
    num_bytes = 0
    for text in texts:
        together.append(text)
        num_bytes += len(text)
        if num_bytes >= JOINED_BYTES:
            yield b"\n".join(together)
            together, num_bytes = [], 0
    yield b"\n".join(together)


def _has_long_number(text: bytes) -> bool:
    """Return whether a number may have more than 64 bits: 20 digits or more, or a sign and 19; orjson makes it a float.

    The quick test comes first, at a fifth of the time: every fifth byte meets at least 3 of 19 digits in a row.
    """
    if b"000" not in text[::5].translate(_DIGITS_TO_0):
        return False
    digits = text.translate(_DIGITS_TO_0)
    return b"0" * 20 in digits or b"-" + b"0" * 19 in digits


# JSON texts that are longer than memory. stream -> texts of values, one after another.
#
# ijson has the same speed (180 MB/s of chats), but one invalid value ends its file, it gives neither bytes nor offsets,
# and it replaces a lone surrogate by "?".

_CHUNK_BYTES = 1 << 20
_EXCERPT_BYTES = 60
_DECODER = json.JSONDecoder(strict=False)  # finds the end of a value; a control character is an error of its row
# These match a whole string. For a string with more than 100 escapes, or beyond the buffer's end, they match only the
# first quote, and _end_of_string finds the end. (A pattern for any number of escapes would keep a state for each
# escape.)
_IN_STRING = rb'[^"\\]*(?:\\.[^"\\]*){0,100}'
_SHALLOW = re.compile(rb'"' + _IN_STRING + rb'"|["{}\[\],]', re.DOTALL)
_NESTED = re.compile(rb'"' + _IN_STRING + rb'"|["{}\[\]]', re.DOTALL)
_STRING_REST = re.compile(_IN_STRING, re.DOTALL)


class JsonScanner:
    """Reader of JSON text, one value after another; keeps only the current value in memory.

    Invalid values are bounded by brackets, quotes and commas. DataError if the text breaks off, and for a value of more
    than max_bytes.
    """

    def __init__(self, stream: io.RawIOBase, *, name: str, max_bytes: int = 1 << 28):
        self._stream = stream
        self._name = name
        self._max_bytes = max_bytes
        self._buffer = b""
        self._text = ""  # the buffer, a character for each byte
        self._at = 0
        self._passed = 0  # bytes of the text before the buffer
        if self.peek() == BOM_UTF8[:1] and self._buffer.startswith(BOM_UTF8):
            self._at = len(BOM_UTF8)

    @property
    def offset(self) -> int:
        return self._passed + self._at

    def peek(self) -> bytes:
        """Return the next byte that is not white space; b"" at the end."""
        while True:
            rest = self._buffer[self._at : self._at + 64].lstrip()
            if rest:
                self._at = self._buffer.index(rest[:1], self._at)
                return rest[:1]
            self._at = min(self._at + 64, len(self._buffer))
            if self._at == len(self._buffer) and not self._fill():
                return b""

    def take(self, expected: bytes) -> bytes:
        """Pass and return the next byte; DataError unless it is in `expected`."""
        found = self.peek()
        if not found or found not in expected:
            wanted = " or ".join(repr(chr(byte)) for byte in expected)
            raise self._error(f"expected {wanted}, found {found.decode(errors='replace') or 'its end'!r}")
        self._at += 1
        return found

    def value(self, closer: bytes) -> bytes:
        """Return the text up to the next comma or `closer` outside of nested values; this byte is not passed."""
        self.peek()
        start = self._at
        with suppress(ValueError, RecursionError):  # invalid, or not all of it is in the buffer
            _, end = _DECODER.raw_decode(self._text, start)
            if (after := self._buffer[end : end + 64].lstrip()[:1]) and after in b"," + closer:
                self._at = end
                return self._buffer[start:end]
        return self._bounded(closer)

    def _bounded(self, closer: bytes) -> bytes:
        """See `value`."""
        depth, at = 0, self._at
        while True:
            found = (_NESTED if depth else _SHALLOW).search(self._buffer, at)
            if found is None:
                at = self._extend(len(self._buffer))
                continue
            at, token = found.end(), found.group()
            if token == b'"':
                at = self._end_of_string(at)
            elif token in b"{[":
                depth += 1
            elif depth == 0 and token in (b",", closer):
                text = self._buffer[self._at : at - 1].rstrip()
                self._at += len(text)
                return text
            elif token in b"}]":
                depth = max(0, depth - 1)

    def elements(self) -> Iterator[bytes]:
        """Yield texts of the elements of the next array."""
        self.take(b"[")
        empty = self._is_empty(b"]")
        while not empty:
            yield self.value(b"]")
            if self.take(b",]") == b"]":
                return

    def members(self) -> Iterator[str]:
        """Yield keys of the next object; read the value of each key before the next key."""
        self.take(b"{")
        empty = self._is_empty(b"}")
        while not empty:
            if self.peek() != b'"':
                self.take(b'"')  # raises: not a quote
            end = self._end_of_string(self._at + 1)
            text, self._at = self._buffer[self._at : end], end
            self.take(b":")
            try:
                yield str(orjson.loads(text))
            except orjson.JSONDecodeError as error:
                raise self._error(f"{excerpt(text, 0)} is not a key ({error.msg})") from error
            if self.take(b",}") == b"}":
                return

    def _is_empty(self, closer: bytes) -> bool:
        """Return whether the array or object just opened closes at once, and skip its end if it does."""
        empty = self.peek() == closer
        if empty:
            self._at += 1
        return empty

    def end(self) -> None:
        if self.peek():
            raise self._error("something follows the end of its value")

    def _end_of_string(self, at: int) -> int:
        """Return the index after the closing quote of the string whose content begins at `at`."""
        while True:
            rest = _STRING_REST.match(self._buffer, at)
            assert rest is not None  # the expression also matches nothing
            at = rest.end()
            if self._buffer[at : at + 1] == b'"':
                return at + 1
            if at + 1 >= len(self._buffer):  # the buffer ends here, or after a backslash
                at = self._extend(at)

    def _extend(self, position: int) -> int:
        """Read the next chunk within a value; return the new index of a position of the buffer."""
        if len(self._buffer) - self._at > self._max_bytes:
            raise self._error(
                f"a value is longer than {self._max_bytes >> 20} MiB, or its bracket or quote is not closed"
            )
        before = self._at
        if not self._fill():
            raise self._error("a bracket or quote is not closed, the file ends before")
        return position - before

    def _fill(self) -> bool:
        rest = self._buffer[self._at :]
        chunk = self._stream.read(max(_CHUNK_BYTES, len(rest))) or b""
        self._passed += self._at
        self._buffer, self._at = rest + chunk, 0
        self._text = self._buffer.decode("latin-1")
        return bool(chunk)

    def _error(self, what: str) -> DataError:
        near = excerpt(self._buffer, self._at)
        return DataError(
            f"{self._name}: not valid JSON at byte {self.offset + 1}, near {near}: {what}: correct it there"
        )


def excerpt(text: bytes, offset: int) -> str:
    """Printable excerpt of a text around a byte."""
    start = max(0, offset - _EXCERPT_BYTES // 2)
    piece = text[start : start + _EXCERPT_BYTES].strip().decode(errors="replace")
    return repr(piece)
