"""The seconds of a video that are read. What a part says of them -> an interval -> the frames in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import DataError
from .types import VideoFacts

INTERVAL_KEYS = ("video_start", "video_end")
_ROUNDING = 1e-6  # of a frame: seconds times frames a second may miss a whole number by so much


class Interval(NamedTuple):
    """Seconds [start, end) of a video; end None, or behind the video's: to its end."""

    start: float = 0.0
    end: float | None = None

    def frames(self, video: VideoFacts) -> range:
        """The numbers of its frames. DataError where there are none, as where the video ends before it begins."""
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
        """What a part says of it."""
        return {name: value for name, value in zip(INTERVAL_KEYS, self, strict=True) if value is not None}

    def __str__(self) -> str:
        return f"seconds {self.start:g} to {'the end' if self.end is None else f'{self.end:g}'}"


def interval_of(part: Mapping[str, Any]) -> Interval | None:
    """What a part's video_start and video_end say; None where it has neither.

    DataError for what are no seconds, and for an end that does not lie behind the start.
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
