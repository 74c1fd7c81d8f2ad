"""The whole way from the bytes of an image to pixel_values, beside transformers' image processors."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.processors.media.images import decode_image
from lmms_stream.processors.media.pixels import resize, to_patches
from lmms_stream.versions.transformers import by_torchvision
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from tests.versions import by_pillow, limits_on_pixels

from ...strategies import examples
from .test_images import encoded, photograph

LIMITS = 56 * 56, 200 * 200
STD = [0.26862954, 0.26130258, 0.27577711]
LEVEL = 1 / 255 / min(STD)  # what one of 255 levels of a pixel is, normalised
# In levels: Pillow before 13 has another order of its two passes, and the fast processor's weights have 16 bits. Single
# values of a small image that is enlarged differ by up to 10.
CLOSE = {"most": 16.0, "mean": 0.5}


def ours(data: bytes) -> NDArray[np.float32]:
    image = decode_image(data)
    height, width = smart_resize(image.shape[0], image.shape[1], 28, *LIMITS)
    return to_patches(
        resize(image, width=width, height=height)[None], patch_size=14, merge_size=2, temporal_patch_size=2,
        mean=[0.48145466, 0.4578275, 0.40821073], std=STD,
    )  # fmt: skip


def theirs(processor: Any, data: bytes) -> NDArray[np.float32]:
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    return np.asarray(
        processor(image, do_convert_rgb=True, **limits_on_pixels(*LIMITS), return_tensors="pt")["pixel_values"]
    )


def differ_at_most(values: NDArray[np.float32], others: NDArray[np.float32], most: float, mean: float) -> bool:
    levels = np.abs(values - others) / LEVEL
    return bool(levels.max() <= most and levels.mean() <= mean)


@examples(48)
@given(
    size=st.tuples(st.integers(10, 500), st.integers(10, 500)),
    mode=st.sampled_from(["RGB", "L", "CMYK"]),
    orientation=st.integers(1, 8),
)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_pixel_values_are_those_of_transformers(form: str, size: tuple[int, int], mode: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photograph("RGBA" if (mode, form) == ("CMYK", "PNG") else mode, size), form, exif=exif)
    values, expected = ours(data), theirs(by_pillow("Qwen2VLImageProcessor")(), data)
    assert values.shape == expected.shape
    if int(PIL.__version__.split(".")[0]) >= 13:
        assert np.array_equal(values, expected)
    assert differ_at_most(values, expected, **CLOSE)
    assert differ_at_most(values, theirs(by_torchvision("Qwen2VLImageProcessor")(), data), **CLOSE)
