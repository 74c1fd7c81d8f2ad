"""The members of a large JSON file one after another, in little memory. bytes of an index -> entries with offsets."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from typing import Any, NamedTuple

_WINDOW = 1 << 22  # bytes that are decoded together
_MAX_VALUE = 1 << 28  # bytes of one value; an entry of an index has some hundreds


class Member(NamedTuple):
    """A value of an object, or where it is the array that was asked for one of its items, with its place in the file.

    name: of the object's member. is_item: whether it is an item of the array. start, stop: offsets in bytes.
    """

    name: str
    value: Any
    is_item: bool
    start: int
    stop: int


def members(data: bytes | mmap.mmap, *, array: str, window: int = _WINDOW) -> Iterator[Member]:
    """The members of the object that a JSON file holds, those of the member `array` item by item.

    data: the file's bytes, best memory-mapped. window: bytes that are decoded together. Raises ValueError where it is
    not such an object.
    """
    walk = _Walk(data, window)
    walk.expect(b"{")
    if walk.take(b"}"):
        return walk.end()
    while True:
        name, _, _ = walk.value()
        if not isinstance(name, str):
            raise ValueError(f"a name was expected, found {str(name)[:40]!r}")
        walk.expect(b":")
        if name == array:
            for item in walk.items():
                yield Member(name, item[0], True, item[1], item[2])
        else:
            yield Member(name, *walk.value_of_member())
        if walk.take(b"}"):
            return walk.end()
        walk.expect(b",")


class _Walk:
    """A position in a file, and the text of the window after it."""

    def __init__(self, data: bytes | mmap.mmap, window: int):
        self._data, self._window = data, window
        self._at = 0  # offset of the position in the file
        self._text = ""
        self._in_text = 0  # and in the text
        self._is_ascii = True
        self._decode = json.JSONDecoder().raw_decode

    def _load(self, num_bytes: int) -> bool:
        """The text of the window from the position on; False at the end of the file."""
        window = self._data[self._at : self._at + num_bytes]
        for cut in range(4):  # a character may go on after the window
            try:
                self._text = window[: len(window) - cut].decode()
                break
            except UnicodeDecodeError:
                if cut == 3 or self._at + num_bytes >= len(self._data):
                    raise
        self._in_text = 0
        self._is_ascii = self._text.isascii()
        return bool(self._text)

    def _next(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._in_text < len(self._text):
                character = self._text[self._in_text]
                if character not in " \t\n\r":
                    return character
                self._in_text += 1
                self._at += 1
            if not self._load(self._window):
                return ""

    def take(self, mark: bytes) -> bool:
        """Step over a mark if it comes next."""
        if self._next() != mark.decode():
            return False
        self._in_text += 1
        self._at += 1
        return True

    def expect(self, mark: bytes) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark.decode()!r} was expected at byte {self._at}, found {self._next()!r}")

    def end(self) -> None:
        if self._next():
            raise ValueError(f"the end was expected at byte {self._at}, found {self._next()!r}")

    def value(self) -> tuple[Any, int, int]:
        """The next value, its first and one-past-last byte."""
        self._next()
        size = self._window
        while True:
            try:
                value, end = self._decode(self._text, self._in_text)
                if end + 2 < len(self._text) or self._at_end():  # a number may go on after the window: 1|e+|3
                    break
            except json.JSONDecodeError:
                if self._at_end() or size > _MAX_VALUE:
                    raise
            size = size if self._in_text else 2 * size
            self._load(size)
        start = self._at
        text = self._text[self._in_text : end]
        self._at += len(text) if self._is_ascii else len(text.encode())
        self._in_text = end
        return value, start, self._at

    def _at_end(self) -> bool:
        left = self._text[self._in_text :]
        return self._at + (len(left) if self._is_ascii else len(left.encode())) >= len(self._data)

    def items(self) -> Iterator[tuple[Any, int, int]]:
        """The items of the array that comes next."""
        self.expect(b"[")
        if self.take(b"]"):
            return
        while True:
            yield self.value()
            if self.take(b"]"):
                return
            self.expect(b",")

    def value_of_member(self) -> tuple[Any, bool, int, int]:
        value, start, stop = self.value()
        return value, False, start, stop
