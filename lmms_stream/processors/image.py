"""An image, with or without a class label -> pixels of one size, for models that generate images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..checks import check_fields
from ..errors import ConfigError, DataError
from ..extras import need
from ..types import Processed, Sample
from .base import Measured, SeenMedium
from .media.images import decode_image

if TYPE_CHECKING:
    from PIL.Image import Image


_RESIZED = 1.5  # shorter side of an image before a random crop, as a multiple of image_size, e.g. 384 for 256


class ImageProcessor:
    """Processor of samples of schema "image" to media: pixel_values uint8[1, 3, S, S], class_labels int64[1], -1
    without a label.

    A sample has the length 1: packing_length is the number of images in a pack. Images are turned by EXIF, in RGB. A
    centre crop equals guided-diffusion's (ADM): boxes of 2 x 2 pixels are averaged while the shorter side is at least
    twice the size, then the image is resized with a bicubic filter. Random draws follow from augment_seed, epoch and
    sample id; `process` draws nothing and returns the middle, not mirrored.
    """

    columns = ("image", "label")
    measured_columns = ("label",)
    schema = "image"

    def __init__(
        self, *, image_size: int = 256, crop: Crop = "center", flip: bool | None = None, augment_seed: int = 0,
        objective: Objective | None = None,
    ):  # fmt: skip
        ImageSettings(image_size=image_size, augment_seed=augment_seed)
        if crop not in ("center", "random"):
            raise ConfigError(f"processor.crop must be center or random, got {crop!r}")
        self.image_size, self.crop, self.augment_seed = image_size, crop, augment_seed
        self.flip = crop == "center" if flip is None else flip
        self.objective = objective or ("flow_matching" if crop == "center" else "reconstruction")

    @staticmethod
    def of(settings: Any) -> ImageProcessor:
        """Make a processor. settings: with the fields of ImageSettings and objective; for None, the constructor's
        default.
        """
        names = [*(field.name for field in fields(ImageSettings)), "objective"]
        given = {name: getattr(settings, name) for name in names}
        return ImageProcessor(**{name: value for name, value in given.items() if value is not None})

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "ImageProcessor", "version": 1}  # every image has the length 1

    def measure(self, sample: Sample) -> int:
        return 1

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        """See MeasureMedia."""
        return [Measured(tokens=1, image_tokens=1)] * len(samples)

    def process(self, sample: Sample) -> Processed:
        return self._processed(sample, None)

    def process_drawn(self, sample: Sample, drawn: Sequence[int]) -> Processed:
        """See ProcessDrawn."""
        return self._processed(sample, np.random.default_rng([self.augment_seed, *drawn]))

    def see_media(self, sample: Sample) -> list[SeenMedium]:
        """See SeeMedia."""
        return [SeenMedium("image", [(0, 1)], self._pixels(sample, None)[None], [])]

    def _processed(self, sample: Sample, rng: np.random.Generator | None) -> Processed:
        one = np.zeros(1, np.int64)
        pixels = np.ascontiguousarray(self._pixels(sample, rng).transpose(2, 0, 1))[None]
        label = np.array([sample["label"]], np.int64)
        return {"input_ids": one, "labels": one.copy(), "media": {"pixel_values": pixels, "class_labels": label}}

    def _pixels(self, sample: Sample, rng: np.random.Generator | None) -> NDArray[np.uint8]:
        """Pixels of the crop: uint8[S, S, 3]. rng: random generator; None for the middle."""
        need("PIL", by="images")
        from PIL import Image

        image = Image.fromarray(decode_image(sample["image"]))
        size = self.image_size
        if self.crop == "center":
            pixels = cropped(resized_by_halves(image, size), size)
        else:
            at = None if rng is None else rng.random(2).tolist()
            pixels = cropped(resized(image, round(_RESIZED * size)), size, at)
        if self.flip and rng is not None and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        return pixels


def resized_by_halves(image: Image, size: int) -> Image:
    """Resize an image to a shorter side of `size`, like ADM: by halves down to less than twice the size, then bicubic.

    https://github.com/openai/guided-diffusion, image_datasets.py, center_crop_arr.
    """
    need("PIL", by="images")
    from PIL import Image as Pillow

    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Pillow.Resampling.BOX)
    return resized(image, size)


def resized(image: Image, size: int) -> Image:
    """Resize an image to a shorter side of `size`, bicubic."""
    need("PIL", by="images")
    from PIL import Image as Pillow

    scale = size / min(image.size)
    sides = (max(size, round(image.width * scale)), max(size, round(image.height * scale)))
    return image.resize(sides, Pillow.Resampling.BICUBIC)


def cropped(image: Image, size: int, at: Sequence[float] | None = None) -> NDArray[np.uint8]:
    """Cut a square of size pixels from an image: the center, or at a position.

    at: (vertical, horizontal) position from 0 (top, left) to below 1 (bottom, right).
    """
    pixels = np.asarray(image)
    room = [side - size for side in pixels.shape[:2]]
    if at is None:
        top, left = (side // 2 for side in room)
    else:
        top, left = (int(share * (side + 1)) for share, side in zip(at, room, strict=True))
    return pixels[top : top + size, left : left + size]


# Settings of the processor of images to generate.

Crop = Literal["center", "random"]
Objective = Literal["flow_matching", "reconstruction"]


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Size, crop and random draws of images to generate."""

    # Images to generate
    image_size: int | None = None  # side in pixels; default 256
    # "center" (default): the largest square in the middle; "random": a random square after resizing the shorter side to
    # 1.5 image_size
    crop: Crop | None = None
    flip: bool | None = None  # whether half of the images are mirrored at random; default: only with crop "center"
    augment_seed: int | None = None  # seed of random draws; default 0

    def __post_init__(self) -> None:
        check_fields(self, prefix="processor.")
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ConfigError(f"processor.image_size must be at least 1 pixel, got {self.image_size}")
        if self.augment_seed is not None and self.augment_seed < 0:
            raise ConfigError(f"processor.augment_seed must be 0 or more, got {self.augment_seed}")
