"""Which frames of a video are read. Its facts and the user's settings -> numbers of frames, in whole numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..media.intervals import Interval

if TYPE_CHECKING:
    from ..media.facts import VideoFacts


class Section(NamedTuple):
    """The frames [first, first + num_frames) of a video, which are shown for so many seconds."""

    first: int
    num_frames: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """fps frames a second, or frame_num where that is given; at least min_frames and at most max_frames of them.

    Neither is more than the section has. start, end: the section, in seconds, of videos that do not say their own; end
    None: to the end of the video.
    """

    fps: float
    frame_num: int | None
    min_frames: int
    max_frames: int
    start: float = 0.0
    end: float | None = None

    def section(self, video: VideoFacts, interval: Interval | None = None) -> Section:
        """interval: the video's own. DataError where the video ends before the section begins."""
        frames = (interval or Interval(self.start, self.end)).frames(video)
        return Section(frames.start, len(frames), len(frames) / video.fps)

    def num_frames(self, section: Section) -> int:
        """How many are read of a section."""
        wanted = self.frame_num
        if wanted is None:
            wanted = max(int(section.seconds * self.fps), self.min_frames)
        return min(wanted, self.max_frames, section.num_frames)


def starts_of_equal_parts(section: Section, num_frames: int) -> tuple[int, ...]:
    """The first frame of each of num_frames parts of a section.

    >>> starts_of_equal_parts(Section(100, 10, 1.0), 4)
    (100, 102, 105, 107)
    """
    return tuple(section.first + each * section.num_frames // num_frames for each in range(num_frames))


def middles_of_equal_parts(section: Section, num_frames: int) -> tuple[int, ...]:
    """The frame in the middle of each of num_frames parts of a section.

    >>> middles_of_equal_parts(Section(100, 10, 1.0), 4)
    (101, 103, 106, 108)
    """
    total = section.num_frames
    return tuple(section.first + (2 * each + 1) * total // (2 * num_frames) for each in range(num_frames))


def ends_and_between(section: Section, num_frames: int) -> tuple[int, ...]:
    """The first frame and the last and, equally far apart, those between, to the nearest; halves to the even one.

    >>> ends_and_between(Section(100, 10, 1.0), 4)
    (100, 103, 106, 109)
    """
    last = section.num_frames - 1
    numbers = np.rint(np.arange(num_frames) * last / max(num_frames - 1, 1)).astype(np.int64)
    return tuple((section.first + numbers).tolist())
