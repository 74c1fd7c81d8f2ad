"""Images and frames -> rows of patches, as a folder's image or video processor is set. Settings in, patches out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from .files import check_followed

if TYPE_CHECKING:
    from ..media.facts import ImageFacts

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3  # of Pillow's resampling filters
_ALWAYS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC, "rescale_factor": 1 / 255}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """Patches of patch_size x patch_size pixels of temporal_patch_size frames; merge_size x merge_size become a token.

    min_pixels, max_pixels: of what is cut into patches. mean, std: of red, green and blue from 0 to 1.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(values: Mapping[str, Any], *, name: str) -> Vision:
        """values: a preprocessor_config.json. ConfigError for settings that are not followed here. name: the folder."""
        check_followed(values, _ALWAYS, name=name)
        size = values.get("size") or {}
        try:
            return Vision(
                patch_size=int(values.get("patch_size", 14)),
                temporal_patch_size=int(values.get("temporal_patch_size", 2)),
                merge_size=int(values.get("merge_size", 2)),
                min_pixels=int(values.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
                max_pixels=int(values.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
                mean=tuple(map(float, values.get("image_mean") or CLIP_MEAN)),
                std=tuple(map(float, values.get("image_std") or CLIP_STD)),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"processor {name!r} has settings of images that are no numbers ({error}): save it anew"
            ) from error

    def within(self, min_pixels: int | None, max_pixels: int | None) -> Vision:
        """The same with other limits, those that are not None; the folder's other limit gives way where they cross."""
        lowest = min_pixels or min(self.min_pixels, max_pixels or self.min_pixels)
        highest = max_pixels or max(self.max_pixels, min_pixels or self.max_pixels)
        return replace(self, min_pixels=lowest, max_pixels=highest)

    @property
    def description(self) -> dict[str, int]:
        """What can change a number of tokens or patches."""
        names = ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels")
        return {name: getattr(self, name) for name in names}

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: a row of the tower's input."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def patches(self, frames: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """float32[P, patch_values] of frames uint8[N, H, W, 3] whose sides are whole numbers of tokens.

        out: see to_patches.
        """
        from ..media.patches import to_patches

        return to_patches(
            frames,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            mean=self.mean,
            std=self.std,
            out=out,
        )


def check_decoded(shape: tuple[int, ...], facts: ImageFacts) -> None:
    """DataError unless an image of shape (height, width, …) has its facts' size, or that of one of JPEG's scales."""
    from ..media.images import SCALES

    if any(shape[:2] == (-(-facts.height // scale), -(-facts.width // scale)) for scale in (1, *SCALES)):
        return
    raise DataError(
        f"an image is stored as of {facts.width} x {facts.height} pixels, and its bytes are of {shape[1]} x "
        f"{shape[0]}: convert the dataset again"
    )
