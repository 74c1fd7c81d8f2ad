"""Grey images of more than 8 bits are shown by the range of their values, or refused by name."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from lmms_stream.errors import DataError
from lmms_stream.processors.media.facts import checked_facts
from lmms_stream.processors.media.image_header import fit_image
from lmms_stream.processors.media.images import decode_image
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

RAMP = np.arange(256, dtype=np.uint8).reshape(8, 32)  # all levels from black to white
DEEP = {
    "PNG of 16 bits": ("PNG", RAMP.astype(np.uint16) * 257),
    "TIFF of 16 bits": ("TIFF", RAMP.astype("<u2") * 257),
    "TIFF of 16 bits, the high byte first": ("TIFF", (RAMP.astype(np.uint16) * 257).astype(">u2")),
    "TIFF of 32 bits": ("TIFF", RAMP.astype(np.int32)),
    "TIFF of floats to 1": ("TIFF", RAMP.astype(np.float32) / np.float32(255)),
    "TIFF of floats to 255": ("TIFF", RAMP.astype(np.float32)),
}


def written(form: str, values: NDArray[np.generic], *, orientation: int = 1) -> bytes:
    buffer = BytesIO()
    if form == "TIFF":
        tags = TiffImagePlugin.ImageFileDirectory_v2()
        tags[274] = orientation
        Image.fromarray(values).save(buffer, form, tiffinfo=tags)
    else:
        exif = Image.Exif()
        exif[274] = orientation
        Image.fromarray(values).save(buffer, form, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_deep_grey_images_have_all_levels_from_black_to_white(name: str, orientation: int) -> None:
    form, values = DEEP[name]
    data = written(form, values, orientation=orientation)
    upright = np.rot90(RAMP, {1: 0, 3: 2, 6: -1}[orientation])
    assert np.array_equal(decode_image(data), np.repeat(upright[..., None], 3, -1))
    assert checked_facts(data, "image") == (upright.shape[1], upright.shape[0])
    assert fit_image(data, max_pixels=None) == (data, (upright.shape[1], upright.shape[0]))


@pytest.mark.parametrize("name", DEEP)
def test_a_deep_grey_image_made_smaller_is_shown_as_bright_as_before(name: str) -> None:
    edge = np.repeat(DEEP[name][1][[0, -1]][:, [0, -1]], 16, 0).repeat(16, 1)  # black and white side by side
    data = written(DEEP[name][0], edge)
    stored, _ = fit_image(data, max_pixels=400)
    corners = decode_image(stored)[[0, 0, -1, -1], [0, -1, 0, -1], 0].astype(int)
    assert np.abs(corners - decode_image(data)[[0, 0, -1, -1], [0, -1, 0, -1], 0]).max() <= 4


def test_a_tiff_in_which_zero_is_white_is_inverted() -> None:
    ramp = RAMP.astype(np.uint16) * 257
    data = bytearray(written("TIFF", ramp))
    at = data.find(bytes.fromhex("0601030001000000"))  # the tag PhotometricInterpretation, one short
    data[at + 8] = 0
    assert np.array_equal(decode_image(bytes(data))[..., 0], 255 - RAMP)


def test_a_tiff_of_12_bits_is_scaled_by_12_bits() -> None:
    values = RAMP.astype(np.uint16) * 16
    pairs = values.reshape(8, -1, 2)
    packed = np.stack(
        [pairs[..., 0] >> 4, (pairs[..., 0] & 15) << 4 | pairs[..., 1] >> 8, pairs[..., 1] & 255], -1
    ).astype(np.uint8)
    entries = [(256, 32), (257, 8), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 8), (279, packed.size)]
    directory = b"".join(
        tag.to_bytes(2, "little") + b"\x03\0\x01\0\0\0" + value.to_bytes(4, "little") for tag, value in entries
    )
    start = 8 + packed.size
    header = b"II*\0" + start.to_bytes(4, "little")
    data = header + packed.tobytes() + len(entries).to_bytes(2, "little") + directory + bytes(4)
    assert np.array_equal(decode_image(data)[..., 0], RAMP)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (RAMP.astype(np.float32) * 10, "floats from 0 to 2550"),
        (RAMP.astype(np.float32) - 1, "floats from -1 to 254"),
        (np.where(RAMP == 0, np.nan, RAMP).astype(np.float32), "floats from nan to nan"),
        (RAMP.astype(np.int32) * 257, "whole numbers of 32 bits from 0 to 65535"),
        (RAMP.astype(np.int16) - 5, "whole numbers of 32 bits from -5 to 250"),
    ],
)
def test_values_of_unknown_range_are_refused_at_conversion(values: NDArray[np.generic], said: str) -> None:
    data = written("TIFF", values)
    message = f"grey with {said}, and the value of white is unknown: write it with 8 or 16 bits"
    for read in (
        decode_image,
        lambda each: fit_image(each, max_pixels=None),
        lambda each: checked_facts(each, "image"),
    ):
        with pytest.raises(DataError, match=message):
            read(data)
    with pytest.raises(DataError, match=message):
        fit_image(data, max_pixels=100)
