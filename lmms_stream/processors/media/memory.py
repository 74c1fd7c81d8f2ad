"""Where the large arrays of media lie: memory of their own, or what a loader gives."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Memory(Protocol):
    """Gives memory for arrays of media."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array of that name; arrays of a name are joined on axis 0."""
        ...


def new_memory(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Memory of its own for each array."""
    return np.empty(shape, dtype)
