"""Idefics3: an image is cut into tiles, each named by its row and column, and seen whole as one more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..media.memory import Memory, new_memory
from .family import Layout, TokenIds
from .files import ProcessorFiles
from .settings import MediaSettings
from .tile_settings import refuse_pixels, square_side
from .tiles import HALF, Shape, TiledFamily, Tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..media.facts import ImageFacts

IMAGE = "<image>"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
_DEFAULTS = {"image_mean": HALF, "image_std": HALF, "resample": 1}
_SIDE = 364  # of a folder that does not say
_LONGEST = 4096  # pixels of a side before it is cut, whatever the folder says


@dataclass(frozen=True, kw_only=True)
class Idefics3(TiledFamily):
    """See Family. longest: pixels of an image's longer side before it is cut. is_split: False: it is seen whole alone.

    tokens: of a tile.
    """

    longest: int
    is_split: bool
    tokens: int

    name = "Idefics3"
    model_types = ("idefics3",)
    processor_classes = ("Idefics3Processor",)
    towers: ClassVar[Mapping[str, str]] = {"image": "vision_model"}
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE}
    repeated_tokens = (IMAGE,)
    media_tokens = (IMAGE, AROUND)

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Self:
        """See FamilyMaker."""
        refuse_pixels(settings, family=cls.name)
        side = square_side(files.image.get("max_image_size"), name=files.name, default=_SIDE)
        longest = (files.image.get("size") or {"longest_edge": 4 * _SIDE}).get("longest_edge")
        if not isinstance(longest, int):
            raise ConfigError(
                f"processor {files.name!r} has size {files.image['size']!r}, and only longest_edge is followed here: "
                "save it anew"
            )
        return cls(
            tiles=Tiles.of({**_DEFAULTS, **files.image}, side=side, name=files.name),
            image_token_id=token_ids(IMAGE),
            longest=longest,
            is_split=bool(files.image.get("do_image_splitting", True)),
            tokens=int(files.processor.get("image_seq_len", 169)),
            **cls.further(files, settings, side),
        )

    @classmethod
    def further(cls, files: ProcessorFiles, settings: MediaSettings, side: int) -> Mapping[str, Any]:
        """Fields that a family has besides."""
        return {}

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {
            **super().description, "longest": self.longest, "is_split": self.is_split, "tokens": self.tokens
        }  # fmt: skip

    def image(self, facts: ImageFacts) -> Layout:
        """See TiledFamily."""
        size = with_longer_side(facts.width, facts.height, self.longest)
        columns, rows = self._grid(*size) if self.is_split else (1, 1)
        num_tiles = rows * columns
        num_tiles += num_tiles > 1
        text = whole = f"{AROUND}{WHOLE}{IMAGE}{AROUND}"
        if num_tiles > 1:
            lines = [
                "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{IMAGE}" for column in range(columns)) + "\n"
                for row in range(rows)
            ]
            text = f"{''.join(lines)}\n{whole}"
        return Layout(
            "image", (self.tokens,) * num_tiles, num_tiles, text, Shape(facts, num_tiles, rows, columns, size)
        )

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles, in the arithmetic of transformers' resize_for_vision_encoder."""
        side, aspect = self.tiles.side, width / height
        if width >= height:
            columns = math.ceil(width / side)
            return columns, math.ceil(int(columns * side / aspect) / side)
        rows = math.ceil(height / side)
        return math.ceil(int(rows * side * aspect) / side), rows

    def cut(self, image: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
        """See TiledFamily."""
        width, height = shape.size
        image = self.tiles.resized(image, width=width, height=height)
        if not self.is_split:
            return self.tiles.whole(image)
        image = self.tiles.resized(image, width=shape.columns * self.tiles.side, height=shape.rows * self.tiles.side)
        tiles = self.tiles.cut(image)
        return tiles if len(tiles) == 1 else np.concatenate([tiles, self.tiles.whole(image)])

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family. Each tile is a row of one: the model takes rows of several, and no row has tiles for padding."""
        given: dict[str, NDArray[Any]] = {}

        def rows_of_one(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            given[name] = memory(name, (shape[0], 1, *shape[1:]), dtype)
            rows: NDArray[Any] = given[name][:, 0]
            return rows

        return super().tensors(layouts, media, rows_of_one) | given

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See Family."""
        ours = super().of_installed(made)
        return {**ours, "pixel_values": ours["pixel_values"][:, None]}

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family: what becomes one token; of ones, as the model leaves tiles of zeros out."""
        side = self.tiles.side // math.isqrt(self.tokens)
        return {"image": {"pixel_values": np.ones((1, 1, 3, side, side), np.float32)}}


def with_longer_side(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height of an image whose longer side gets so many pixels; the shorter one an even number, at least 1.

    That is get_resize_output_image_size of transformers' Idefics3ImageProcessor, in whose arithmetic it is written.

    >>> with_longer_side(300, 200, 1456)
    (1456, 970)
    """
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height = max(height + height % 2, 1)
    else:
        height, width = longest, int(longest * aspect)
        width = max(width + width % 2, 1)
    aspect = width / height
    if width >= height and width > _LONGEST:
        return _LONGEST, max(int(_LONGEST / aspect), 1)
    if height > width and height > _LONGEST:
        return max(int(_LONGEST * aspect), 1), _LONGEST
    return width, height


FAMILY = Idefics3
