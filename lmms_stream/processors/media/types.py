"""Facts of media, from which their tokens are counted; and memory for their arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


class ImageFacts(NamedTuple):
    """In pixels, as the image is shown: its EXIF orientation is applied."""

    width: int
    height: int


class VideoFacts(NamedTuple):
    """width, height: in pixels, as it is shown: rotated where it says so. frames: that decoding gives. fps: average."""

    width: int
    height: int
    frames: int
    fps: float


class AudioFacts(NamedTuple):
    """samples: of each channel, that decoding gives. rate: of them a second."""

    samples: int
    rate: int


Facts = ImageFacts | VideoFacts | AudioFacts

FACT_TYPES: dict[str, type[ImageFacts] | type[VideoFacts] | type[AudioFacts]] = {
    "image": ImageFacts,
    "video": VideoFacts,
    "audio": AudioFacts,
}


# Memory of large arrays of media.


class Memory(Protocol):
    """Gives memory for arrays of media."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array of that name; arrays of a name are joined on axis 0."""
        ...


def new_memory(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Memory of its own for each array."""
    return np.empty(shape, dtype)
