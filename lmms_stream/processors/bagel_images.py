"""Images as BAGEL's encoders take them: their sizes, their patches, and where these lie. facts, bytes -> arrays.

After ImageTransform, patchify and get_flattened_position_ids_extrapolate of BAGEL's data/ folder. A side is rounded to
a multiple of the stride there, too, but may then be longer than the longest; here it never is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_fields
from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BagelSettings:
    """Sides are of images as the encoders see them, in pixels: multiples of the stride.

    vae: the autoencoder whose latents are made, one for stride x stride pixels; vit: the encoder of images that are
    seen. positions: of a side; that of a latent or patch is row x positions + column. dropout: how often a text, the
    patches or the clean latents that an image is to be made by are dropped, each by itself.
    """

    vae_stride: int = 16
    vae_min_side: int = 512
    vae_max_side: int = 1024
    vae_positions: int = 64
    vit_stride: int = 14
    vit_min_side: int = 378
    vit_max_side: int = 512
    vit_positions: int = 70
    text_dropout: float = 0.0
    vit_dropout: float = 0.0
    vae_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, prefix="processor.bagel.")
        for name, value in asdict(self).items():
            if name.endswith("_dropout"):
                if not 0 <= value <= 1:
                    raise ConfigError(f"processor.bagel.{name} must be a probability from 0 to 1, got {value!r}")
            elif value < 1:
                raise ConfigError(f"processor.bagel.{name} must be a whole number of at least 1, got {value!r}")
        for name in ("vae", "vit"):
            side: Side = getattr(self, name)
            if not side.stride <= side.shortest <= side.longest:
                raise ConfigError(
                    f"processor.bagel.{name}_stride {side.stride}, {name}_min_side {side.shortest} and {name}_max_side "
                    f"{side.longest} must ascend: correct them"
                )
            if side.longest // side.stride > side.positions:
                raise ConfigError(
                    f"processor.bagel.{name}_max_side {side.longest} has {side.longest // side.stride} strides of "
                    f"{side.stride}, and {name}_positions is {side.positions}: raise that, or lower the side"
                )

    @property
    def vae(self) -> Side:
        return Side(self.vae_stride, self.vae_min_side, self.vae_max_side, self.vae_positions)

    @property
    def vit(self) -> Side:
        return Side(self.vit_stride, self.vit_min_side, self.vit_max_side, self.vit_positions)

    @property
    def description(self) -> dict[str, Any]:
        """Settings that can change a length. What is dropped stays in the sequence, where nothing sees it."""
        return {name: value for name, value in asdict(self).items() if not name.endswith(("_dropout", "_positions"))}


class Grid(NamedTuple):
    """A grid of patches, or of the latents of an image."""

    rows: int
    columns: int

    @property
    def num_cells(self) -> int:
        return self.rows * self.columns


class Side(NamedTuple):
    """Input of an encoder: see BagelSettings."""

    stride: int
    shortest: int
    longest: int
    positions: int

    def grid(self, width: int, height: int) -> Grid:
        """The size that an image gets, in strides.

        It keeps its proportions as well as multiples of the stride allow, is not made larger unless its shorter side is
        below the shortest, and has no side above the longest.

        >>> Side(16, 512, 1024, 64).grid(4000, 3000)
        Grid(rows=48, columns=64)
        """
        scale = max(min(self.longest / max(width, height), 1.0), self.shortest / min(width, height))
        sides = self._scaled((width, height), scale)
        if max(sides) > self.longest:
            sides = self._scaled(sides, self.longest / max(sides))
        columns, rows = (min(side, self.longest) // self.stride for side in sides)
        return Grid(rows, columns)

    def _scaled(self, sides: tuple[int, ...], scale: float) -> tuple[int, ...]:
        return tuple(max(self.stride, round(round(side * scale) / self.stride) * self.stride) for side in sides)

    def position_ids(self, grid: Grid) -> NDArray[np.int64]:
        """int64[rows * columns]."""
        rows, columns = np.arange(grid.rows), np.arange(grid.columns)
        return (rows[:, None] * self.positions + columns).reshape(-1).astype(np.int64)

    def pixels(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """An image in its size: uint8[H, W, 3]."""
        from .media.resize import resize  # settings are read by commands that need none of its compiled loops

        return resize(image, width=grid.columns * self.stride, height=grid.rows * self.stride)

    def patches(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
        """Values from -1 to 1, float32[rows * columns, stride * stride * 3]: of a patch by row, column and channel."""
        cut = self.pixels(image, grid).reshape(grid.rows, self.stride, grid.columns, self.stride, 3)
        flat = cut.swapaxes(1, 2).reshape(grid.num_cells, -1)
        return flat.astype(np.float32) / np.float32(127.5) - np.float32(1)


def decoded(data: bytes, *grids: tuple[Side, Grid]) -> NDArray[np.uint8]:
    """An image with as many pixels as the largest of these sizes needs: uint8[H, W, 3]."""
    from .media.images import decode_image

    return decode_image(
        data,
        min_width=max(grid.columns * side.stride for side, grid in grids),
        min_height=max(grid.rows * side.stride for side, grid in grids),
    )
