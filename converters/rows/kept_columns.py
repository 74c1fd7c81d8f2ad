"""Columns that are kept unchanged: their MDS encoding, from the first rows' values, and values that fit it. Pure.

str, bytes (also {"bytes", "path"} of media), int, float64, ndarray:DTYPE; json for lists, objects, true and false, and
for values that are null or of several of these types. A list becomes an array only if the user names the encoding;
other MDS encodings also need a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from ...errors import DataError
from .fields import check_text

_DTYPES = ("uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64")
FILES = ("jpeg", "png")  # encodings stored in the bytes of a file
_WRITTEN: dict[str, Callable[[Any], Any]] = {"str_int": int, "str_float": float, "str_decimal": Decimal}  # in text
_SCALARS = {str: "str", bytes: "bytes", int: "int", float: "float64"}


def column_encoding(name: str, values: Sequence[Any]) -> str:
    """Return the encoding for all first values of a column; DataError if MDS has no such encoding."""
    found = {_encoding(name, value) for value in values}
    if len(found) == 1:
        return found.pop()
    if found == {"int", "float64"}:
        return "float64"
    alien = sorted(found - {"str", "int", "float64", "json"})
    if alien:
        raise DataError(
            f"column {name!r} holds {' and '.join(sorted(found))}, and a column has values of one type: "
            f"{_as_bytes(name) if found == {'bytes', 'json'} else ''}drop it from --keep"
        )
    return "json"


def named_encoding(text: str, names: Collection[str]) -> tuple[str, str | None]:
    """Return the column of a --keep text and its encoding, None without one: COLUMN:json, COLUMN:bytes, COLUMN:DTYPE,
    COLUMN:ndarray:DTYPE, with or without a shape of all arrays (COLUMN:ndarray:int16:2,2), COLUMN:jpeg, COLUMN:png,
    COLUMN:str_int, COLUMN:str_float or COLUMN:str_decimal.

    >>> named_encoding("mask:ndarray:uint8", ["mask"])
    ('mask', 'ndarray:uint8')
    """
    if text in names:
        return text, None
    if text.endswith(":json"):
        return text.removesuffix(":json"), "json"
    name, separator, rest = text.rpartition(":ndarray:")
    if separator and rest.partition(":")[0] in _DTYPES:
        return name, f"ndarray:{rest}"
    name, separator, dtype = text.rpartition(":")
    return (name, dtype) if separator and dtype in (*_DTYPES, *_WRITTEN, *FILES, "bytes") else (text, None)


def fit_value(name: str, encoding: str, value: Any, *, read_media: Callable[[Any], bytes]) -> Any:
    """Return the value in the type of its encoding; DataError for a value of another type."""
    if isinstance(value, np.generic):
        value = value.item()
    if encoding.startswith("ndarray:") and isinstance(value, (list, tuple)):
        value = _numbers(name, encoding, value, dtype=encoding.split(":")[1])
    elif encoding in _WRITTEN:
        try:
            number = _WRITTEN[encoding](value)
            if isinstance(value, (int, float)) and number != value == value:
                raise ValueError("it would be rounded")
            return number
        except (ValueError, TypeError, OverflowError, InvalidOperation) as error:
            what = f"column {name!r} holds {str(value)[:80]!r}, which is no {encoding}: correct the row"
            raise DataError(what) from error
    elif encoding in _DTYPES and encoding != "float64" and isinstance(value, (int, float)):
        return _numbers(name, encoding, value, dtype=encoding)[()]
    found = "null" if value is None else _encoding(name, value)
    if encoding == "json" and not found.startswith(("bytes", "ndarray")):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"column {name!r} holds a value that JSON cannot represent ({error}): write it as text"
            ) from error
        return value
    if encoding == "float64" and found == "int" and int(float(value)) == value:
        return float(value)
    if encoding in FILES and found == "bytes":
        return value if isinstance(value, bytes) else read_media(value)
    has_shape = encoding.startswith(f"{found}:") and encoding.rpartition(":")[2] == ",".join(map(str, value.shape))
    if found != encoding and not has_shape:
        as_bytes = (encoding, found) in (("json", "bytes"), ("bytes", "null"))
        no_other = "bytes" in (encoding, found) or found.startswith("ndarray")
        other = _as_bytes(name) if as_bytes else "" if no_other else f"keep it as {name}:json, "
        raise DataError(
            f"column {name!r} holds {found} here and {encoding} in the first rows: write it with one type, "
            f"{other}or leave it out of --keep"
        )
    if encoding == "bytes":
        return value if isinstance(value, bytes) else read_media(value)
    if encoding == "str":
        check_text(name, value)
    return value


def _as_bytes(name: str) -> str:
    return f"keep it as {name}:bytes if all its rows that hold something hold bytes, "


def _numbers(name: str, encoding: str, value: Any, *, dtype: str) -> np.ndarray[Any, Any]:
    """Return a number, or a list in array form.

    DataError for numbers that integers would round, and for finite numbers without a finite value in the type.
    """
    try:
        with np.errstate(all="ignore"):
            given, made = np.asarray(value), np.asarray(value, dtype)
        is_lost = made != given if made.dtype.kind in "iu" else np.isinf(made) & np.isfinite(given)
        if given.dtype.kind in "iuf" and is_lost.any():
            raise ValueError(f"{given[is_lost].flat[0]} would become {made[is_lost].flat[0]}")
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"column {name!r} holds {str(value)[:80]}, which {encoding} cannot hold ({error}): correct the row, or "
            "keep the column in another type"
        ) from error
    return made


def _encoding(name: str, value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise DataError(
                f"column {name!r} holds an array of {value.dtype}, expected one of {', '.join(_DTYPES)}: convert it"
            )
        if value.size == 0 or value.ndim == 0:
            what = f"column {name!r} holds an array of shape {value.shape}, which MDS cannot: leave the row out"
            raise DataError(what)
        return f"ndarray:{value.dtype.name}"
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return "bytes"
    if value is None or isinstance(value, (bool, list, tuple, dict)):
        return "json"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise DataError(f"column {name!r} holds {value}, which has more than 64 bits: write it as text")
    for kind, encoding in _SCALARS.items():
        if isinstance(value, kind):
            return encoding
    raise DataError(f"column {name!r} holds {type(value).__name__}, a type that MDS does not support: write it as text")
