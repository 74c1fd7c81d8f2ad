"""Pixels -> pixels of another size, bit for bit equal to Pillow's filters, and normalised patches; compiled loops.

Pillow (src/libImaging/Resample.c) makes each pixel of a new width a weighted sum of the pixels around it in its row,
rounds it to 8 bits, and repeats this for the height; weights are whole numbers of 2^-22. Here a single loop adds up
rows of bytes for both, many bytes in one vector instruction. For the width, a band of rows is transposed first, and the
pixels of a column become contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..._core import loops
from ...errors import ConfigError

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


def to_patches(
    frames: NDArray[np.uint8],
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Cut frames into patches: [N, H, W, 3] -> [t * h * w, 3 * temporal_patch_size * patch_size**2], with h and w in
    patches.

    The last frame is repeated until temporal_patch_size divides their number. Rows are ordered by time, then by groups
    of merge_size x merge_size patches; the values of a row by channel, frame, and the pixels of the patch. Values are
    (x / 255 - mean) / std in float32, with the same bits as transformers' slow processor. out: rows to fill and return,
    e.g. an image's part of a larger array; new memory costs more time than the patches.
    """
    num_frames, height, width, _ = frames.shape
    multiple = patch_size * merge_size
    if not num_frames or height % multiple or width % multiple:
        raise ConfigError(
            f"{num_frames} frames of {width} x {height} pixels cannot be cut into patches: both sides must be "
            f"multiples of patch_size x merge_size = {multiple}, and there must be a frame"
        )
    times = -(-num_frames // temporal_patch_size)
    num_patches = times * (height // patch_size) * (width // patch_size)
    shape = (num_patches, 3 * temporal_patch_size * patch_size * patch_size)
    if out is None:
        out = np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ConfigError(f"out is {out.dtype} {out.shape}, expected float32 {shape}, contiguous")
    # x / 255 in float32 has the bits of transformers' x * (1 / 255) in float64, rounded, for all 256 values of x.
    of_byte = np.arange(256, dtype=np.float32) / np.float32(255)
    levels = (of_byte - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]
    pixels = np.require(frames, np.uint8, ["C"])
    loops.to_patches(pixels, num_frames, height, width, patch_size, merge_size, temporal_patch_size, levels, out)
    return out
