"""Encodings of columns: ours beside those of MosaicML's package, where it is installed."""

from __future__ import annotations

import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.writing.encoding import column_encoder, fixed_size
from lmms_stream.errors import ConfigError, ShardError
from lmms_stream.mds.decoding import DTYPE_CODES, check_encoding, decoder
from PIL import Image

from ..strategies import examples

FLOATS = st.floats(width=16, allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def images(draw: st.DrawFn, modes: tuple[str, ...] = ("RGB", "L")) -> Image.Image:
    mode, size = draw(st.sampled_from(modes)), (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    return Image.fromarray(np.arange(3 * size[0] * size[1], dtype=np.uint8).reshape(*size, 3)).convert(mode)


def file_of(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, format="JPEG")
    return file.getvalue()


@st.composite
def arrays(draw: st.DrawFn, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Any:
    dtype = dtype or draw(st.sampled_from(list(DTYPE_CODES)))
    shape = shape or draw(st.sampled_from([(1,), (3,), (255,), (256,), (2, 3), (1, 2, 1, 2), (70000,)]))
    return (np.arange(np.prod(shape)) % 100).astype(dtype).reshape(shape)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(),
    "bytes": st.binary(),
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "str_int": st.integers(),
    "str_float": st.floats(allow_nan=False),
    "str_decimal": st.decimals(allow_nan=False),
    "json": JSON | arrays(),
    "ndarray": arrays(),
    "pil": images(("RGB", "L", "1", "P", "RGBA", "CMYK", "I;16")),
    "jpeg": images() | images().map(file_of),
    "png": images(("RGB", "L", "1", "P", "RGBA")),
    "jpeg_array": st.lists(images().map(file_of), min_size=1, max_size=3),
    "jpegarray": st.lists(images().map(file_of), min_size=1, max_size=3),
    "list[jpeg]": st.lists(images(), max_size=3),
    "list[png]": st.lists(images(), max_size=3),
    "list[pil]": st.lists(images(), max_size=3),
    **{name: FLOATS if "float" in name else st.integers(0, 127) for name in DTYPE_CODES},
    **{f"ndarray:{name}": arrays(name) for name in DTYPE_CODES},
    **{f"ndarray:{name}:2,3": arrays(name, (2, 3)) for name in DTYPE_CODES},
}


def alike(value: Any) -> Any:
    """A value so that equal ones compare equal: with its type, and images and arrays by their content."""
    if isinstance(value, list):
        return [alike(each) for each in value]
    if isinstance(value, Image.Image):
        return type(value), value.mode, value.size, value.tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return type(value), repr(value)


def decoded(encoding: str, data: bytes) -> Any:
    """The value in the middle of other bytes, as it lies in a shard."""
    return decoder(encoding)(memoryview(b"before" + data + b"behind"), len(b"before"), len(data))


@pytest.mark.parametrize("encoding", VALUES)
@examples(25)
@given(data=st.data())
def test_values_are_encoded_and_decoded_as_mosaicmls_package_does_it(encoding: str, data: st.DataObject) -> None:
    mosaic = pytest.importorskip("streaming.base.format.mds.encodings")
    value = data.draw(VALUES[encoding])
    check_encoding(encoding, column="value", source="index.json")
    made = column_encoder(encoding)(value)
    assert made == mosaic.mds_encode(encoding, value)
    assert alike(decoded(encoding, made)) == alike(mosaic.mds_decode(encoding, made))
    assert fixed_size(encoding) == mosaic.get_mds_encoded_size(encoding)
    assert fixed_size(encoding) in (None, len(made))


def test_all_encodings_of_mosaicmls_package_but_pickles_are_ours() -> None:
    mosaic = pytest.importorskip("streaming.base.format.mds.encodings")
    assert mosaic.get_mds_encodings() - {"pkl"} == {encoding for encoding in VALUES if ":" not in encoding}


@pytest.mark.parametrize("encoding", [*VALUES, "jpeg:90"])
@examples(60)
@given(data=st.data())
def test_damaged_bytes_are_a_value_error_or_a_value(encoding: str, data: st.DataObject) -> None:
    kind = encoding.partition(":90")[0]
    whole = column_encoder(kind)(data.draw(VALUES[kind]))
    first, stop = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    damaged = data.draw(
        st.binary(max_size=40) | st.just(whole[first:stop]) | st.binary(max_size=9).map(whole[:first].__add__)
        | st.binary(max_size=5).map(lambda put: whole[:first] + put + whole[first + len(put) :])
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of sizes that are damaged
        with suppress(ValueError):
            decoded(encoding, damaged)


def test_an_array_that_says_how_large_it_is_takes_no_memory_for_it() -> None:
    for head in (b"\x0b" + b"\xff" * 16, b"\x08\x00\x00", b"\x00", b"\xff" * 40):
        with pytest.raises(ValueError, match="an array"):
            decoded("ndarray:uint8", head + b"values")
    with pytest.raises(ValueError, match=r"4294967295 x 65536 pixels in 3 bytes"):
        decoded("pil", b"\xff\xff\xff\xff" + b"\0\0\1\0" + b"\3\0\0\0" + b"RGB" + b"abc")


def test_an_image_that_is_a_program_is_not_opened() -> None:
    with pytest.raises(ValueError, match="it is PostScript, which is a program and is not run"):
        decoded("jpeg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


def test_an_image_of_a_jpeg_file_is_stored_as_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    Image.new("RGB", (8, 8), "red").save(path, quality=30)
    for encoding in ("jpeg", "list[jpeg]"):
        with Image.open(path) as image:
            assert path.read_bytes() in column_encoder(encoding)(image if encoding == "jpeg" else [image])
            image.load()
            assert path.read_bytes() in column_encoder(encoding)(image if encoding == "jpeg" else [image])


def test_an_image_of_a_jpeg_file_that_was_changed_is_stored_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    Image.new("RGB", (8, 6), "red").save(path, quality=100)

    def smaller(image: Image.Image) -> None:
        image.thumbnail((4, 3))

    def blue(image: Image.Image) -> None:
        image.paste((0, 0, 255), (0, 0, 8, 6))

    def gone(image: Image.Image) -> None:
        image.load()
        path.write_bytes(b"")

    for change in (smaller, blue, gone):
        with Image.open(path) as image:
            change(image)
            assert np.abs(np.array(decoded("jpeg", column_encoder("jpeg")(image)), int) - np.array(image)).max() < 9


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("ndarray:object", "holds arrays of 'object', not of one of uint8"),
        ("ndarray::2", "holds arrays of '', not of one of uint8"),
        ("ndarray:int8:0,2", "holds arrays of the shape '0,2', expected numbers from 1 up with commas between"),
        ("ndarray:int8:2:3", "holds arrays of the shape '2:3'"),
        ("ndarray:int8:", "holds arrays of the shape ''"),
        ("str:2", "has the encoding 'str:2', which MDS does not have"),
    ],
)
def test_encodings_that_mds_does_not_have_are_named(encoding: str, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        check_encoding(encoding, column="value", source="index.json")
    with pytest.raises(ConfigError, match="is not an encoding of MDS columns"):
        column_encoder(encoding)


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("int8", 300), ("int8", [1, 2]), ("int8", "x"), ("int32", None), ("json", {1, 2}), ("str_int", 1.5),
        ("str_float", 1), ("str_decimal", 1.5), ("ndarray", [1]), ("ndarray", np.array(1)),
        ("ndarray", np.array(["x"])), ("ndarray:int8", np.zeros(0, np.int8)), ("ndarray:int16", np.zeros(2, ">i2")),
        ("ndarray:int8", np.zeros(2)), ("ndarray:int8:2", np.zeros(3, np.int8)), ("jpeg", "x"), ("pil", 7),
        ("png", None), ("list[jpeg]", b""), ("list[png]", [3]), ("jpeg_array", []), ("jpeg_array", b"x"),
        ("jpeg_array", 7), ("bytes", "x"), ("str", b"x"), ("uint8", np.int64(300)), ("uint32", np.int32(-1)),
        ("int32", np.array(1 << 31)), ("int32", 3.7), ("float32", np.float64(1e300)), ("float16", 1e6),
        ("float32", None), ("float64", b"12345678"), ("jpeg", Image.new("RGBA", (2, 2))),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow")
def test_values_of_another_type_are_not_encoded(encoding: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, OverflowError)):
        column_encoder(encoding)(value)
