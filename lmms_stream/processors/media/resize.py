"""Pixels -> pixels of another size, bit for bit equal to Pillow's filters, by compiled loops.

Pillow (src/libImaging/Resample.c) makes each pixel of a new width a weighted sum of the pixels around it in its row,
rounds it to 8 bits, and repeats this for the height; weights are whole numbers of 2^-22. Here a single loop adds up
rows of bytes for both, many bytes in one vector instruction. For the width, a band of rows is transposed first, and the
pixels of a column become contiguous.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..._core import loops

Filter = Literal["bilinear", "bicubic", "lanczos"]
FILTERS: dict[Filter, int] = {"bilinear": 0, "bicubic": 1, "lanczos": 2}  # filter -> its number in the loops


def resize(image: NDArray[np.uint8], *, width: int, height: int, filter: Filter = "bicubic") -> NDArray[np.uint8]:
    """Resize an image, bit for bit like Pillow's resize with the filter: [..., H, W, 3] -> [..., height, width, 3].

    An image of this size is returned itself.
    """
    *frames, old_height, old_width, channels = image.shape
    if (old_width, old_height) == (width, height):
        return image
    pixels = np.require(image, np.uint8, ["C"]).reshape(-1, old_height, old_width, channels)
    passes = [(_to_width, width), (_to_height, height)]
    if old_height - height > max(0, 2 * (old_width - width)):  # the order of the passes in Pillow 13
        passes.reverse()
    for to_size, size in passes:
        pixels = to_size(pixels, size, filter)
    return pixels.reshape(*frames, height, width, channels)


def _to_width(frames: NDArray[np.uint8], width: int, filter: Filter) -> NDArray[np.uint8]:
    num_frames, height, old_width, channels = frames.shape
    if old_width == width:
        return frames
    out = np.empty((num_frames, height, width, channels), np.uint8)
    loops.resize_width(frames, num_frames * height, old_width, width, FILTERS[filter], out)
    return out


def _to_height(frames: NDArray[np.uint8], height: int, filter: Filter) -> NDArray[np.uint8]:
    num_frames, old_height, width, channels = frames.shape
    if old_height == height:
        return frames
    out = np.empty((num_frames, height, width, channels), np.uint8)
    loops.resize_height(frames, num_frames, old_height, width * channels, height, FILTERS[filter], out)
    return out
