"""Settings of the processor of images that are to be made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..checks import check_fields
from ..errors import ConfigError

Crop = Literal["center", "random"]
Objective = Literal["flow_matching", "reconstruction"]


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """What an image becomes that a model is to make."""

    # Images that are to be made
    image_size: int | None = None  # its sides, in pixels
    # "center": the largest square in its middle; "random": a square of the image, whose shorter side is half as long
    # again
    crop: Crop | None = None
    flip: bool | None = None  # whether half of the images are mirrored
    augment_seed: int | None = None  # of what is drawn

    def __post_init__(self) -> None:
        check_fields(self, prefix="processor.")
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ConfigError(f"processor.image_size must be at least 1 pixel, got {self.image_size}")
        if self.augment_seed is not None and self.augment_seed < 0:
            raise ConfigError(f"processor.augment_seed must be 0 or more, got {self.augment_seed}")
