"""Pixels -> pixels of another size, bit for bit equal to Pillow's filters, by compiled loops.

Pillow (src/libImaging/Resample.c) makes each pixel of a new width a weighted sum of the pixels around it in its row,
rounds it to 8 bits, and repeats this for the height; weights are whole numbers of 2^-22. Here a single loop adds up
rows of bytes for both, many bytes in one vector instruction. For the width, a band of rows is transposed first, and the
pixels of a column become contiguous.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ...versions.numba import compiled

PRECISION_BITS = 22  # of a weight
HALF = np.int32(1 << (PRECISION_BITS - 1))
# Filter -> its number, and its reach in pixels on each side, times the scale if an image is made smaller.
Filter = Literal["bilinear", "bicubic", "lanczos"]
FILTERS: dict[Filter, tuple[int, float]] = {"bilinear": (0, 1.0), "bicubic": (1, 2.0), "lanczos": (2, 3.0)}
BILINEAR, BICUBIC = FILTERS["bilinear"][0], FILTERS["bicubic"][0]
# The parameter a of the cubic of Keys (1981), "Cubic convolution interpolation for digital image processing".
CUBIC = -0.5
BAND = 64  # rows that are resized in width together
SPAN = 1024  # bytes of a row that are added up together: their sums stay in the fastest cache
TILE = 16  # rows and columns that are transposed together
TERMS = 5  # rows that are added together: the filter's reach if an image hardly changes its size


def resize(image: NDArray[np.uint8], *, width: int, height: int, filter: Filter = "bicubic") -> NDArray[np.uint8]:
    """Resize an image, bit for bit like Pillow's resize with the filter: [..., H, W, 3] -> [..., height, width, 3].

    An image of this size is returned itself.
    """
    *frames, old_height, old_width, channels = image.shape
    if (old_width, old_height) == (width, height):
        return image
    pixels = np.require(image, np.uint8, ["C", "W"]).reshape(-1, old_height, old_width, channels)
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


@compiled
def _weights(
    size: int, new_size: int, filter: int, reach: float
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return for each new pixel: the weights of the old pixels (then zeros), the first old pixel, and the number of old
    pixels. The steps and roundings equal Pillow's.
    """
    scale = size / new_size
    stretch = max(scale, 1.0)
    support = reach * stretch
    most = int(np.ceil(support)) * 2 + 1
    weights = np.zeros((new_size, (most + TERMS - 1) // TERMS * TERMS), np.int32)
    first = np.empty(new_size, np.int64)
    number = np.empty(new_size, np.int64)
    exact = np.empty(most)
    for pixel in range(new_size):
        center = (pixel + 0.5) * scale
        start = max(int(center - support + 0.5), 0)
        stop = min(int(center + support + 0.5), size)
        total = 0.0
        for old in range(start, stop):
            exact[old - start] = _weight((old - center + 0.5) * (1.0 / stretch), filter)
            total += exact[old - start]
        for old in range(stop - start):
            weight = (exact[old] / total if total != 0.0 else exact[old]) * (1 << PRECISION_BITS)
            weights[pixel, old] = int(weight - 0.5) if weight < 0 else int(weight + 0.5)
        first[pixel], number[pixel] = start, stop - start
    return weights, first, number


@njit
def _weight(distance: float, filter: int) -> float:
    x = abs(distance)
    if filter == BILINEAR:
        return max(1.0 - x, 0.0)
    if filter != BICUBIC:  # lanczos
        return _sinc(x) * _sinc(x / 3.0) if x < 3.0 else 0.0
    if x < 1.0:
        return ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * CUBIC if x < 2.0 else 0.0


@njit
def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x != 0.0 else 1.0


@compiled
def _resize_rows(
    image: NDArray[np.uint8],
    weights: NDArray[np.int32],
    first: NDArray[np.int64],
    number: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Resize rows: [rows, 3 * old width] -> out [rows, 3 * new width]."""
    num_rows, row_bytes = image.shape
    band = min(BAND, num_rows)
    source, target = image.reshape(-1), out.reshape(-1)
    columns = np.empty(row_bytes * band, np.uint8)
    new_columns = np.empty(out.shape[1] * band, np.uint8)
    sums = np.empty(3 * band, np.int32)
    for begin in range(0, num_rows, band):
        row = min(begin, num_rows - band)  # the last band may have rows of the band before
        _transpose(source, row * row_bytes, band, row_bytes, columns, 0, band)
        for pixel in range(len(weights)):
            at = 3 * band * pixel
            _add_rows(
                columns, 3 * band * first[pixel], 3 * band, number[pixel], weights[pixel], sums,
                new_columns[at : at + 3 * band],
            )  # fmt: skip
        _transpose(new_columns, 0, out.shape[1], band, target, row * out.shape[1], out.shape[1])


@compiled
def _resize_columns(
    frames: NDArray[np.uint8],
    weights: NDArray[np.int32],
    first: NDArray[np.int64],
    number: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Resize columns: [frames, old height, 3 * width] -> out [frames, new height, 3 * width]."""
    row_bytes = frames.shape[2]
    sums = np.empty(SPAN, np.int32)
    for frame in range(len(frames)):
        source = frames[frame].reshape(-1)
        for row in range(len(weights)):
            for at in range(0, row_bytes, SPAN):
                new = out[frame, row, at : min(at + SPAN, row_bytes)]
                _add_rows(source, first[row] * row_bytes + at, row_bytes, number[row], weights[row], sums, new)


@njit
def _add_rows(
    source: NDArray[np.uint8],
    offset: int,
    stride: int,
    number: int,
    weights: NDArray[np.int32],
    sums: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> None:
    """Write the weighted sum of rows of bytes, from an offset of `source` on, `stride` bytes apart.

    Rows are always added by fives: zero weights follow the last weight, and repeat the last row.
    """
    width = len(out)
    last = offset + (number - 1) * stride
    sums[:width] = HALF
    for term in range(0, number, TERMS):
        begin = offset + term * stride
        rows = (
            source[begin:][:width],
            source[min(begin + stride, last) :][:width],
            source[min(begin + 2 * stride, last) :][:width],
            source[min(begin + 3 * stride, last) :][:width],
            source[min(begin + 4 * stride, last) :][:width],
        )
        of_row = (weights[term], weights[term + 1], weights[term + 2], weights[term + 3], weights[term + 4])
        if term + TERMS < number:
            for n in range(width):
                sums[n] = np.int32(sums[n] + _sum(rows, of_row, n))
        else:
            for n in range(width):
                level = np.int32(sums[n] + _sum(rows, of_row, n)) >> PRECISION_BITS
                out[n] = min(max(level, 0), 255)


@njit
def _sum(rows: tuple[NDArray[np.uint8], ...], weights: tuple[np.int32, ...], n: int) -> int:
    return (
        np.int32(rows[0][n]) * weights[0]
        + np.int32(rows[1][n]) * weights[1]
        + np.int32(rows[2][n]) * weights[2]
        + np.int32(rows[3][n]) * weights[3]
        + np.int32(rows[4][n]) * weights[4]
    )


@njit
def _transpose(
    source: NDArray[np.uint8],
    offset: int,
    num_rows: int,
    row_bytes: int,
    target: NDArray[np.uint8],
    target_offset: int,
    target_row_bytes: int,
) -> None:
    """Turn rows of bytes at an offset of the source into columns at an offset of the target."""
    if num_rows < TILE or row_bytes < TILE:
        for row in range(num_rows):
            for column in range(row_bytes):
                target[target_offset + column * target_row_bytes + row] = source[offset + row * row_bytes + column]
        return
    # The last tile of each row and column may have bytes of the tile before.
    for begin in range(0, row_bytes, TILE):
        column = min(begin, row_bytes - TILE)
        for begin_row in range(0, num_rows, TILE):
            row = min(begin_row, num_rows - TILE)
            read_from = source.ctypes.data + offset + row * row_bytes + column
            write_to = target.ctypes.data + target_offset + column * target_row_bytes + row
            _transpose_tile(np.uintp(read_from), np.uintp(row_bytes), np.uintp(write_to), np.uintp(target_row_bytes))


@intrinsic
def _transpose_tile(typing_context: Any, source: Any, stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose the 16 rows of 16 bytes at an address, `stride` bytes apart.

    Four times, row n is interleaved with row n + 8, for the full transposition; LLVM has an instruction for each step.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row_type, index_type = ir.VectorType(ir.IntType(8), TILE), ir.VectorType(ir.IntType(32), TILE)

        def address(begin: Any, row_bytes: Any, row: int) -> Any:
            moved = builder.add(begin, builder.mul(row_bytes, ir.Constant(row_bytes.type, row)))
            return builder.inttoptr(moved, row_type.as_pointer())

        rows = [builder.load(address(arguments[0], arguments[1], row), align=1) for row in range(TILE)]
        low, high = (
            ir.Constant(index_type, [start + n // 2 + n % 2 * TILE for n in range(TILE)]) for start in (0, TILE // 2)
        )
        for _ in range(4):
            pairs = list(zip(rows[: TILE // 2], rows[TILE // 2 :], strict=True))
            rows = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in (low, high)]
        for row in range(TILE):
            builder.store(rows[row], address(arguments[2], arguments[3], row), align=1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp, types.uintp), generate
