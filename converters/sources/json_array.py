"""A JSON array of objects -> units: the texts of its elements, read in a stream; other processes parse the texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, starmap
from pathlib import Path

import orjson

from ...errors import DataError
from ...processors.json_text import JsonScanner
from .files import DecompressedFile
from .table import MAX_ROW_BYTES, Location, RowTexts, carried, carry, in_units, json_row
from .units import Row, Unit

# What rows call a list of messages or exchanges, and who speaks first in a list of another name.
LISTS_OF_MESSAGES = ("messages", "conversations", "conversation", "texts", "chosen", "rejected")
FIRST_SPEAKERS = ("system", "developer", "user", "human", "assistant", "gpt")


@dataclass(slots=True)
class ElementBlock:
    """Texts of elements in order. num_bytes: of the file."""

    payload: bytes | Path
    sizes: tuple[int, ...]
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        return (json_row(number, text) for number, text in self._texts())

    def by_index(self) -> RowTexts:
        return RowTexts(list(self._texts()))

    def _texts(self) -> Iterator[tuple[int, bytes]]:
        payload, at = carried(self.payload), 0
        for number, size in enumerate(self.sizes):
            yield number, payload[at : at + size]
            at += size

    def count(self) -> int:
        return len(self.sizes)


class JsonTable:
    """A file with an array of objects, or with an object of which one member is an array of objects.

    An object of objects holds rows by their ids. An object with a list of messages or exchanges, or without objects, is
    one row, unless the user names the member.
    """

    def __init__(self, location: Location):
        self._location = location
        self._key = location.key

    def num_rows(self) -> int:
        with self._open() as stream:
            return sum(1 for _ in self._elements(stream))

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        unit_bytes, before = self._location.unit_bytes, 0
        with self._open() as stream:
            elements = islice(self._elements(stream), start, stop)
            for block in in_units(elements, len, unit_bytes=unit_bytes):
                yield self._unit(block, stream.position() - before)
                before = stream.position()

    def _unit(self, block: list[bytes], num_bytes: int) -> Unit:
        payload = carry(b"".join(block), self._location)
        return ElementBlock(payload, tuple(map(len, block)), num_bytes, self._location.folder)

    def _open(self) -> DecompressedFile:
        return DecompressedFile(self._location.file, name=self._location.name)

    def _elements(self, stream: DecompressedFile) -> Iterator[bytes]:
        scanner = JsonScanner(stream, name=self._location.name, max_bytes=MAX_ROW_BYTES)
        if scanner.peek() == b"[":
            if self._key is not None:
                raise DataError(
                    f"{self._location.name}: its value is an array, without named members: leave out #{self._key}"
                )
            yield from scanner.elements()
            scanner.end()
            return
        if self._key is None and self._holds_rows_by_id:
            for key in scanner.members():
                row = scanner.value(b"}")
                rest = row[1:].lstrip()
                comma = b"" if rest.startswith(b"}") else b","
                yield row if b'"id"' in row else b'{"id":' + orjson.dumps(key) + comma + rest
            scanner.end()
            return
        is_row = not self._arrays and len(self._members) > 0
        if self._key is None and (is_row or any(starmap(_are_messages, self._arrays.items()))):
            members = [orjson.dumps(key) + b":" + scanner.value(b"}") for key in scanner.members()]
            scanner.end()
            yield b"{" + b",".join(members) + b"}"
            return
        self._key = self._key or self.only_array()
        num_read = 0
        for key in scanner.members():
            if key != self._key or scanner.peek() != b"[":
                _pass_value(scanner)
                continue
            num_read += 1
            if num_read > 1:
                raise DataError(f"{self._location.name}: its object has {key!r} more than once: rename one of them")
            yield from scanner.elements()
        scanner.end()
        if not num_read:
            name = self._location.name
            raise DataError(f"{name}: no member {self._key!r} of its object is an array: {self._choices()}")

    def only_array(self) -> str:
        """Return the member to read by default; DataError for several members, or none, with an array of objects."""
        arrays = list(self._arrays)
        if len(arrays) != 1:
            found = f"{len(arrays)} members" if arrays else "no member"
            raise DataError(f"{self._location.name}: {found} of its object with an array of objects: {self._choices()}")
        return arrays[0]

    def _choices(self) -> str:
        if not self._arrays:
            return "give an array of objects"
        file = self._location.name.removesuffix(f"#{self._location.key}")
        return f"choose one by its name, {' or '.join(f'{file}#{key}' for key in self._arrays)}"

    @property
    def _arrays(self) -> dict[str, bytes]:
        """Members with an array of objects, each with the first object of the array."""
        return {key: first for key, first in self._members.items() if first.startswith(b"{") and first != _OBJECT}

    @property
    def _holds_rows_by_id(self) -> bool:
        """Whether the file is an object whose members are several objects: rows by their ids."""
        return len(self._members) > 1 and all(first == _OBJECT for first in self._members.values())

    @cached_property
    def _members(self) -> dict[str, bytes]:
        """Members -> the first element of an array, _OBJECT for an object, b"" for others; reads the complete file."""
        with self._open() as stream:
            scanner = JsonScanner(stream, name=self._location.name, max_bytes=MAX_ROW_BYTES)
            return {key: _pass_value(scanner) for key in scanner.members()}


_OBJECT = b"{"


def _pass_value(scanner: JsonScanner) -> bytes:
    """Skip a member's value; return the first element of an array, _OBJECT for an object, b"" for other values."""
    if (begin := scanner.peek()) != b"[":
        scanner.value(b"}")
        return _OBJECT if begin == b"{" else b""
    first = b""
    for number, element in enumerate(scanner.elements()):
        first = first if number else element
    return first


def _are_messages(name: str, first: bytes) -> bool:
    """Return whether a member holds the messages or exchanges of a single row, by the first object.

    Under a usual name, objects are messages unless an object is a row itself: a text, or with its own list. `texts`
    holds exchanges, whose objects have no `text`.
    """
    try:
        values = orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    if name in LISTS_OF_MESSAGES:
        of_row = {*LISTS_OF_MESSAGES, "text"} if name == "texts" else LISTS_OF_MESSAGES
        return len(values.keys() - {"id"}) > 1 and values.keys().isdisjoint(of_row)
    if "speaker" in values and len(values.keys() - {"id"}) == 2:
        return True
    usual = (("role", "content"), ("from", "value"))
    return any(values.get(speaker) in FIRST_SPEAKERS and said in values for speaker, said in usual)
