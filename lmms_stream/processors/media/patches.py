"""Pixels -> normalised patches in the order of transformers' Qwen2VLImageProcessor, by a compiled loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..._core import loops
from ...errors import ConfigError


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
