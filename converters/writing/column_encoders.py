"""Values -> bytes of MDS columns; the same formats as mds/decoding.py reads."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...extras import need
from ...mds.decoding import DTYPE_CODES, array_layout, registered_encodings

Encode = Callable[[Any], bytes]


def column_encoder(encoding: str) -> Encode:
    """What encodes the values of a column; it raises ValueError or TypeError for a value of another type.

    ConfigError for an encoding that is unknown, or that runs code to be decoded.
    """
    if encoding in _ENCODERS:
        return _ENCODERS[encoding]
    if encoding in DTYPE_CODES:
        return partial(_encode_number, np.dtype(encoding))
    if encoding.partition(":")[0] == "ndarray":
        return _array_encoder(encoding)
    if encoding not in registered_encodings():
        raise ConfigError(f"{encoding!r} is not an encoding of MDS columns that is safe to read")
    from streaming.base.format.mds.encodings import mds_encode

    return partial(mds_encode, encoding)


def fixed_size(encoding: str) -> int | None:
    """Bytes of each value of a column; None where they differ. encoding: of those that column_encoder takes."""
    if encoding == "int":
        return 8
    if encoding in DTYPE_CODES:
        return np.dtype(encoding).itemsize
    if encoding.partition(":")[0] == "ndarray":
        dtype, shape = array_layout(encoding)
        return None if shape is None else math.prod(shape) * np.dtype(dtype).itemsize
    if encoding in _ENCODERS:
        return None
    from streaming.base.format.mds.encodings import get_mds_encoded_size

    size: int | None = get_mds_encoded_size(encoding)
    return size


def _encode_str(value: str) -> bytes:
    return value.encode("utf-8")


def _encode_bytes(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes, found {type(value).__name__}")
    return value


def _of_type(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _encode_number(dtype: np.dtype[Any], value: Any) -> bytes:
    if isinstance(value, bytes):
        raise TypeError("expected a number, found bytes")  # NumPy would read them as text
    number = dtype.type(value)
    data: bytes = number.tobytes()
    if len(data) != dtype.itemsize:
        raise ValueError(f"expected one number, found {len(data) // dtype.itemsize}")
    held = number.item()
    is_rounded = dtype.kind == "f" and math.isfinite(held)
    if not (is_rounded or held == value or (held != held and value != value) or isinstance(value, str)):
        raise ValueError(f"{dtype} would hold {held}")  # NumPy takes numbers modulo, or their whole part
    return data


def _encode_json(value: Any) -> bytes:
    try:
        return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


# Arrays


def _array_encoder(encoding: str) -> Encode:
    try:
        dtype, shape = array_layout(encoding)
    except ValueError as error:
        raise ConfigError(f"{encoding!r} is not an encoding of MDS columns: it is of {error}") from error
    if dtype is None:
        return _encode_array
    item = np.dtype(dtype)

    def encode(values: NDArray[Any]) -> bytes:
        if values.dtype != item or not values.size or not values.ndim:
            raise ValueError(f"expected some {item} values, found {values.dtype} of shape {values.shape}")
        return array_head(values.shape) + values.tobytes()

    def encode_shape(values: NDArray[Any]) -> bytes:
        if values.dtype != item or values.shape != shape:
            raise ValueError(f"expected {item} of shape {shape}, found {values.dtype} of shape {values.shape}")
        return bytes(values.tobytes())

    return encode if shape is None else encode_shape


def _encode_array(values: NDArray[Any]) -> bytes:
    name = values.dtype.name
    if name not in DTYPE_CODES:
        raise ValueError(f"expected values of one of {', '.join(DTYPE_CODES)}, found {name}")
    return bytes([DTYPE_CODES[name]]) + _array_encoder(f"ndarray:{name}")(values)


def array_head(shape: tuple[int, ...]) -> bytes:
    """What comes before the values of an array in a column; see decoding.py for what the first byte says."""
    largest = max(shape)
    width = 0 if largest < 1 << 8 else 1 if largest < 1 << 16 else 2
    return struct.pack(f"<B{len(shape)}{'BHI'[width]}", len(shape) << 2 | width, *shape)


encode_int32 = _array_encoder("ndarray:int32")  # like MDSWriter's, an array has values


# Images, which are Pillow's, or bytes: those are stored as their files are


def _encode_file(form: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    need("PIL", by="images")
    from PIL import Image, JpegImagePlugin

    image = _of_type(Image.Image, value)
    path = getattr(image, "filename", "")
    if form == "JPEG" and isinstance(image, JpegImagePlugin.JpegImageFile) and path and _is_image_of(path, image):
        return Path(path).read_bytes()  # as it is: to encode it again would lose quality
    file = BytesIO()
    try:
        image.save(file, format=form)
    except OSError as error:  # of a mode that the format does not have
        raise ValueError(str(error)) from error
    return file.getvalue()


def _is_image_of(path: str, image: Any) -> bool:
    """Whether an image that was opened is still that of its file: a program may have changed its pixels."""
    from PIL import Image

    try:
        with Image.open(path) as stored:
            is_alike = (stored.mode, stored.size) == (image.mode, image.size)
            is_loaded = not image.tile
            return is_alike and not (is_loaded and stored.tobytes() != image.tobytes())
    except OSError:
        return False


def _encode_pixels(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    need("PIL", by="images")
    from PIL import Image

    image = _of_type(Image.Image, value)
    mode = image.mode.encode()
    return b"".join((struct.pack("<3I", *image.size, len(mode)), mode, image.tobytes()))


def _encode_several(images: Any) -> bytes:
    if isinstance(images, bytes) or not len(images):
        raise ValueError("expected a list of some images, each the bytes of its file")
    return struct.pack(f"<{1 + len(images)}I", len(images), *map(len, images)) + b"".join(map(bytes, images))


def _encode_list(encode: Encode, images: Sequence[Any]) -> bytes:
    files = [encode(image) for image in _of_type(list, images)]
    return struct.pack(f"<{2 + len(files)}I", 0, len(files), *map(len, files)) + b"".join(files)


_encode_jpeg, _encode_png = partial(_encode_file, "JPEG"), partial(_encode_file, "PNG")
_ENCODERS: dict[str, Encode] = {
    "str": _encode_str,
    "bytes": _encode_bytes,
    "int": struct.Struct("<q").pack,
    "json": _encode_json,
    "str_int": lambda value: b"%d" % _of_type(int, value),
    "str_float": lambda value: str(_of_type(float, value)).encode(),
    "str_decimal": lambda value: str(_of_type(Decimal, value)).encode(),
    "jpeg": _encode_jpeg,
    "png": _encode_png,
    "pil": _encode_pixels,
    "jpeg_array": _encode_several,
    "jpegarray": _encode_several,
    "list[jpeg]": partial(_encode_list, _encode_jpeg),
    "list[png]": partial(_encode_list, _encode_png),
    "list[pil]": partial(_encode_list, _encode_pixels),
}
