"""Bytes of MDS shards -> values: column encodings and compressions. Nothing is unpickled or executed.

The formats are MosaicML Streaming's. Its package is used only for encodings that a program registered with it.
"""

from __future__ import annotations

import bz2
import json
import math
import struct
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import partial
from io import BytesIO
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShardError
from ..extras import need
from ..processors.json_text import check_digits, number, parsed

if TYPE_CHECKING:
    from PIL.Image import Image

Decoder = Callable[[memoryview, int, int], Any]  # the shard's bytes, the value's first byte and size -> the value

DTYPE_CODES = {
    "uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33, "float32": 34,
    "uint64": 64, "int64": 65, "float64": 66,
}  # fmt: skip
_DTYPES = {code: np.dtype(name) for name, code in DTYPE_CODES.items()}
_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")  # first bytes of images that are programs; Pillow would run them
COMPRESSIONS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}  # ours: pyarrow's name


def check_encoding(encoding: str, *, column: str, source: str) -> None:
    """Raise ShardError for an unknown encoding, or an encoding that executes code."""
    if encoding == "pkl":
        raise ShardError(
            f"{source}: column {column!r} is pickled, and unpickling can run code: write it in another encoding"
        )
    kind, _, rest = str(encoding).partition(":")
    if is_registered(kind):
        return
    if kind not in _KINDS or (rest and kind not in ("ndarray", "jpeg", "jpeg_array", "jpegarray")):
        raise ShardError(f"{source}: column {column!r} has the encoding {encoding!r}, which MDS does not have: refused")
    if kind == "ndarray":
        try:
            array_layout(encoding)
        except ValueError as error:
            raise ShardError(f"{source}: column {column!r} holds {error}") from error


def registered_encodings() -> set[str]:
    """Return the encodings registered with MosaicML's package by the program; an empty set without the package."""
    encodings = sys.modules.get("streaming.base.format.mds.encodings")
    return set() if encodings is None else encodings.get_mds_encodings() - {"pkl"}


def is_registered(encoding: str) -> bool:
    """Return whether an encoding is unknown to MDS and registered by the program."""
    kind = encoding.partition(":")[0]
    return kind not in _KINDS and kind in registered_encodings()


def array_layout(encoding: str) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the type and the shape of all arrays of a column; None if each array has its own.

    ValueError for a type or a shape unknown to MDS.

    >>> array_layout("ndarray:int16:2,3")
    ('int16', (2, 3))
    """
    dtype, separator, axes = encoding.removeprefix("ndarray").removeprefix(":").partition(":")
    if not dtype and not separator:
        return None, None
    if dtype not in DTYPE_CODES:
        raise ValueError(f"arrays of {dtype!r}, not of one of {', '.join(DTYPE_CODES)}")
    if not separator:
        return dtype, None
    shape = [int(axis) if axis.isdecimal() else 0 for axis in axes.split(",")]
    if 0 in shape:
        raise ValueError(f"arrays of the shape {axes!r}, expected numbers from 1 up with commas between them")
    return dtype, tuple(shape)


def decoder(encoding: str) -> Decoder:
    """Return the decoder of an encoding accepted by check_encoding; the decoder raises ValueError for wrong bytes."""
    if encoding == "str":
        return lambda data, at, size: str(data[at : at + size], "utf-8")
    if encoding == "bytes":
        return lambda data, at, size: bytes(data[at : at + size])
    if encoding == "int":
        return _decode_int
    if encoding in DTYPE_CODES:
        return _number(np.dtype(encoding))
    kind = encoding.partition(":")[0]
    if kind == "ndarray":
        dtype, shape = array_layout(encoding)
        return _decode_array if dtype is None else _array(np.dtype(dtype), shape)
    from_bytes = _OF_BYTES.get(kind) or partial(_checked, _OF_IMAGES.get(kind) or _registered(encoding), encoding)
    return lambda data, at, size: from_bytes(bytes(data[at : at + size]))


def _decode_int(data: memoryview, at: int, size: int) -> int:
    if size != 8:
        raise ValueError(f"a number of 8 bytes in {size}")
    return int(_INT64(data, at)[0])


_INT64 = struct.Struct("<q").unpack_from


def _number(dtype: np.dtype[Any]) -> Decoder:
    def decode(data: memoryview, at: int, size: int) -> Any:
        if size != dtype.itemsize:
            raise ValueError(f"a number of {dtype.itemsize} bytes in {size}")
        return np.frombuffer(data, dtype, 1, at)[0]

    return decode


# Texts


def _json(text: bytes) -> Any:
    """Parse a text with the same result as `json`, but faster."""
    try:
        try:
            return parsed(text)
        except ValueError:  # `json` reads halves of surrogate pairs and numbers of 309 digits
            return json.loads(text.decode(), parse_float=number)
    except RecursionError as error:
        raise ValueError("json: it is nested too deeply") from error


def _decimal(text: bytes) -> Decimal:
    try:
        check_digits(text)
        return Decimal(text.decode())
    except InvalidOperation as error:
        raise ValueError(f"str_decimal: {text!r} is no number") from error


_OF_BYTES: dict[str, Callable[[bytes], Any]] = {
    "json": _json,
    "str_int": lambda text: int(text.decode()),
    "str_float": lambda text: number(text.decode()),
    "str_decimal": _decimal,
}

# Images; pixels are decoded when a program reads them


def _image_of_file(data: bytes) -> Image:
    need("PIL", by="images")
    from PIL import Image

    if data.startswith(_POSTSCRIPT):
        raise ValueError("it is PostScript, which is a program and is not run")
    return Image.open(BytesIO(data))


def _image_of_pixels(data: bytes) -> Image:
    """Read width, height and the length of the mode's name, in 32 bits each; the name; the pixels."""
    need("PIL", by="images")
    from PIL import Image

    width, height, num_letters = struct.unpack_from("<3I", data)
    mode, pixels = data[12 : 12 + num_letters].decode(), data[12 + num_letters :]
    if max(width, height, width * height) > 8 * len(pixels):  # before memory is allocated
        raise ValueError(f"{width} x {height} pixels in {len(pixels)} bytes")
    return Image.frombytes(mode, (width, height), pixels)


def _several(data: bytes, image_of: Callable[[bytes], Image], *, at: int = 0) -> list[Image]:
    """Read the number of images and their sizes, in 32 bits each; the images."""
    count = int.from_bytes(data[at : at + 4], "little")
    first = at + 4 + 4 * count
    if first > len(data):
        raise ValueError(f"{count} images in {len(data)} bytes")
    stops = list(accumulate(np.frombuffer(data, "<u4", count, at + 4).tolist(), initial=first))
    if stops[-1] > len(data):
        raise ValueError(f"images up to byte {stops[-1]} of {len(data)}")
    return [image_of(data[start:stop]) for start, stop in pairwise(stops)]


def _listed(image_of: Callable[[bytes], Image]) -> Callable[[bytes], Any]:
    """Return a decoder of images after four bytes to skip."""
    return partial(_several, image_of=image_of, at=4)


_OF_IMAGES: dict[str, Callable[[bytes], Any]] = {
    "jpeg": _image_of_file,
    "png": _image_of_file,
    "pil": _image_of_pixels,
    "jpeg_array": partial(_several, image_of=_image_of_file),
    "jpegarray": partial(_several, image_of=_image_of_file),
    "list[jpeg]": _listed(_image_of_file),
    "list[png]": _listed(_image_of_file),
    "list[pil]": _listed(_image_of_pixels),
}
IMAGES = frozenset(_OF_IMAGES)  # encodings of images and lists of them


def _checked(from_bytes: Callable[[bytes], Any], encoding: str, data: bytes) -> Any:
    try:
        return from_bytes(data)
    except Exception as error:  # any error of the image library, or of a program's own encoding, for damaged bytes
        raise ValueError(f"{encoding}: {error!r}") from error


def _registered(encoding: str) -> Callable[[bytes], Any]:
    from streaming.base.format.mds.encodings import mds_decode

    return partial(mds_decode, encoding)


# Arrays


def _array(item: np.dtype[Any], shape: tuple[int, ...] | None) -> Decoder:
    if shape is None:
        return _array_of_any_shape(item)

    def decode(data: memoryview, at: int, size: int) -> NDArray[Any]:
        if size != count * item.itemsize:
            raise ValueError(f"an array of {item} of shape {shape} in {size} bytes")
        return np.frombuffer(data, item, count, at).reshape(shape)

    count = math.prod(shape)
    return decode


def _array_of_any_shape(item: np.dtype[Any]) -> Decoder:
    """Read a byte (number of axes << 2 | log2 of the shape's width), the shape, the values."""

    def decode(data: memoryview, at: int, size: int) -> NDArray[Any]:
        if not size:
            raise ValueError("an array in 0 bytes")
        ndim, width = data[at] >> 2, 1 << (data[at] & 3)
        first = at + 1 + ndim * width
        count, rest = divmod(at + size - first, item.itemsize)
        if rest or count < 0:
            raise ValueError(f"an array of {item} in {size} bytes")
        values = np.frombuffer(data, item, count, first)
        if ndim == 1:
            if int.from_bytes(data[at + 1 : first], "little") != count:
                raise ValueError(f"an array of {count} values with another shape")
            return values
        shape = np.frombuffer(data, f"<u{width}", ndim, at + 1).tolist()
        if not count or math.prod(shape) != count:
            raise ValueError(f"an array of {count} values with another shape")
        return values.reshape(shape)

    return decode


_OF_ANY_SHAPE = {code: _array_of_any_shape(item) for code, item in _DTYPES.items()}


def _decode_array(data: memoryview, at: int, size: int) -> NDArray[Any]:
    """Read a byte for the type of the values, and an array of any shape."""
    decode = _OF_ANY_SHAPE.get(data[at]) if size else None
    if decode is None:
        raise ValueError("an array of no known type")
    values: NDArray[Any] = decode(data, at + 1, size - 1)
    return values


_KINDS = {"str", "bytes", "int", "ndarray", *DTYPE_CODES, *_OF_BYTES, *_OF_IMAGES}


def decompress(compression: str, data: bytes, *, size: int) -> bytes:
    """Decompress `data` to exactly `size` bytes; ValueError for damaged data, or another size."""
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
