"""How families whose towers read square tiles are set: sides, limits, frames. files, settings -> values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from .files import ProcessorFiles
from .frames import FrameChoice
from .settings import MediaSettings

NO_LIMIT = 1 << 31  # of frames
_LIMITS_OF_PIXELS = ("image_min_pixels", "image_max_pixels", "video_min_pixels", "video_max_pixels")


def square_side(size: Mapping[str, Any] | int | None, *, name: str, default: int) -> int:
    """The side of a size that a folder's file says; ConfigError for one that is no square. name: the folder."""
    if isinstance(size, int):
        return size
    said = {key: value for key, value in (size or {}).items() if value is not None}
    sides = {int(said[key]) for key in ("height", "width", "shortest_edge", "longest_edge") if key in said}
    if len(sides) > 1:
        raise ConfigError(f"processor {name!r} has tiles of size {said}, and only squares are read here: save it anew")
    return next(iter(sides), default)


def numbers_of_tiles(files: ProcessorFiles, settings: MediaSettings, *, side: int) -> tuple[int, int]:
    """The least and the most tiles that an image is cut into: the folder's limits, which give way to the user's."""
    lowest, highest = int(files.image.get("min_patches", 1)), int(files.image.get("max_patches", 12))
    if settings.image_max_pixels is not None:
        highest = max(1, settings.image_max_pixels // side**2)
        lowest = min(lowest, highest)
    if settings.image_min_pixels is not None:
        lowest = math.ceil(settings.image_min_pixels / side**2)
        highest = max(lowest, highest)
    return lowest, highest


def refuse_pixels(settings: MediaSettings, names: Sequence[str] = _LIMITS_OF_PIXELS, *, family: str) -> None:
    """ConfigError for limits on pixels that are set, of a family whose tiles have one size."""
    for name in names:
        if (value := getattr(settings, name)) is not None:
            raise ConfigError(
                f"processor.{name} {value} cannot be followed: {family} reads tiles of one size, whose number follows "
                "from its own settings: leave it out"
            )


def choice_of(
    files: ProcessorFiles,
    settings: MediaSettings,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int = NO_LIMIT,
) -> FrameChoice:
    """The user's settings, those of a folder's file, or the defaults given here: frames a second, or a number."""
    said_fps, said_num = settings.fps, settings.frame_num
    if said_fps is None and said_num is None:
        said_fps, said_num = files.video.get("fps"), files.video.get("num_frames")
    if said_fps is None and said_num is None:
        said_fps, said_num = fps, num_frames
    return FrameChoice(
        fps=float(said_fps or 1.0),
        frame_num=said_num,
        min_frames=1,
        max_frames=settings.video_max_frames or max_frames,
        start=settings.video_start or 0.0,
        end=settings.video_end,
    )
