"""Aya Vision: an image is cut into tiles as InternVL does it, each named by its number, and seen whole as one more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .family import TokenIds
from .files import ProcessorFiles
from .internvl import InternVL
from .settings import MediaSettings
from .tile_settings import numbers_of_tiles, refuse_pixels, square_side
from .tiles import Tiles
from .vision import CLIP_MEAN, CLIP_STD

if TYPE_CHECKING:
    from ..media.facts import ImageFacts
    from .family import Layout

IMAGE, PATCH = "<image>", "<|IMG_PATCH|>"
START, END, TILE, WHOLE = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"
_DEFAULTS = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
_SIDE, _PATCH = 364, 28  # pixels of a tile, and of what becomes a token, of a folder that does not say


@dataclass(frozen=True, kw_only=True)
class AyaVision(InternVL):
    """See Family."""

    name = "Aya Vision"
    model_types = ("aya_vision",)
    processor_classes = ("AyaVisionProcessor",)
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE}
    repeated_tokens = (PATCH,)
    media_tokens = (PATCH, START, END)

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> AyaVision:
        """See FamilyMaker."""
        refuse_pixels(settings, ("video_min_pixels", "video_max_pixels"), family=cls.name)
        side = square_side(files.image.get("size"), name=files.name, default=_SIDE)
        said = files.processor
        of_token = int(said.get("patch_size", _PATCH)) * int(said.get("downsample_factor", 1))
        lowest, highest = numbers_of_tiles(files, settings, side=side)
        return cls(
            tiles=Tiles.of({**_DEFAULTS, **files.image}, side=side, name=files.name),
            image_token_id=token_ids(PATCH),
            tokens=(int(said.get("img_size", _SIDE)) // of_token) ** 2,
            min_tiles=lowest,
            max_tiles=highest,
        )

    def image(self, facts: ImageFacts) -> Layout:
        """See TiledFamily."""
        layout = super().image(facts)
        tiles = "".join(f"{TILE}_{number}{PATCH}" for number in range(1, layout.patches))
        return layout._replace(counts=(self.tokens,) * layout.patches, text=f"{START}{tiles}{WHOLE}{PATCH}{END}")

    def dummy_side(self) -> int:
        """See TiledFamily: the tower's positions are those of a whole tile."""
        return self.tiles.side

    def model_settings(self) -> dict[str, Any]:
        """See TiledFamily."""
        return {"image_token_index": self.image_token_id, "vision_config.image_size": self.tiles.side}


FAMILY = AyaVision
