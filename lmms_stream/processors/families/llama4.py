"""Llama 4: an image is fitted into the canvas of tiles that shrinks it least, and seen whole as one more tile.

Its attention counts chunks of tokens from the start of a pack, so that packs are no longer than a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from .family import Layout, TokenIds
from .files import ProcessorFiles
from .settings import MediaSettings
from .tile_settings import refuse_pixels, square_side
from .tiles import HALF, Shape, TiledFamily, Tiles

if TYPE_CHECKING:
    from ..media.facts import ImageFacts

IMAGE, PATCH = "<|image|>", "<|patch|>"
START, END = "<|image_start|>", "<|image_end|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
_DEFAULTS = {"image_mean": HALF, "image_std": HALF, "resample": 2}
_SIDE = 336  # of a folder that does not say


@dataclass(frozen=True, kw_only=True)
class Llama4(TiledFamily):
    """See Family. tokens: of a tile. max_tiles: of the canvas that an image is fitted into."""

    tokens: int
    max_tiles: int

    name = "Llama 4"
    model_types = ("llama4",)
    processor_classes = ("Llama4Processor",)
    model_class = "Llama4ForConditionalGeneration"  # AutoModelForCausalLM takes its config for one of text
    towers: ClassVar[Mapping[str, str]] = {"image": "vision_model"}
    attentions = ("flex_attention", "sdpa", "eager")
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE}
    repeated_tokens = (PATCH,)
    media_tokens = (PATCH, IMAGE, START, END, NEXT_COLUMN, NEXT_ROW)

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Llama4:
        """See FamilyMaker."""
        refuse_pixels(settings, family=cls.name)
        if files.image.get("resize_to_max_canvas"):
            raise ConfigError(
                f"processor {files.name!r} has resize_to_max_canvas True, and only False is followed here: save it anew"
            )
        side = square_side(files.image.get("size"), name=files.name, default=_SIDE)
        patches = (side // int(files.processor.get("patch_size", 14))) ** 2
        ratio = float(files.processor.get("pixel_shuffle_ratio", 0.5))
        return cls(
            tiles=Tiles.of({**_DEFAULTS, **files.image}, side=side, name=files.name),
            image_token_id=token_ids(PATCH),
            tokens=patches // round(1 / ratio**2),
            max_tiles=int(files.image.get("max_patches") or 16),
        )

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {**super().description, "tokens": self.tokens, "max_tiles": self.max_tiles}

    def image(self, facts: ImageFacts) -> Layout:
        """See TiledFamily."""
        side = self.tiles.side
        rows, columns = best_canvas(facts.width, facts.height, side, self.max_tiles)
        size = _undistorted(
            facts,
            width=min(max(facts.width, side), columns * side),
            height=min(max(facts.height, side), rows * side),
        )
        num_tiles = rows * columns
        text = f"{IMAGE}{PATCH}{END}"
        if num_tiles > 1:
            text = (NEXT_COLUMN.join([PATCH] * columns) + NEXT_ROW) * rows + text
            num_tiles += 1
        shape = Shape(facts, num_tiles, rows, columns, size)
        return Layout("image", (self.tokens,) * num_tiles, num_tiles, f"{START}{text}", shape)

    def cut(self, image: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
        """See TiledFamily. What an image leaves of its canvas is black."""
        width, height = shape.size
        canvas = np.zeros((shape.rows * self.tiles.side, shape.columns * self.tiles.side, 3), np.uint8)
        canvas[:height, :width] = self.tiles.resized(image, width=width, height=height)
        tiles = self.tiles.cut(canvas)
        return tiles if len(tiles) == 1 else np.concatenate([tiles, self.tiles.whole(image)])

    def normalised(self, kind: str, tiles: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """See TiledFamily. In bfloat16, as transformers' processor does it."""
        for channel, (mean, std) in enumerate(zip(self.tiles.mean, self.tiles.std, strict=True)):
            values = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(1 / 255))
            values = _bfloat16(_bfloat16(values - _bfloat16(np.float32(mean))) / _bfloat16(np.float32(std)))
            np.take(values, tiles[..., channel], out=out[:, channel])

    def features(self, base: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
        """See Family."""
        return base.multi_modal_projector(base.vision_model(**inputs).last_hidden_state)

    def model_settings(self) -> dict[str, Any]:
        """See TiledFamily."""
        return {"image_token_index": self.image_token_id, "vision_config.image_size": self.tiles.side}


def _bfloat16(values: Any) -> NDArray[np.float32]:
    """float32 with the values that bfloat16 gives them: to the nearest, halves to the even one."""
    bits = np.atleast_1d(np.asarray(values, np.float32)).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


@lru_cache(maxsize=16)
def _canvases(max_tiles: int) -> NDArray[np.int64]:
    """int64[n, 2]: rows and columns of all canvases, those of one aspect together, the largest first."""
    of_aspect: dict[float, list[tuple[int, int]]] = {}
    for number in range(max_tiles, 0, -1):
        for rows in range(1, number + 1):
            if number % rows == 0:
                columns = number // rows
                of_aspect.setdefault(rows / columns, []).append((rows, columns))
    return np.array([each for canvases in of_aspect.values() for each in canvases], np.int64)


@lru_cache(maxsize=4096)
def best_canvas(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Rows and columns of the canvas that enlarges an image least, or shrinks it least; of several the smallest.

    That is get_best_fit of transformers' Llama4ImageProcessorFast, which divides in float32.

    >>> best_canvas(800, 300, 336, 16)
    (1, 3)
    """
    canvases = _canvases(max_tiles)
    sides = (canvases * side).astype(np.float32)
    scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
    enlarging = scales[scales >= 1]
    chosen = canvases[scales == (enlarging.min() if len(enlarging) else scales.max())]
    rows, columns = chosen[np.argmin(chosen.prod(axis=1))].tolist()
    return rows, columns


def _undistorted(facts: ImageFacts, *, width: int, height: int) -> tuple[int, int]:
    """Width and height of an image that fills one of these sides."""
    along_width, along_height = width / facts.width, height / facts.height
    if along_width < along_height:
        return max(width, 1), max(min(math.floor(facts.height * along_width), height), 1)
    return max(min(math.floor(facts.width * along_height), width), 1), max(height, 1)


FAMILY = Llama4
