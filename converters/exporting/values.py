"""Values of columns -> what JSON and Arrow can hold, so that `convert` reads them back. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError
from ...mds.index import ShardInfo
from ..rows.kept_columns import FILES

PREFERENCE_NAMES = ("prompt", "chosen", "rejected", "completion", "label", "tools")  # columns of its rows
_ROW_NAMES = {"messages": ("tools",), "preference": PREFERENCE_NAMES}  # besides stored columns
_NUMBERS = ("int", "str_int", "float16", "float32", "float64", "str_float")
_TEXTS = ("str", "str_decimal")
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def check_columns(info: ShardInfo, *, schema: str) -> None:
    """ConfigError for a column that no file of rows can hold."""
    for name, encoding in info.encodings.items():
        known = {*FILES, *_NUMBERS, *_TEXTS, *_INTEGERS, "bytes", "json"}
        if encoding not in known and not encoding.startswith("ndarray:"):
            raise ConfigError(
                f"column {name!r} has the encoding {encoding!r}, which rows of other formats do not have: convert the "
                "dataset without it, or read it with StreamingDataset"
            )
        if name in _ROW_NAMES.get(schema, ()):
            raise ConfigError(
                f"column {name!r} is called like a column of rows of {schema}, and a row has one of a name: convert "
                "the dataset without it, or read it with StreamingDataset"
            )


def row_in_json(sample: dict[str, Any]) -> dict[str, Any]:
    """The row that a sample of an exported WebDataset holds as JSON; `convert --map` calls it."""
    row: dict[str, Any] = sample["json"]
    return row


def data_url(data: bytes, mime: str = "") -> str:
    """Bytes as text, as media in JSON are."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def json_value(name: str, value: Any) -> Any:
    """A value as JSON has it: bytes as {"bytes": a data URL, "path": null}, arrays as lists.

    DataError for what JSON does not have: numbers that are none, and bytes of length 0, which nothing reads back.
    """
    if isinstance(value, bytes):
        check_bytes(name, value)
        return {"bytes": data_url(value), "path": None}
    plain = plain_value(value)
    if _has_nan(plain):
        raise DataError(f"column {name!r} holds NaN or Infinity, which JSON has not: export to parquet")
    return plain


def check_bytes(name: str, value: bytes) -> None:
    """DataError for bytes of length 0, which are no media."""
    if not value:
        raise DataError(f"column {name!r} holds no bytes, which JSON cannot give back: export to parquet")


def plain_value(value: Any) -> Any:
    """Arrays as lists and numbers of NumPy as Python's; decimals as text."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value if value is None or isinstance(value, (str, bytes, int, float, list, dict)) else str(value)


def _has_nan(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_nan, value))
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    return isinstance(value, float) and not math.isfinite(value)


def arrow_type(encoding: str, pyarrow: Any) -> Any:
    """The type of an Arrow column; None for arrays whose type only their values say."""
    if encoding in ("bytes", *FILES):
        return pyarrow.binary()
    if encoding == "json":
        return pyarrow.json_()
    if encoding in ("int", "str_int"):
        return pyarrow.int64()
    if encoding in ("float64", "str_float"):
        return pyarrow.float64()
    if encoding in _TEXTS:
        return pyarrow.string()
    return None if encoding.startswith("ndarray") else pyarrow.from_numpy_dtype(np.dtype(encoding))
