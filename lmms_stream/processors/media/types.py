"""Facts of media, from which their tokens are counted; the seconds of a video to read; memory of arrays. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import DataError


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


# The seconds of a video to read -> an interval -> the frames in it.

INTERVAL_KEYS = ("video_start", "video_end")
_ROUNDING = 1e-6  # of a frame: seconds times frames a second may miss a whole number by so much


class Interval(NamedTuple):
    """Seconds [start, end) of a video; end None, or behind the video's: to its end."""

    start: float = 0.0
    end: float | None = None

    def frames(self, video: VideoFacts) -> range:
        """Return the numbers of its frames. DataError if there are none, because the video ends before the interval
        begins."""
        first = max(0, math.ceil(self.start * video.fps - _ROUNDING))
        stop = video.frames if self.end is None else min(video.frames, math.ceil(self.end * video.fps - _ROUNDING))
        if first >= stop:
            raise DataError(
                f"a video of {video.frames} frames, {video.fps:g} a second, has none from second {self.start:g} to "
                f"{'its end' if self.end is None else f'{self.end:g}'}: change video_start and video_end, or remove it"
            )
        return range(first, stop)

    @property
    def said(self) -> dict[str, float]:
        """The fields of a part for it."""
        return {name: value for name, value in zip(INTERVAL_KEYS, self, strict=True) if value is not None}

    def __str__(self) -> str:
        return f"seconds {self.start:g} to {'the end' if self.end is None else f'{self.end:g}'}"


def interval_of(part: Mapping[str, Any]) -> Interval | None:
    """Return the interval of a part's video_start and video_end; None if it has neither. DataError for values that are
    not seconds, and for an end that is not after the start.
    """
    start, end = (part.get(name) for name in INTERVAL_KEYS)
    if start is None and end is None:
        return None
    for name, value in zip(INTERVAL_KEYS, (start, end), strict=True):
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise DataError(f"its {name} is {value!r}, expected seconds of the video, a number from 0 on: correct it")
    if end is not None and end <= (start or 0):
        raise DataError(
            f"its video_end, second {end:g}, does not lie behind its video_start, second {start or 0:g}: correct them"
        )
    return Interval(float(start or 0), None if end is None else float(end))
