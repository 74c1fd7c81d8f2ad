"""Pixels -> pixels of another size, bit for bit equal to Pillow's filters, by compiled loops.

Pillow (src/libImaging/Resample.c) makes each pixel of a new width a weighted sum of the pixels around it in its row,
rounds it to 8 bits, and repeats this for the height; weights are whole numbers of 2^-22. Here a single loop adds up
rows of bytes for both, many bytes in one vector instruction. For the width, a band of rows is transposed first, and the
pixels of a column become contiguous.
"""

# C names are declared in the .pxd.
# mypy: disable-error-code="name-defined"
# ruff: noqa: F821

from __future__ import annotations

from typing import Literal

import cython
import numpy as np
from cython.cimports.libc.math import M_PI, ceil, sin
from numpy.typing import NDArray

from ...errors import ConfigError

PRECISION_BITS = 22  # of a weight
# Filter -> its number, and its reach in pixels on each side, times the scale if an image is made smaller.
Filter = Literal["bilinear", "bicubic", "lanczos"]
FILTERS: dict[Filter, tuple[int, float]] = {"bilinear": (0, 1.0), "bicubic": (1, 2.0), "lanczos": (2, 3.0)}
BILINEAR, BICUBIC = FILTERS["bilinear"][0], FILTERS["bicubic"][0]
# The parameter a of the cubic of Keys (1981), "Cubic convolution interpolation for digital image processing".
CUBIC = -0.5
BAND = 64  # rows that are resized in width together


def resize(image: NDArray[np.uint8], *, width: int, height: int, filter: Filter = "bicubic") -> NDArray[np.uint8]:
    """Resize an image, bit for bit like Pillow's resize with the filter: [..., H, W, 3] -> [..., height, width, 3].

    An image of this size is returned itself.
    """
    sides = min(*image.shape, width, height)
    if image.dtype != np.uint8 or image.ndim < 3 or image.shape[image.ndim - 1] != 3 or sides < 1:
        raise ConfigError(
            f"an image of {image.dtype} {image.shape} cannot be resized to {width} x {height} pixels: expected uint8 "
            "[..., height, width, 3] and at least a pixel on each side"
        )
    *frames, old_height, old_width, channels = image.shape
    if (old_width, old_height) == (width, height):
        return image
    pixels = np.ascontiguousarray(image).reshape(-1, old_height, old_width, channels)
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
    rows, new_rows = frames.reshape(-1, old_width * channels), out.reshape(-1, width * channels)
    _resize_rows(rows, *_weights(old_width, width, *FILTERS[filter]), new_rows)
    return out


def _to_height(frames: NDArray[np.uint8], height: int, filter: Filter) -> NDArray[np.uint8]:
    num_frames, old_height, width, channels = frames.shape
    if old_height == height:
        return frames
    out = np.empty((num_frames, height, width, channels), np.uint8)
    columns, new_columns = (array.reshape(num_frames, -1, width * channels) for array in (frames, out))
    _resize_columns(columns, *_weights(old_height, height, *FILTERS[filter]), new_columns)
    return out


def _weights(size: int, new_size: int, filter: int, reach: float) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the weights of the old pixels for each new pixel, int32[new_size, most], and the first old pixel and the
    number of old pixels, int64[new_size, 2]. The steps and roundings equal Pillow's.
    """
    cython.declare(start=cython.longlong, stop=cython.longlong, total=cython.double, weight=cython.double)
    scale = cython.cast(cython.double, size) / new_size
    stretch = max(scale, 1.0)
    support = reach * stretch
    most = 2 * cython.cast(cython.longlong, ceil(support)) + 1
    weights = cython.declare(cython.int[:, ::1], np.empty((new_size, most), np.int32))
    bounds = cython.declare(cython.longlong[:, ::1], np.empty((new_size, 2), np.int64))
    exact = cython.declare(cython.double[::1], np.empty(most))
    for pixel in range(new_size):
        center = (pixel + 0.5) * scale
        start = cython.cast(cython.longlong, max(center - support + 0.5, 0.0))
        stop = min(cython.cast(cython.longlong, center + support + 0.5), size)
        total = 0.0
        for old in range(start, stop):
            exact[old - start] = _weight((old - center + 0.5) * (1.0 / stretch), filter)
            total += exact[old - start]
        for old in range(stop - start):
            weight = (exact[old] / total if total != 0.0 else exact[old]) * (1 << PRECISION_BITS)
            weights[pixel, old] = cython.cast(cython.int, weight - 0.5 if weight < 0 else weight + 0.5)
        bounds[pixel, 0], bounds[pixel, 1] = start, stop - start
    return np.asarray(weights), np.asarray(bounds)


def _weight(distance: float, filter: int) -> float:
    x = abs(distance)
    if filter == BILINEAR:
        return max(1.0 - x, 0.0)
    if filter != BICUBIC:  # lanczos
        return _sinc(x) * _sinc(x / 3.0) if x < 3.0 else 0.0
    if x < 1.0:
        return ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * CUBIC if x < 2.0 else 0.0


def _sinc(x: float) -> float:
    return sin(x * M_PI) / (x * M_PI) if x != 0.0 else 1.0


def _resize_rows(
    image: NDArray[np.uint8], weights: NDArray[np.int32], bounds: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Resize rows: [rows, 3 * old width] -> out [rows, 3 * new width]; weights and bounds: see _weights."""
    num_rows, row_bytes, new_bytes = image.shape[0], image.shape[1], out.shape[1]
    band = min(BAND, num_rows)
    columns = cython.declare(cython.uchar[::1], np.empty(row_bytes * band, np.uint8))
    new_columns = cython.declare(cython.uchar[::1], np.empty(new_bytes * band, np.uint8))
    old, new = cython.address(columns[0]), cython.address(new_columns[0])
    with cython.nogil:
        for number in range((num_rows + band - 1) // band):
            row = min(number * band, num_rows - band)  # the last band may have rows of the band before
            transpose(cython.address(image[row, 0]), band, row_bytes, old, band)
            weigh_rows(
                old, 3 * band, cython.address(weights[0, 0]), weights.shape[1], cython.address(bounds[0, 0]),
                weights.shape[0], new,
            )  # fmt: skip
            transpose(new, new_bytes, band, cython.address(out[row, 0]), new_bytes)


def _resize_columns(
    frames: NDArray[np.uint8], weights: NDArray[np.int32], bounds: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Resize columns: [frames, old height, 3 * width] -> out [frames, new height, 3 * width]."""
    with cython.nogil:
        for frame in range(frames.shape[0]):
            weigh_rows(
                cython.address(frames[frame, 0, 0]), frames.shape[2], cython.address(weights[0, 0]), weights.shape[1],
                cython.address(bounds[0, 0]), weights.shape[0], cython.address(out[frame, 0, 0]),
            )  # fmt: skip
