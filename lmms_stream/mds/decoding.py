"""Bytes of MDS shards -> values: column encodings and compressions. Nothing is unpickled or executed.

The formats are MosaicML Streaming's. Texts, numbers, JSON and arrays of any shape are decoded here, images and arrays
of fixed shapes by its own code, which is imported for them.
"""

from __future__ import annotations

import bz2
import json
import struct
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShardError
from ..processors.json_text import parsed

Decoder = Callable[[memoryview, int, int], Any]  # the shard's bytes, the value's first byte and size -> the value

_DTYPES = ["uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"]
_ENCODINGS = {
    "str", "bytes", "int", "json", "ndarray", "pil", "jpeg", "jpeg_array", "jpegarray", "list[jpeg]", "list[png]",
    "png", "str_int", "str_float", "str_decimal", *_DTYPES,
}  # fmt: skip
COMPRESSIONS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}  # ours: pyarrow's name


def check_encoding(encoding: str, *, column: str, source: str) -> None:
    """ShardError for an encoding that is not known, or that runs code to be decoded."""
    if encoding == "pkl":
        raise ShardError(f"{source}: column {column!r} is pickled; unpickling data runs code: refused")
    kind, _, rest = str(encoding).partition(":")
    dtype = rest.partition(":")[0]
    if kind not in _ENCODINGS and kind in _registered_encodings():
        return
    if kind not in _ENCODINGS or (rest and kind not in ("ndarray", "jpeg", "jpeg_array", "jpegarray")):
        raise ShardError(f"{source}: column {column!r} has the encoding {encoding!r}, which MDS does not have: refused")
    if kind == "ndarray" and dtype and dtype not in _DTYPES:
        raise ShardError(f"{source}: column {column!r} holds arrays of {dtype!r}, not of one of {', '.join(_DTYPES)}")


def _registered_encodings() -> set[str]:
    """Encodings that the program registered with MosaicML's package, which it has imported then."""
    encodings = sys.modules.get("streaming.base.format.mds.encodings")
    return set() if encodings is None else encodings.get_mds_encodings() - {"pkl"}


def decoder(encoding: str) -> Decoder:
    """What decodes values of an encoding that check_encoding let pass; ValueError for bytes that do not fit it."""
    if encoding == "str":
        return lambda data, at, size: str(data[at : at + size], "utf-8")
    if encoding == "bytes":
        return lambda data, at, size: bytes(data[at : at + size])
    if encoding == "int":
        return lambda data, at, size: struct.unpack("<q", data[at : at + size])[0]
    if encoding.startswith("ndarray:") and encoding.count(":") == 1:
        return _ndarray(encoding.removeprefix("ndarray:"))
    if encoding in _DTYPES:
        dtype = np.dtype(encoding)
        return lambda data, at, size: np.frombuffer(data[at : at + size], dtype)[0]
    if encoding in _OF_TEXT:
        from_text = _OF_TEXT[encoding]
        return lambda data, at, size: from_text(bytes(data[at : at + size]))
    return lambda data, at, size: _decode_rare(encoding, bytes(data[at : at + size]))


def _json(text: bytes) -> Any:
    """What `json` makes of it, in a part of the time."""
    try:
        return parsed(text)
    except ValueError:  # halves of surrogate pairs and numbers of 309 digits, which `json` reads
        pass
    try:
        return json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("json: it is nested too deeply") from error


def _decimal(text: bytes) -> Decimal:
    try:
        return Decimal(text.decode())
    except InvalidOperation as error:
        raise ValueError(f"str_decimal: {text!r} is no number") from error


_OF_TEXT: dict[str, Callable[[bytes], Any]] = {
    "json": _json,
    "str_int": lambda text: int(text.decode()),
    "str_float": lambda text: float(text.decode()),
    "str_decimal": _decimal,
}


def _decode_rare(encoding: str, data: bytes) -> Any:
    from streaming.base.format.mds.encodings import mds_decode

    try:
        return mds_decode(encoding, data)
    except Exception as error:  # whatever the image library or NumPy raises for damaged bytes
        raise ValueError(f"{encoding}: {error!r}") from error


def _ndarray(dtype: str) -> Decoder:
    """Arrays of any shape: a byte (ndim << 2 | log2 of the shape's width), the shape, the values."""
    item = np.dtype(dtype)

    def decode(data: memoryview, at: int, size: int) -> NDArray[Any]:
        ndim, width = data[at] >> 2, 1 << (data[at] & 3)
        first = at + 1 + ndim * width
        count, rest = divmod(at + size - first, item.itemsize)
        if rest or count < 0:
            raise ValueError(f"an array of {dtype} in {size} bytes")
        values = np.frombuffer(data, item, count, first)
        if ndim == 1:
            if int.from_bytes(data[at + 1 : first], "little") != count:
                raise ValueError(f"an array of {count} values with another shape")
            return values
        return values.reshape([int(n) for n in np.frombuffer(data, f"<u{width}", ndim, at + 1)])

    return decode


def decompress(compression: str, data: bytes, *, size: int) -> bytes:
    """`data` decompressed to exactly `size` bytes; ValueError when it is damaged or holds more or less than that."""
    import pyarrow

    codec = COMPRESSIONS[compression.partition(":")[0]]
    try:
        if codec == "bz2":
            plain = bz2.BZ2Decompressor().decompress(data, max_length=size + 1)
        else:
            plain = pyarrow.Codec(codec).decompress(data, decompressed_size=size, asbytes=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"it does not decompress to {size} bytes ({error})") from error
    if len(plain) != size:
        raise ValueError(f"it decompresses to {len(plain)} bytes instead of {size}")
    return bytes(plain)
