"""Memory of batches, used again when nobody refers to it any more. tokens -> [rows] -> arrays.

Pieces of their size come fresh from the system each time and go back to it, page by page, which costs more than to
fill them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import Rows

MAX_FREE = 4  # pieces kept for later; a consumer that lets go of a batch when it has the next one needs two
GAP = 8 * 9  # between rows, so that the same token of each does not lie at the same offset in a page


def new_rows(num_tokens: int) -> Rows:
    """Rows of their own."""
    return Rows(*np.empty((3, 1, num_tokens), np.int64))


class RowMemory:
    """Gives rows, in memory that is taken back once all arrays and tensors that were made of them are gone."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.int64]] = []

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return RowMemory, ()  # its memory belongs to one process

    def rows(self, num_tokens: int) -> Rows:
        """Uninitialised rows."""
        needed = 3 * (num_tokens + GAP)
        piece = None
        while self._free and (piece is None or len(piece) < needed):  # pieces that are too small are freed
            piece = self._free.pop()
        if piece is None or len(piece) < needed:
            piece = np.empty(needed, np.int64)
        lent = np.frombuffer(piece.data, np.int64)  # views refer to it as their base, so it lives as long as they do
        weakref.finalize(lent, self._take_back, piece).atexit = False
        whole = lent[None]
        first, second, third = (number * (num_tokens + GAP) for number in range(3))
        return Rows(
            whole[:, first : first + num_tokens],
            whole[:, second : second + num_tokens],
            whole[:, third : third + num_tokens],
        )

    def _take_back(self, piece: NDArray[np.int64]) -> None:
        if len(self._free) < MAX_FREE:
            self._free.append(piece)
