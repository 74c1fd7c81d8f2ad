"""Samples of a sound -> a picture of its waveform, for people to look at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 512, 96
_PAPER, _INK, _LINE = (255, 255, 255), (38, 90, 160), (200, 200, 200)


def waveform(samples: NDArray[np.float32], *, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """uint8[height, width, 3]: time from left to right; in each column, from the lowest to the highest sample there.

    The loudest reaches the edge.
    """
    picture = np.full((height, width, 3), _PAPER, np.uint8)
    picture[height // 2] = _LINE
    bounds = np.arange(width + 1) * len(samples) // width
    loudest = float(np.abs(samples).max(initial=0.0)) or 1.0
    for column in range(width):
        part = samples[bounds[column] : max(bounds[column + 1], bounds[column] + 1)]
        if len(part):
            top, bottom = (round((1 - float(value) / loudest) / 2 * (height - 1)) for value in (part.max(), part.min()))
            picture[top : bottom + 1, column] = _INK
    return picture
