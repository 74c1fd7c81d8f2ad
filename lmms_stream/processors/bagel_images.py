"""Images for BAGEL's encoders: sizes, patches and positions. facts, bytes -> arrays.

After ImageTransform, patchify and get_flattened_position_ids_extrapolate of BAGEL's data/ folder. BAGEL rounds a side
to a multiple of the stride, too, but its result may exceed the longest side; ours never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_fields
from ..config import moved, old_keys
from ..errors import ConfigError

LENGTHS = ("stride", "min_side", "max_side")  # settings of an encoder's input that change the length of a sample


class Grid(NamedTuple):
    """A grid of patches, or of the latents of an image."""

    rows: int
    columns: int

    @property
    def num_cells(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """Input images of an encoder. Sides are in pixels, and multiples of the stride."""

    name: ClassVar[str]  # name of the section

    stride: int  # pixels of the side of a patch, or of a latent
    min_side: int  # of the shorter side, unless the longer side would be above max_side
    max_side: int  # of the longer side
    positions: int  # of a side; the position of a patch or latent is row x positions + column
    # probability of dropping an image as a condition of a later image
    dropout: float = 0.0

    def __post_init__(self) -> None:
        section = f"processor.bagel.{self.name}"
        check_fields(self, prefix=f"{section}.")
        for name in (*LENGTHS, "positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{section}.{name} must be a whole number of at least 1, got {getattr(self, name)}")
        _check_dropout(f"{section}.dropout", self.dropout)
        if not self.stride <= self.min_side <= self.max_side:
            raise ConfigError(
                f"{section}: stride {self.stride}, min_side {self.min_side} and max_side {self.max_side} must ascend: "
                "correct them"
            )
        if self.max_side // self.stride > self.positions:
            raise ConfigError(
                f"{section}: max_side {self.max_side} has {self.max_side // self.stride} strides of {self.stride}, and "
                f"positions is {self.positions}: raise positions, or lower max_side"
            )

    def grid(self, width: int, height: int) -> Grid:
        """Size of the resized image, in strides.

        The image keeps its proportions up to multiples of the stride, is enlarged only if its shorter side is below the
        shortest, and has no side above the longest.

        >>> VaeInput().grid(4000, 3000)
        Grid(rows=48, columns=64)
        """
        scale = max(min(self.max_side / max(width, height), 1.0), self.min_side / min(width, height))
        sides = self._scaled((width, height), scale)
        if max(sides) > self.max_side:
            sides = self._scaled(sides, self.max_side / max(sides))
        columns, rows = (min(side, self.max_side) // self.stride for side in sides)
        return Grid(rows, columns)

    def _scaled(self, sides: tuple[int, ...], scale: float) -> tuple[int, ...]:
        return tuple(max(self.stride, round(round(side * scale) / self.stride) * self.stride) for side in sides)

    def position_ids(self, grid: Grid) -> NDArray[np.int64]:
        """Position ids: int64[rows * columns]."""
        rows, columns = np.arange(grid.rows), np.arange(grid.columns)
        return (rows[:, None] * self.positions + columns).reshape(-1).astype(np.int64)

    def pixels(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """Resize the image to the grid: uint8[H, W, 3]."""
        from .media.pixels import resize  # not imported for settings: their commands need no compiled loops

        return resize(image, width=grid.columns * self.stride, height=grid.rows * self.stride)

    def patches(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
        """Patches with values from -1 to 1: float32[rows * columns, stride * stride * 3], by row, column and
        channel.
        """
        cut = self.pixels(image, grid).reshape(grid.rows, self.stride, grid.columns, self.stride, 3)
        flat = cut.swapaxes(1, 2).reshape(grid.num_cells, -1)
        return flat.astype(np.float32) / np.float32(127.5) - np.float32(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeInput(EncoderInput):
    """Input of the autoencoder, for latents of conditions and of images to be made."""

    name: ClassVar[str] = "vae"

    stride: int = 16
    min_side: int = 512
    max_side: int = 1024
    positions: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class VitInput(EncoderInput):
    """Input of the encoder of seen images."""

    name: ClassVar[str] = "vit"

    stride: int = 14
    min_side: int = 378
    max_side: int = 512
    positions: int = 70


OLD_KEYS = {
    f"{encoder}_{name}": moved(f"{encoder}.{name}")
    for encoder in ("vae", "vit")
    for name in (*LENGTHS, "positions", "dropout")
}


@old_keys(OLD_KEYS)
@dataclass(frozen=True, kw_only=True, slots=True)
class BagelSettings:
    """Sequences of texts and images for BAGEL."""

    vae: VaeInput = field(default_factory=VaeInput)
    vit: VitInput = field(default_factory=VitInput)
    text_dropout: float = 0.0  # probability of dropping a text as a condition of a later image

    def __post_init__(self) -> None:
        check_fields(self, prefix="processor.bagel.")
        _check_dropout("processor.bagel.text_dropout", self.text_dropout)

    @property
    def description(self) -> dict[str, Any]:
        """Settings that can change a length. Dropout cannot: a dropped block stays in the sequence, unseen."""
        return {f"{each.name}_{name}": getattr(each, name) for each in (self.vae, self.vit) for name in LENGTHS}


def _check_dropout(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a probability from 0 to 1, got {value!r}")


def decoded(data: bytes, *grids: tuple[EncoderInput, Grid]) -> NDArray[np.uint8]:
    """Decode an image with enough pixels for the largest of the sizes: uint8[H, W, 3]."""
    from .media.images import decode_image

    return decode_image(
        data,
        min_width=max(grid.columns * side.stride for side, grid in grids),
        min_height=max(grid.rows * side.stride for side, grid in grids),
    )
