"""JSON texts -> values, with integers of any size as they are, and the NaN and Infinity that Python writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson

JOINED_BYTES = 1 << 20
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"0" * 9)


def parsed(text: bytes) -> Any:
    """The value of a JSON text. orjson.JSONDecodeError for what is none, and for more than 308 digits.

    >>> parsed(b'{"id": 123456789012345678901234567890}')
    {'id': 123456789012345678901234567890}
    """
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        if b"NaN" in text or b"Infinity" in text:
            with suppress(ValueError, RecursionError):
                return json.loads(text.decode())
        raise
    return json.loads(text) if _has_long_number(text) else values


def parsed_all(texts: Sequence[bytes]) -> list[Any]:
    """`parsed` of each, in a part of the time; ValueError where one of them is none."""
    try:
        values = [*map(orjson.loads, texts)]
    except orjson.JSONDecodeError:
        return [*map(parsed, texts)]
    return [*map(parsed, texts)] if any(map(_has_long_number, _joined(texts))) else values


def _joined(texts: Sequence[bytes]) -> Iterator[bytes]:
    """Texts, as many together as first have JOINED_BYTES."""
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
    """Whether a number may have more than 64 bits: 20 digits or more, or a sign and 19, of which orjson makes a float.

    Of 19 digits in a row every fifth byte of the text meets 3, and that is looked at first, since it takes a fifth of
    the time.
    """
    if b"000" not in text[::5].translate(_DIGITS_TO_0):
        return False
    digits = text.translate(_DIGITS_TO_0)
    return b"0" * 20 in digits or b"-" + b"0" * 19 in digits
