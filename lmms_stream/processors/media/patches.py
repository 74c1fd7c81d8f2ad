"""Pixels -> normalised patches in the order of transformers' Qwen2VLImageProcessor, by a compiled loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ...errors import ConfigError
from ...versions.numba import compiled

LANES = 8  # values that are copied together


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
    _fill(
        np.require(frames, np.uint8, ["C", "W"]).reshape(num_frames, height, 3 * width),
        patch_size,
        merge_size,
        temporal_patch_size,
        np.asarray(mean, np.float32),
        np.asarray(std, np.float32),
        out,
    )
    return out


@compiled
def _fill(
    frames: NDArray[np.uint8],
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    mean: NDArray[np.float32],
    std: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Normalise the rows of pixels that a row of patches covers, and copy the patches."""
    num_frames, height, row_bytes = frames.shape
    width = row_bytes // 3
    area = patch_size * patch_size
    num_rows, num_columns = height // patch_size, width // patch_size
    values = np.empty((3, patch_size * width), np.float32)
    for frame in range(num_frames):
        time, slot = frame // temporal_patch_size, frame % temporal_patch_size
        for row in range(num_rows):
            for y in range(patch_size):
                begin = y * width
                red, green, blue = values[0][begin:][:width], values[1][begin:][:width], values[2][begin:][:width]
                _normalise(frames[frame, row * patch_size + y], mean, std, red, green, blue)
            for column in range(num_columns):
                group = (time * (num_rows // merge_size) + row // merge_size) * (num_columns // merge_size)
                group += column // merge_size
                patch = out[(group * merge_size + row % merge_size) * merge_size + column % merge_size]
                for channel in range(3):
                    begin = (channel * temporal_patch_size + slot) * area
                    pixels = patch[begin:][:area]
                    _copy_patch(values[channel], column * patch_size, width, patch_size, pixels)
                    if frame == num_frames - 1:
                        for n in range(1, temporal_patch_size - slot):
                            repeated = patch[begin + n * area :][:area]
                            for pixel in range(area):
                                repeated[pixel] = pixels[pixel]


@njit
def _normalise(
    row: NDArray[np.uint8],
    mean: NDArray[np.float32],
    std: NDArray[np.float32],
    red: NDArray[np.float32],
    green: NDArray[np.float32],
    blue: NDArray[np.float32],
) -> None:
    """Normalise a row of pixels to a row of values of each channel.

    x / 255 in float32 has the bits of transformers' x * (1 / 255) in float64, rounded, for all 256 values of x.
    """
    red_mean, green_mean, blue_mean = mean[0], mean[1], mean[2]
    red_std, green_std, blue_std = std[0], std[1], std[2]
    most = np.float32(255)
    for x in range(len(red)):
        red[x] = (np.float32(row[3 * x]) / most - red_mean) / red_std
        green[x] = (np.float32(row[3 * x + 1]) / most - green_mean) / green_std
        blue[x] = (np.float32(row[3 * x + 2]) / most - blue_mean) / blue_std


@njit
def _copy_patch(
    values: NDArray[np.float32], offset: int, stride: int, patch_size: int, pixels: NDArray[np.float32]
) -> None:
    """Copy patch_size rows of patch_size values, from an offset of `values` on, `stride` values apart."""
    if patch_size < LANES:
        for n in range(patch_size * patch_size):
            pixels[n] = values[offset + n // patch_size * stride + n % patch_size]
        return
    source, target = values.ctypes.data + 4 * offset, pixels.ctypes.data
    last = 4 * (patch_size - LANES)  # the last lanes of a row may overlap the lanes before
    for _ in range(patch_size):
        for at in range(0, last, 4 * LANES):
            _copy_lanes(np.uintp(source + at), np.uintp(target + at))
        _copy_lanes(np.uintp(source + last), np.uintp(target + last))
        source += 4 * stride
        target += 4 * patch_size


@intrinsic
def _copy_lanes(typing_context: Any, source: Any, target: Any) -> Any:
    """Copy as many float32 values as a vector has lanes: a row of a patch is too short for a loop to be vectorised."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.VectorType(ir.FloatType(), LANES).as_pointer()
        lanes = builder.load(builder.inttoptr(arguments[0], pointer), align=4)
        builder.store(lanes, builder.inttoptr(arguments[1], pointer), align=4)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate
