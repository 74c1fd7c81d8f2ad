"""Pixels -> normalised patches in the order of transformers' Qwen2VLImageProcessor, by a compiled loop."""

# C names are declared in the .pxd.
# mypy: disable-error-code="name-defined"
# ruff: noqa: F821

from __future__ import annotations

from collections.abc import Sequence

import cython
import numpy as np
from cython.cimports.libc.string import memcpy
from numpy.typing import NDArray

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
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ConfigError(f"frames are {frames.dtype} {frames.shape}, expected uint8 [frames, height, width, 3]")
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
    if out.shape != shape or out.dtype != np.float32 or not out.flags.carray:
        raise ConfigError(f"out is {out.dtype} {out.shape}, expected float32 {shape}, contiguous and writable")
    _fill(
        np.ascontiguousarray(frames).reshape(num_frames, height, 3 * width),
        patch_size,
        merge_size,
        temporal_patch_size,
        _values(np.asarray(mean, np.float32), np.asarray(std, np.float32)),
        out,
    )
    return out


def _fill(
    frames: NDArray[np.uint8],
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    values: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write the patches. frames: uint8[frames, height, 3 * width]. values: float32[3, 256], see _values."""
    cython.declare(target=cython.p_float, group=cython.longlong)
    num_frames, area, row_bytes = frames.shape[0], patch_size * patch_size, frames.shape[2]
    num_rows, num_columns = frames.shape[1] // patch_size, row_bytes // (3 * patch_size)
    with cython.nogil:
        for frame in range(num_frames):
            time, slot = frame // temporal_patch_size, frame % temporal_patch_size
            slots = temporal_patch_size - slot if frame == num_frames - 1 else 1  # the last frame is repeated
            for row in range(num_rows):
                for column in range(num_columns):
                    group = (time * (num_rows // merge_size) + row // merge_size) * (num_columns // merge_size)
                    group = (group + column // merge_size) * merge_size + row % merge_size
                    target = cython.address(out[group * merge_size + column % merge_size, slot * area])
                    fill_patch(
                        cython.address(frames[frame, row * patch_size, 3 * patch_size * column]), row_bytes,
                        cython.address(values[0, 0]), target, temporal_patch_size * area, patch_size,
                    )  # fmt: skip
                    for _ in range(3):
                        for repeat in range(1, slots):
                            memcpy(target + repeat * area, target, 4 * area)
                        target += temporal_patch_size * area


def _values(mean: NDArray[np.float32], std: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the normalised value of each byte in each channel: float32[3, 256].

    x / 255 in float32 has the bits of transformers' x * (1 / 255) in float64, rounded, for all 256 values of x.
    """
    values: NDArray[np.float32] = (np.arange(256, dtype=np.float32) / np.float32(255) - mean[:, None]) / std[:, None]
    return values
