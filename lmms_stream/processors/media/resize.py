"""Pixels -> pixels of another size, bit for bit equal to Pillow's filters, by compiled loops.

Pillow (src/libImaging/Resample.c) makes each pixel of a new width a weighted sum of the pixels around it in its row,
rounds it to 8 bits, and repeats this for the height; weights are whole numbers of 2^-22. Here a single loop adds up
rows of bytes for both, many bytes in one vector instruction. For the width, a band of rows is transposed first, and the
pixels of a column become contiguous.
"""

from __future__ import annotations

import math
from typing import Literal

import cython
import numpy as np
from numpy.typing import NDArray

PRECISION_BITS = 22  # of a weight
HALF = 1 << (PRECISION_BITS - 1)
# Filter -> its number, and its reach in pixels on each side, times the scale if an image is made smaller.
Filter = Literal["bilinear", "bicubic", "lanczos"]
FILTERS: dict[Filter, tuple[int, float]] = {"bilinear": (0, 1.0), "bicubic": (1, 2.0), "lanczos": (2, 3.0)}
BILINEAR, BICUBIC = FILTERS["bilinear"][0], FILTERS["bicubic"][0]
# The parameter a of the cubic of Keys (1981), "Cubic convolution interpolation for digital image processing".
CUBIC = -0.5
Bytes = Ints = NDArray[np.generic]  # pointers to bytes, and to integers
BAND = 64  # rows that are resized in width together
SPAN = 1024  # bytes of a row that are added up together: their sums stay in the fastest cache
TILE = 8  # rows and columns that are transposed together
TERMS = 5  # rows that are added together: the filter's reach if an image hardly changes its size


def resize(image: NDArray[np.uint8], *, width: int, height: int, filter: Filter = "bicubic") -> NDArray[np.uint8]:
    """Resize an image, bit for bit like Pillow's resize with the filter: [..., H, W, 3] -> [..., height, width, 3].

    An image of this size is returned itself.
    """
    *frames, old_height, old_width, channels = image.shape
    if (old_width, old_height) == (width, height):
        return image
    pixels = np.ascontiguousarray(image, np.uint8).reshape(-1, old_height, old_width, channels)
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


def _weights(
    size: int, new_size: int, filter: int, reach: float
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return for each new pixel: the weights of the old pixels (then zeros), the first old pixel, and the number of old
    pixels. The steps and roundings equal Pillow's.
    """
    cython.declare(start=cython.longlong, stop=cython.longlong, total=cython.double, weight=cython.double)
    scale = cython.cast(cython.double, size) / new_size
    stretch = max(scale, 1.0)
    support = reach * stretch
    most = 2 * math.ceil(support) + 1
    weights = cython.declare(cython.int[:, ::1], np.zeros((new_size, (most + TERMS - 1) // TERMS * TERMS), np.int32))
    bounds = cython.declare(cython.longlong[:, ::1], np.empty((2, new_size), np.int64))
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
        bounds[0, pixel], bounds[1, pixel] = start, stop - start
    return np.asarray(weights), *np.asarray(bounds)


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
    return math.sin(x * math.pi) / (x * math.pi) if x != 0.0 else 1.0


def _resize_rows(
    image: NDArray[np.uint8],
    weights: NDArray[np.int32],
    first: NDArray[np.int64],
    number: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Resize rows: [rows, 3 * old width] -> out [rows, 3 * new width]."""
    num_rows, row_bytes, new_bytes = image.shape[0], image.shape[1], out.shape[1]
    band = min(BAND, num_rows)
    columns = cython.declare(cython.uchar[::1], np.empty(row_bytes * band, np.uint8))
    new_columns = cython.declare(cython.uchar[::1], np.empty(new_bytes * band, np.uint8))
    sums = cython.declare(cython.int[::1], np.empty(3 * band, np.int32))
    with cython.nogil:
        begin = 0
        while begin < num_rows:
            row = min(begin, num_rows - band)  # the last band may have rows of the band before
            source = cython.cast(cython.p_uchar, cython.address(image[row, 0]))
            _transpose(source, band, row_bytes, cython.address(columns[0]), band)
            for pixel in range(len(weights)):
                _add_rows(
                    cython.address(columns[3 * band * first[pixel]]), 3 * band, number[pixel],
                    cython.cast(cython.p_int, cython.address(weights[pixel, 0])), cython.address(sums[0]),
                    cython.address(new_columns[3 * band * pixel]), 3 * band,
                )  # fmt: skip
            _transpose(cython.address(new_columns[0]), new_bytes, band, cython.address(out[row, 0]), new_bytes)
            begin += band


def _resize_columns(
    frames: NDArray[np.uint8],
    weights: NDArray[np.int32],
    first: NDArray[np.int64],
    number: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Resize columns: [frames, old height, 3 * width] -> out [frames, new height, 3 * width]."""
    row_bytes = frames.shape[2]
    sums = cython.declare(cython.int[::1], np.empty(SPAN, np.int32))
    with cython.nogil:
        for frame in range(len(frames)):
            for row in range(len(weights)):
                for span in range((row_bytes + SPAN - 1) // SPAN):
                    _add_rows(
                        cython.cast(cython.p_uchar, cython.address(frames[frame, first[row], span * SPAN])), row_bytes,
                        number[row], cython.cast(cython.p_int, cython.address(weights[row, 0])),
                        cython.address(sums[0]), cython.address(out[frame, row, span * SPAN]),
                        min(SPAN, row_bytes - span * SPAN),
                    )  # fmt: skip


def _add_rows(source: Bytes, stride: int, number: int, weights: Ints, sums: Ints, out: Bytes, width: int) -> None:
    """Write the weighted sum of `number` rows of `width` bytes, `stride` bytes apart.

    Rows are always added by fives: zero weights follow the last weight, and repeat the last row.
    """
    last, term = (number - 1) * stride, 0
    for n in range(width):
        sums[n] = HALF
    while term < number:
        begin = term * stride
        _add_five(
            source + begin, source + min(begin + stride, last), source + min(begin + 2 * stride, last),
            source + min(begin + 3 * stride, last), source + min(begin + 4 * stride, last),
            weights[term], weights[term + 1], weights[term + 2], weights[term + 3], weights[term + 4], sums, width,
        )  # fmt: skip
        term += TERMS
    _clip(sums, out, width)


def _add_five(
    one: Bytes, two: Bytes, three: Bytes, four: Bytes, five: Bytes,
    a: int, b: int, c: int, d: int, e: int, sums: Ints, width: int,
) -> None:  # fmt: skip
    for n in range(width):
        sums[n] += one[n] * a + two[n] * b + three[n] * c + four[n] * d + five[n] * e


def _clip(sums: Ints, out: Bytes, width: int) -> None:
    for n in range(width):
        out[n] = min(max(sums[n] >> 22, 0), 255)


def _transpose(source: Bytes, num_rows: int, row_bytes: int, target: Bytes, target_row_bytes: int) -> None:
    """Turn rows of bytes into columns. The last tile of each row and column may have bytes of the tile before."""
    if num_rows < TILE or row_bytes < TILE:
        for row in range(num_rows):
            for column in range(row_bytes):
                target[column * target_row_bytes + row] = source[row * row_bytes + column]
        return
    for tile in range((row_bytes + TILE - 1) // TILE):
        column = min(tile * TILE, row_bytes - TILE)
        for tile_row in range((num_rows + TILE - 1) // TILE):
            row = min(tile_row * TILE, num_rows - TILE)
            _transpose_tile(
                source + row * row_bytes + column, row_bytes, target + column * target_row_bytes + row, target_row_bytes
            )


def _transpose_tile(source: Bytes, stride: int, target: Bytes, target_stride: int) -> None:
    """Transpose the 8 rows of 8 bytes at an address, `stride` bytes apart (Warren, "Hacker's Delight", section 7-3).

    Blocks of 4 x 4, 2 x 2 and 1 x 1 bytes change places across the diagonal. A row is a number, its first byte lowest.
    """
    rows = cython.declare(cython.ulonglong[8])
    for row in range(8):
        rows[row] = cython.cast(cython.p_ulonglong, source + row * stride)[0]
    for row in range(4):
        _exchange(rows, row, row + 4, 32, 0x00000000FFFFFFFF)
    for row in range(2):
        _exchange(rows, row, row + 2, 16, 0x0000FFFF0000FFFF)
        _exchange(rows, row + 4, row + 6, 16, 0x0000FFFF0000FFFF)
    for row in range(4):
        _exchange(rows, 2 * row, 2 * row + 1, 8, 0x00FF00FF00FF00FF)
    for row in range(8):
        cython.cast(cython.p_ulonglong, target + row * target_stride)[0] = rows[row]


def _exchange(rows: Ints, one: int, other: int, bits: int, mask: int) -> None:
    """Exchange the bits of the mask of a row with the bits `bits` above the mask of another."""
    changed = ((rows[one] >> bits) ^ rows[other]) & mask
    rows[one] ^= changed << bits
    rows[other] ^= changed
