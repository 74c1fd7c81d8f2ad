"""Facts of media, the basis of their token counts; the seconds of a video to read; memory of arrays. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import DataError


class ImageFacts(NamedTuple):
    """Size of an image in pixels, with its EXIF orientation applied."""

    width: int
    height: int


class VideoFacts(NamedTuple):
    """Facts of a video. width, height: in square pixels, after its rotation. frames: number of decoded frames. fps:
    average.
    """

    width: int
    height: int
    frames: int
    fps: float


class AudioFacts(NamedTuple):
    """Facts of a sound. samples: number of decoded samples of each channel. rate: samples a second."""

    samples: int
    rate: int


Facts = ImageFacts | VideoFacts | AudioFacts

MAX_SAMPLE = 2.0**31  # of floats: above, the powers of a spectrum are infinite


def check_samples(samples: NDArray[Any], *, subject: str = "it") -> None:
    """Raise DataError for NaN, infinite samples, and samples above MAX_SAMPLE in a sound: features would be NaN."""
    if samples.dtype.kind == "f" and samples.size and not max(samples.max(), -samples.min()) <= MAX_SAMPLE:
        wrong = samples[~(np.abs(samples) <= MAX_SAMPLE)]
        raise DataError(
            f"{subject} has {len(wrong)} samples such as {wrong[0]}, expected floats from -1 to 1: repair or remove it"
        )


FACT_TYPES: dict[str, type[ImageFacts] | type[VideoFacts] | type[AudioFacts]] = {
    "image": ImageFacts,
    "video": VideoFacts,
    "audio": AudioFacts,
}


# Memory of large arrays of media.


class Memory(Protocol):
    """Allocator of arrays of media."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array; arrays of the same name are joined on axis 0."""
        ...


def new_memory(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Allocate an array in new memory."""
    return np.empty(shape, dtype)


# The seconds of a video to read -> an interval -> the frames in it.

INTERVAL_KEYS = ("video_start", "video_end")
_ROUNDING = 1e-6  # of a frame: rounding error of seconds times frames a second


class Interval(NamedTuple):
    """Seconds [start, end) of a video; end None, or behind the video's end: to its end."""

    start: float = 0.0
    end: float | None = None

    def frames(self, video: VideoFacts) -> range:
        """Return the numbers of its frames. DataError if the video ends before the interval begins."""
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
        """Fields of a part for the interval."""
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
            raise DataError(f"its {name} is {value!r}, expected seconds of the video, 0 or more: correct it")
    if end is not None and end <= (start or 0):
        raise DataError(
            f"its video_end, second {end:g}, is not after its video_start, second {start or 0:g}: correct them"
        )
    return Interval(float(start or 0), None if end is None else float(end))
