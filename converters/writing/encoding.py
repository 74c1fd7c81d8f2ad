"""Samples -> bytes of MDS shards, byte for byte as written by MosaicML's MDSWriter."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError, LmmsStreamError
from ...extras import need
from ...mds.decoding import COMPRESSIONS as CODECS
from ...mds.decoding import DTYPE_CODES, array_layout, decoder, registered_encodings
from ...types import Sample

MAX_SAMPLE_BYTES = (1 << 31) - 1  # MDS counts a shard's bytes in 32 bits
MAX_SHARD_BYTES = (1 << 32) - 1
HASH = "xxh3_64"
_NOT_OF_COLUMN = TypeError, ValueError, AttributeError, OverflowError, struct.error  # of encoders
_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
COMPRESSIONS = {*_LEVELS, *(f"{kind}:{level}" for kind, levels in _LEVELS.items() for level in levels)}  # MosaicML's


class ShardFormat:
    """Columns of a dataset, and the headers of its shards and index.

    columns: name -> MDS encoding. shard_bytes: maximum before compression, unless a single sample is larger; None if
    the index has no limit. compression: in MDSWriter's notation ("zstd", "zstd:7", …), or None. hashes: kinds of
    checksums.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        *,
        shard_bytes: int | None,
        compression: str | None = None,
        hashes: Sequence[str] = (HASH,),
    ):
        self.columns = dict(columns)
        self.shard_bytes = MAX_SHARD_BYTES if shard_bytes is None else shard_bytes
        self.compression = compression
        self.hashes = hashes
        self._size_limit = shard_bytes
        self.names = sorted(columns)
        self._encoders = [column_encoder(columns[name]) for name in self.names]
        self._sizes = [fixed_size(columns[name]) for name in self.names]
        self._varies = [size is None for size in self._sizes]
        self._head = struct.Struct(f"<{sum(self._varies)}I")  # of a sample: bytes of the columns of no fixed size
        self.header = json.dumps(self.config, sort_keys=True).encode()

    def __reduce__(self) -> tuple[Callable[[], ShardFormat], tuple[()]]:
        settings: dict[str, Any] = {"compression": self.compression, "hashes": self.hashes}
        return partial(ShardFormat, self.columns, shard_bytes=self._size_limit, **settings), ()

    @property
    def config(self) -> dict[str, Any]:
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(self.hashes),
            "size_limit": self._size_limit,
            "column_names": self.names,
            "column_encodings": [self.columns[name] for name in self.names],
            "column_sizes": self._sizes,
        }

    def encode(self, sample: Sample) -> bytes:
        """Return a sample's bytes; DataError for values of other types than the columns', and for 2 GiB or more.

        Bytes for any column are an already encoded value, as in MDSWriter.
        """
        try:
            data = [*map(operator.call, self._encoders, map(sample.__getitem__, self.names))]
        except LmmsStreamError:
            raise
        except _NOT_OF_COLUMN:
            data = [*map(self._encoded, self.names, self._encoders, map(sample.__getitem__, self.names))]
        sizes = [*map(len, data)]
        if sum(sizes) > MAX_SAMPLE_BYTES:
            raise DataError(f"the sample has {sum(sizes)} bytes, a shard holds at most {MAX_SAMPLE_BYTES}: split it")
        return b"".join([self._head.pack(*itertools.compress(sizes, self._varies)), *data])

    def _encoded(self, name: str, encode: Encode, value: Any) -> bytes:
        """Return the bytes of a column's value; bytes that the column's encoding decodes stay as they are."""
        try:
            return encode(value)
        except LmmsStreamError:
            raise
        except _NOT_OF_COLUMN as failure:
            error: Exception = failure
        try:
            if isinstance(value, bytes):
                decoder(self.columns[name])(memoryview(value), 0, len(value))
                return value
        except ValueError as damage:
            error = damage
        raise DataError(
            f"column {name!r} holds {str(value)[:80]!r}, which is not {self.columns[name]!r} ({error})"
        ) from error

    def shard_head(self, sizes: NDArray[np.int64]) -> bytes:
        """Return the bytes before the samples of a shard. sizes: bytes of the samples, int64[num_samples]."""
        first = 4 + 4 * (len(sizes) + 1) + len(self.header)
        offsets = first + np.concatenate([[0], np.cumsum(sizes)])
        return np.uint32(len(sizes)).tobytes() + offsets.astype("<u4").tobytes() + self.header

    @property
    def empty_bytes(self) -> int:
        """Bytes of a shard without samples; each sample takes 4 more than its size."""
        return 8 + len(self.header)

    def index_entry(self, num_samples: int, raw: Mapping[str, Any], zipped: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a shard's entry in index.json. raw, zipped: basename, bytes, hashes of the plain and compressed
        file.
        """
        return {"samples": num_samples, "raw_data": dict(raw), "zip_data": zipped and dict(zipped), **self.config}


def index_json(entries: Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps({"version": 2, "shards": list(entries)}, sort_keys=True).encode()


def compress(compression: str, data: bytes) -> bytes:
    """Return a compressed shard, as in MDSWriter; above 8 MiB, MDSWriter's zstd may cut the frame at other bytes."""
    kind, _, level = compression.partition(":")
    if kind == "gz":
        return gzip.compress(data, int(level or 9))
    if kind == "bz2":
        return bz2.compress(data, int(level or 9))
    import pyarrow

    chosen = {"br": int(level or 11), "zstd": int(level or 3)}.get(kind)
    return bytes(pyarrow.Codec(CODECS[kind], compression_level=chosen).compress(data, asbytes=True))


def check_compression(compression: str | None) -> None:
    """Raise ConfigError for a compression that MDS does not have."""
    if compression is not None and compression not in COMPRESSIONS:
        known = ", ".join(sorted(_LEVELS))
        raise ConfigError(f"the compression {compression!r} is not one of {known} (with a level: zstd:7)")


def compression_extension(compression: str) -> str:
    return compression.partition(":")[0]


# Values -> bytes of MDS columns, in the formats that mds/decoding.py reads.

Encode = Callable[[Any], bytes]


def column_encoder(encoding: str) -> Encode:
    """Return the encoder of a column's values; the encoder raises ValueError or TypeError for a value of another type.

    ConfigError for an unknown encoding, and for an encoding that runs code to decode.
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
    """Bytes of each value of a column; None if sizes differ. encoding: an encoding of column_encoder."""
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
        raise TypeError("expected a number, found bytes")  # NumPy would parse bytes like text
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
    """Return the bytes before an array's values in a column; decoding.py explains the first byte."""
    largest = max(shape)
    width = 0 if largest < 1 << 8 else 1 if largest < 1 << 16 else 2
    return struct.pack(f"<B{len(shape)}{'BHI'[width]}", len(shape) << 2 | width, *shape)


encode_int32 = _array_encoder("ndarray:int32")  # like MDSWriter's, an array has values


# Images: Pillow's, or the bytes of an image file, which are stored unchanged


def _encode_file(form: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    need("PIL", by="images")
    from PIL import Image, JpegImagePlugin

    image = _of_type(Image.Image, value)
    path = getattr(image, "filename", "")
    if form == "JPEG" and isinstance(image, JpegImagePlugin.JpegImageFile) and path and _is_image_of(path, image):
        return Path(path).read_bytes()  # unchanged: encoding again would lose quality
    file = BytesIO()
    try:
        image.save(file, format=form)
    except OSError as error:  # mode not supported by the format
        raise ValueError(str(error)) from error
    return file.getvalue()


def _is_image_of(path: str, image: Any) -> bool:
    """Return whether an opened image still equals its file: a program may have changed the pixels."""
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
    "str": str.encode,
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
