"""JSON texts -> values, with integers of any size as they are."""

from __future__ import annotations

import json
from typing import Any

import orjson

# orjson makes floats of integers that have more than 64 bits: those of 20 digits and more.
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 20


def parsed(text: bytes) -> Any:
    """The value of a JSON text. orjson.JSONDecodeError for what is none, ValueError for thousands of digits.

    >>> parsed(b'{"id": 123456789012345678901234567890}')
    {'id': 123456789012345678901234567890}
    """
    values = orjson.loads(text)
    return json.loads(text) if _LONG_NUMBER in text.translate(_DIGITS_TO_0) else values
