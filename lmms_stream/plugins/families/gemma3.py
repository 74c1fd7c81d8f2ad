"""Gemma 3: an image is one tile; pan-and-scan, if a folder enables it, adds crops of long images.

The tokens of an image see one another both ways, by their token_type_ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...processors.families.family import Layout, TokenIds
from ...processors.families.files import ProcessorFiles
from ...processors.families.settings import MediaSettings
from ...processors.families.vision import refuse_pixels, square_side
from .tiles import HALF, TiledFamily, TileGrid, Tiles

if TYPE_CHECKING:
    from ...processors.media.facts import ImageFacts

IMAGE = "<image_soft_token>"
START, END = "<start_of_image>", "<end_of_image>"
_DEFAULTS = {"image_mean": HALF, "image_std": HALF, "resample": 2}
_SIDE = 224  # default of a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class PanAndScan:
    """Crops of images whose longer side is at least min_ratio times the shorter: at most max_crops of at least min_side
    pixels.
    """

    min_side: int
    max_crops: int
    min_ratio: float

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of the crops of an image; (0, 0) for an image without crops.

        The same arithmetic as pan_and_scan of transformers' Gemma3ImageProcessor.

        >>> PanAndScan(min_side=256, max_crops=4, min_ratio=1.2).grid(1024, 300)
        (3, 1)
        """
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter < self.min_ratio:
            return 0, 0
        wanted = min(longer // self.min_side, math.floor(longer / shorter + 0.5))
        number = min(self.max_crops, max(2, wanted))
        if min(math.ceil(longer / number), shorter) < self.min_side:
            return 0, 0
        return (number, 1) if width >= height else (1, number)


@dataclass(frozen=True, kw_only=True)
class Gemma3(TiledFamily):
    """See Family. tokens: of a tile. crops: None without pan-and-scan."""

    tokens: int
    crops: PanAndScan | None

    name = "Gemma 3"
    model_types = ("gemma3",)
    processor_classes = ("Gemma3Processor",)
    # flash_attention_2 takes no masks: the tokens of an image would see only earlier tokens.
    attentions = ("flex_attention", "sdpa", "eager")
    placeholders: ClassVar[Mapping[str, str]] = {"image": START}
    repeated_tokens = (IMAGE,)
    media_tokens = (IMAGE, START, END)
    token_inputs = ("token_type_ids",)

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Gemma3:
        """See FamilyMaker."""
        refuse_pixels(settings, family=cls.name)
        side = square_side(files.image.get("size"), name=files.name, default=_SIDE)
        crops = PanAndScan(
            min_side=int(files.image.get("pan_and_scan_min_crop_size") or 256),
            max_crops=int(files.image.get("pan_and_scan_max_num_crops") or 4),
            min_ratio=float(files.image.get("pan_and_scan_min_ratio_to_activate") or 1.2),
        )
        return cls(
            tiles=Tiles.of({**_DEFAULTS, **files.image}, side=side, name=files.name),
            image_token_id=token_ids(IMAGE),
            tokens=int(files.processor.get("image_seq_length", 256)),
            crops=crops if files.image.get("do_pan_and_scan") else None,
        )

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {**super().description, "tokens": self.tokens, "crops": self.crops and asdict(self.crops)}

    def image(self, facts: ImageFacts) -> Layout:
        """See TiledFamily."""
        columns, rows = (0, 0) if self.crops is None else self.crops.grid(facts.width, facts.height)
        num_crops = columns * rows
        one = f"\n\n{START}{IMAGE}{END}\n\n"
        text = one
        if num_crops:
            text = (
                f"Here is the original image {one} and here are some crops to help you see better "
                + " ".join([one] * num_crops)
            )  # fmt: skip
        size = (facts.width, facts.height) if num_crops else (self.tiles.side, self.tiles.side)
        shape = TileGrid(facts, 1 + num_crops, rows, columns, size)
        return Layout("image", (self.tokens,) * (1 + num_crops), 1 + num_crops, text, shape)

    def cut(self, image: NDArray[np.uint8], shape: TileGrid) -> NDArray[np.uint8]:
        """See TiledFamily."""
        tiles = [self.tiles.whole(image)]
        if shape.rows:
            height, width = (
                -(-side // count) for side, count in zip(image.shape, (shape.rows, shape.columns), strict=False)
            )
            tiles += [
                self.tiles.whole(image[row * height : (row + 1) * height, column * width : (column + 1) * width])
                for row in range(shape.rows)
                for column in range(shape.columns)
            ]
        return np.concatenate(tiles)

    @property
    def settings_of_calls(self) -> Mapping[str, Any]:
        """See Family. transformers' processor reads these settings from a call, not from the folder."""
        if self.crops is None:
            return {"do_pan_and_scan": False}
        return {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": self.crops.min_side,
            "pan_and_scan_max_num_crops": self.crops.max_crops,
            "pan_and_scan_min_ratio_to_activate": self.crops.min_ratio,
        }

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """See Family: 1 for tokens of images."""
        return {"token_type_ids": (input_ids == self.image_token_id).astype(np.int64)}

    def model_settings(self) -> dict[str, Any]:
        """See TiledFamily."""
        return {
            "image_token_index": self.image_token_id,
            "vision_config.image_size": self.tiles.side,
            "mm_tokens_per_image": self.tokens,
        }


FAMILY = Gemma3
