"""Images that are to be made: their pixels, crops and flips."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import Measured
from lmms_stream.processors.image import ImageProcessor
from PIL import Image


def picture(width: int, height: int, *, seed: int = 0, mode: str = "RGB") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = BytesIO()
    Image.fromarray(values).resize((width, height)).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def sample_of(width: int, height: int, *, label: int = 3, **options: Any) -> dict[str, Any]:
    return {"image": picture(width, height, **options), "label": label}


def adm_crop(image: Image.Image, size: int) -> np.ndarray[Any, Any]:
    """guided-diffusion's center_crop_arr, as it is written there."""
    while min(*image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(*image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), resample=Image.Resampling.BICUBIC)
    arr = np.array(image)
    crop_y, crop_x = (arr.shape[0] - size) // 2, (arr.shape[1] - size) // 2
    return arr[crop_y : crop_y + size, crop_x : crop_x + size]


def test_the_centre_crop_is_that_of_guided_diffusion() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        width, height = rng.integers(8, 200, 2).tolist()
        size = int(rng.integers(4, 40))
        sample = sample_of(width, height, seed=int(rng.integers(99)))
        made = ImageProcessor(image_size=size).process(sample)["media"]["pixel_values"]
        expected = adm_crop(Image.open(BytesIO(sample["image"])), size)
        assert made.shape == (1, 3, size, size)
        assert np.array_equal(made[0].transpose(1, 2, 0), expected), (width, height, size)


def test_an_image_has_the_length_1_and_its_label_beside_it() -> None:
    processor, sample = ImageProcessor(image_size=16), sample_of(20, 30)
    made = processor.process(sample)
    assert processor.measure(sample) == len(made["input_ids"]) == len(made["labels"]) == 1
    assert [each.tokens for each in processor.measure_media([sample, sample]) if isinstance(each, Measured)] == [1, 1]
    assert made["media"]["class_labels"].tolist() == [3]
    assert made["media"]["pixel_values"].dtype == np.uint8
    assert processor.process(sample_of(20, 30, mode="LA"))["media"]["pixel_values"].shape == (1, 3, 16, 16)
    (seen,) = processor.see_media(sample)
    assert np.array_equal(seen.pixels[0], made["media"]["pixel_values"][0].transpose(1, 2, 0))


@pytest.mark.parametrize("crop", ["center", "random"])
def test_what_is_drawn_follows_from_the_seed_the_epoch_and_the_sample_id(crop: Any) -> None:
    sample = sample_of(40, 31)
    processor = ImageProcessor(image_size=8, crop=crop, flip=True, augment_seed=1)

    def drawn(*of: int) -> bytes:
        return bytes(processor.process_drawn(sample, of)["media"]["pixel_values"].tobytes())

    many = {(epoch, sample_id): drawn(epoch, sample_id) for epoch in range(8) for sample_id in range(8)}
    assert many == {at: drawn(*at) for at in many}
    other = ImageProcessor(image_size=8, crop=crop, flip=True, augment_seed=2)
    assert any(other.process_drawn(sample, at)["media"]["pixel_values"].tobytes() != made for at, made in many.items())
    plain = processor.process(sample)["media"]["pixel_values"]
    if crop == "center":  # half of the images are mirrored
        assert set(many.values()) == {plain.tobytes(), np.ascontiguousarray(plain[..., ::-1]).tobytes()}
        mirrored = sum(made != plain.tobytes() for made in many.values())
        assert 20 <= mirrored <= 44
    else:
        assert len(set(many.values())) > 40  # of 5 x 8 or 9 places, twice mirrored


def test_a_random_crop_reaches_all_of_the_larger_image() -> None:
    values = np.zeros((30, 36, 3), np.uint8)
    values[..., 0], values[..., 1] = np.arange(30)[:, None] * 8, np.arange(36) * 7
    buffer = BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    processor = ImageProcessor(image_size=20, crop="random")
    assert not processor.flip
    made = [processor.process_drawn({"image": buffer.getvalue(), "label": -1}, [0, i]) for i in range(300)]
    corners = {tuple(each["media"]["pixel_values"][0, :2, 0, 0].tolist()) for each in made}
    assert {top for top, _ in corners} == {8 * i for i in range(11)}
    assert {left for _, left in corners} == {7 * i for i in range(17)}


def test_a_broken_image_is_named() -> None:
    with pytest.raises(DataError, match=r"cannot be decoded|cannot read the header"):
        ImageProcessor(image_size=8).process({"image": picture(20, 20)[:60], "label": 0})


def test_the_settings_of_images_are_checked() -> None:
    made = ProcessorConfig(type="image", image_size=32, flip=False).build()
    assert isinstance(made, ImageProcessor)
    assert (made.image_size, made.crop, made.flip, made.objective) == (32, "center", False, "flow_matching")
    rae = ProcessorConfig(type="image", crop="random").build()
    assert isinstance(rae, ImageProcessor)
    assert (rae.image_size, rae.flip, rae.objective) == (256, False, "reconstruction")
    with pytest.raises(ConfigError, match=r"processor.image_size is for processor.type image, and that is chat: leave"):
        ProcessorConfig(image_size=3)
    with pytest.raises(ConfigError, match=r"processor.tokenizer is for texts, and processor.type is image: leave it"):
        ProcessorConfig(type="image", tokenizer="x")
    with pytest.raises(ConfigError, match=r"processor.image_size must be at least 1 pixel, got 0"):
        ProcessorConfig(type="image", image_size=0)
    with pytest.raises(ConfigError, match=r"processor.augment_seed must be 0 or more, got -1"):
        ProcessorConfig(type="image", augment_seed=-1)
    with pytest.raises(ConfigError, match=r"processor.crop must be center or random, got 'middle'"):
        ImageProcessor(crop="middle")  # type: ignore[arg-type]
