"""Pixels of another size: bit for bit Pillow's."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.processors.media.resize import Filter, resize
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from ...rounds import in_long_rounds
from ...strategies import examples
from ...versions import IS_5

sides = st.integers(1, 90)


def noise(height: int, width: int, *, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def by_pillow(image: NDArray[np.uint8], width: int, height: int, *, filter: str = "bicubic") -> NDArray[np.uint8]:
    """One call of Pillow; before version 13 each side by itself, in the order in which version 13 takes them."""
    whole, resampling = Image.fromarray(image), Image.Resampling[filter.upper()]
    if int(PIL.__version__.split(".")[0]) >= 13:
        return np.asarray(whole.resize((width, height), resampling))
    is_height_first = whole.height - height > max(0, 2 * (whole.width - width))
    between = (whole.width, height) if is_height_first else (width, whole.height)
    return np.asarray(whole.resize(between, resampling).resize((width, height), resampling))


@examples(300)
@given(old=st.tuples(sides, sides), new=st.tuples(sides, sides), seed=st.integers(0, 9))
def test_every_size_has_the_bits_of_pillows_bicubic_filter(
    old: tuple[int, int], new: tuple[int, int], seed: int
) -> None:
    image = noise(*old, seed=seed)
    assert np.array_equal(resize(image, width=new[0], height=new[1]), by_pillow(image, *new))


@examples(100)
@given(
    old=st.tuples(sides, sides), new=st.tuples(sides, sides), filter=st.sampled_from(("bilinear", "lanczos")),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_every_size_has_the_bits_of_pillows_other_filters(
    old: tuple[int, int], new: tuple[int, int], filter: Filter, seed: int
) -> None:
    image = noise(*old, seed=seed)
    assert np.array_equal(
        resize(image, width=new[0], height=new[1], filter=filter), by_pillow(image, *new, filter=filter)
    )


@pytest.mark.parametrize("filter", ["bilinear", "lanczos"])
def test_large_images_have_the_bits_of_pillows_other_filters(filter: Filter) -> None:
    for old, new in (((960, 1040), (896, 896)), ((300, 200), (1400, 2100)), ((2000, 30), (28, 56))):
        image = noise(*old)
        assert np.array_equal(
            resize(image, width=new[0], height=new[1], filter=filter), by_pillow(image, *new, filter=filter)
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((960, 1040), (1036, 952)), ((960, 1040), (518, 476)), ((720, 1280), (140, 84)), ((300, 200), (1400, 2100)),
        ((2000, 30), (28, 56)), ((30, 2000), (56, 28)), ((65, 65), (64, 64)), ((16, 6), (7, 17)),
    ],
)  # fmt: skip
def test_large_and_narrow_images_have_the_bits_of_pillow(old: tuple[int, int], new: tuple[int, int]) -> None:
    image = noise(*old)
    assert np.array_equal(resize(image, width=new[0], height=new[1]), by_pillow(image, *new))


def test_black_and_white_edges_are_cut_at_0_and_255_as_pillow_does() -> None:
    image = np.where(noise(64, 80) > 127, np.uint8(255), np.uint8(0))
    for size in ((81, 65), (300, 17), (33, 200)):
        assert np.array_equal(resize(image, width=size[0], height=size[1]), by_pillow(image, *size))


def test_frames_are_resized_one_by_one() -> None:
    frames = np.stack([noise(40, 50, seed=seed) for seed in range(5)])
    resized = resize(frames, width=28, height=56)
    assert resized.shape == (5, 56, 28, 3)
    for frame, expected in zip(resized, frames, strict=True):
        assert np.array_equal(frame, by_pillow(expected, 28, 56))


def test_views_and_read_only_pixels_are_resized_too() -> None:
    image = noise(50, 60)
    image.flags.writeable = False
    turned = np.rot90(image)
    assert np.array_equal(resize(image, width=20, height=30), by_pillow(image, 20, 30))
    assert np.array_equal(resize(turned, width=20, height=30), by_pillow(np.ascontiguousarray(turned), 20, 30))


def test_an_image_of_that_size_is_left_as_it_is() -> None:
    image = noise(50, 60)
    assert resize(image, width=60, height=50) is image


def test_other_pixels_and_sides_of_no_pixel_are_named() -> None:
    image = noise(50, 60)
    for pixels in (image.astype(np.float32), image[..., :2], image[..., 0], image[:0], image[:, :0]):
        with pytest.raises(
            ConfigError, match=rf"an image of {pixels.dtype} \(.* 20 x 30 pixels: expected uint8 \[\.\.\., "
        ):
            resize(pixels, width=20, height=30)  # type: ignore[arg-type]
    for width, height in ((0, 30), (20, 0), (-1, 30)):
        with pytest.raises(ConfigError, match=f"cannot be resized to {width} x {height} pixels: .* at least a pixel"):
            resize(image, width=width, height=height)


def test_an_image_of_one_pixel_has_the_bits_of_pillow() -> None:
    image = noise(1, 1)
    for width, height in ((1, 2), (100, 1), (70, 33)):
        assert np.array_equal(resize(image, width=width, height=height), by_pillow(image, width, height))


@in_long_rounds
@examples(40)
@given(
    old=st.tuples(st.integers(1, 700), st.integers(1, 700)), new=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    filter=st.sampled_from(("bilinear", "bicubic", "lanczos")), seed=st.integers(0, 9),
)  # fmt: skip
def test_images_of_any_size_have_the_bits_of_pillow(
    old: tuple[int, int], new: tuple[int, int], filter: Filter, seed: int
) -> None:
    image = noise(*old, seed=seed)
    assert np.array_equal(
        resize(image, width=new[0], height=new[1], filter=filter), by_pillow(image, *new, filter=filter)
    )


@in_long_rounds
@pytest.mark.parametrize(("radius", "most", "mean"), [(0, 0.35, 0.006), (6, 0.035, 0.0001)])
def test_the_fast_processor_differs_by_no_more_than_the_page_says(radius: int, most: float, mean: float) -> None:
    """docs/families.md."""
    fast = getattr(transformers, "Qwen2VLImageProcessor" + ("" if IS_5 else "Fast"))()
    rng = np.random.default_rng(0)
    for width, height in ((640, 480), (1000, 700), (301, 517), (37, 61)):
        noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        pixels = np.array(noise.filter(ImageFilter.GaussianBlur(radius)))
        theirs = fast(images=[pixels], return_tensors="pt")
        _, rows, columns = theirs["image_grid_thw"][0].tolist()
        resized = resize(pixels, width=14 * columns, height=14 * rows)
        ours = fast(images=[resized], return_tensors="pt", do_resize=False)
        difference = (theirs["pixel_values"] - ours["pixel_values"]).abs()
        assert difference.max() <= most
        assert difference.mean() <= mean
