"""InternVL: an image is cut into tiles in the grid of the nearest aspect, and seen whole as one more tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...processors.families.family import Layout, TokenIds
from ...processors.families.files import ProcessorFiles
from ...processors.families.settings import MediaSettings
from ...processors.families.vision import (
    CLIP_MEAN,
    CLIP_STD,
    Section,
    choice_of,
    middles_of_equal_parts,
    numbers_of_tiles,
    refuse_pixels,
    square_side,
)
from .tiles import TiledFamily, TileGrid, Tiles

if TYPE_CHECKING:
    from ...processors.media.facts import ImageFacts, VideoFacts
    from ...processors.media.types import Interval

IMAGE, VIDEO = "<IMG_CONTEXT>", "<video>"
START, END = "<img>", "</img>"
_DEFAULTS = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
_SIDE = 384  # default of a folder
_NUM_FRAMES = 8  # default number of frames of a video; also the number in transformers' examples


@dataclass(frozen=True, kw_only=True)
class InternVL(TiledFamily):
    """See Family. The version in transformers' own code (`OpenGVLab/InternVL3-1B-hf` and similar models).

    tokens: of a tile. min_tiles, max_tiles: of an image's grid.
    """

    tokens: int
    min_tiles: int
    max_tiles: int

    name = "InternVL"
    model_types = ("internvl",)
    processor_classes = ("InternVLProcessor",)
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE, "video": VIDEO}
    repeated_tokens = (IMAGE,)
    media_tokens = (IMAGE, START, END)
    attentions = ("flash_attention_2", "flex_attention", "sdpa_varlen", "sdpa", "eager")

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> InternVL:
        """See FamilyMaker."""
        refuse_pixels(settings, ("video_min_pixels", "video_max_pixels"), family=cls.name)
        side = square_side(files.image.get("size"), name=files.name, default=_SIDE)
        lowest, highest = numbers_of_tiles(files, settings, side=side)
        return cls(
            tiles=Tiles.of({**_DEFAULTS, **files.image}, side=side, name=files.name),
            video_tiles=Tiles.of({**_DEFAULTS, **files.video}, side=side, name=files.name),
            choice=choice_of(files, settings, num_frames=_NUM_FRAMES),
            image_token_id=token_ids(IMAGE),
            tokens=int(files.processor.get("image_seq_length", 256)),
            min_tiles=lowest,
            max_tiles=highest,
        )

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {
            **super().description, "tokens": self.tokens, "min_tiles": self.min_tiles, "max_tiles": self.max_tiles
        }  # fmt: skip

    def pieces(self, kind: str, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See Family: the tiles."""
        return inputs, [1] * len(inputs["pixel_values"])

    def image(self, facts: ImageFacts) -> Layout:
        """See TiledFamily."""
        columns, rows = (1, 1)
        if self.max_tiles > 1:
            columns, rows = nearest_grid(facts.width, facts.height, self.tiles.side, self.min_tiles, self.max_tiles)
        num_tiles = rows * columns
        num_tiles += num_tiles > 1
        size = (columns * self.tiles.side, rows * self.tiles.side)
        shape = TileGrid(facts, num_tiles, rows, columns, size)
        return Layout("image", (self.tokens * num_tiles,), num_tiles, f"{START}{IMAGE}{END}", shape)

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """See TiledFamily."""
        assert self.choice is not None
        section = self.choice.section(facts, interval)
        num_frames = max(1, self.choice.num_frames(section))
        text = "\n".join(f"Frame{number + 1}: {START}{IMAGE}{END}" for number in range(num_frames))
        shape = TileGrid(facts, num_frames, section=section, num_frames=num_frames)
        return Layout("video", (self.tokens,) * num_frames, num_frames, text, shape)

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """See TiledFamily."""
        return middles_of_equal_parts(section, num_frames)

    def cut(self, image: NDArray[np.uint8], shape: TileGrid) -> NDArray[np.uint8]:
        """See TiledFamily."""
        width, height = shape.size
        tiles = self.tiles.cut(self.tiles.resized(image, width=width, height=height))
        return tiles if len(tiles) == 1 else np.concatenate([tiles, self.tiles.whole(image)])

    def limits(self, kind: str) -> Mapping[str, Any]:
        """See Family."""
        return {"min_patches": self.min_tiles, "max_patches": self.max_tiles} if kind == "image" else {}

    def dummy_side(self) -> int:
        """See TiledFamily: the side that becomes one token."""
        return self.tiles.side // math.isqrt(self.tokens)

    def model_settings(self) -> dict[str, Any]:
        """See TiledFamily."""
        return {**super().model_settings(), "image_seq_length": self.tokens}


@lru_cache(maxsize=16)
def _grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """Columns and rows of grids with min_tiles to max_tiles tiles, the fewest first."""
    counts = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in counts for rows in counts if min_tiles <= columns * rows <= max_tiles]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


@lru_cache(maxsize=4096)
def nearest_grid(width: int, height: int, side: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows of the grid with the nearest aspect to an image's; of equal grids, the largest with
    less than twice the image's pixels.

    The same arithmetic as get_optimal_tiled_canvas of transformers' GotOcr2ImageProcessor.

    >>> nearest_grid(800, 400, 448, 1, 12)
    (2, 1)
    """
    aspect, area = width / height, width * height
    found, least = (1, 1), math.inf
    for columns, rows in _grids(min_tiles, max_tiles):
        difference = abs(aspect - columns / rows)
        if difference < least or (difference == least and area > 0.5 * side * side * columns * rows):
            found, least = (columns, rows), difference
    return found


FAMILY = InternVL
