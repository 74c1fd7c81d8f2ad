"""Images and chosen frames of videos -> rows of patches, by the settings of a folder's image or video processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ..media.types import Interval
from .files import ProcessorFiles, check_followed
from .settings import MediaSettings

if TYPE_CHECKING:
    from ..media.facts import ImageFacts, VideoFacts


# Which frames of a video are read: facts and settings -> numbers of frames.


class Section(NamedTuple):
    """Frames [first, first + num_frames) of a video, shown for `seconds` seconds."""

    first: int
    num_frames: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """Number of frames to read: fps frames a second, or frame_num if given; from min_frames to max_frames.

    The number never exceeds the section's frames. start, end: the section in seconds, for videos without their own
    interval; end None: to the end of the video.
    """

    fps: float
    frame_num: int | None
    min_frames: int
    max_frames: int
    start: float = 0.0
    end: float | None = None

    def section(self, video: VideoFacts, interval: Interval | None = None) -> Section:
        """Return the section of a video that is read. interval: the video's own. DataError if the video ends before the
        section begins.
        """
        frames = (interval or Interval(self.start, self.end)).frames(video)
        return Section(frames.start, len(frames), len(frames) / video.fps)

    def num_frames(self, section: Section) -> int:
        """Number of frames that are read of a section."""
        wanted = self.frame_num
        if wanted is None:
            wanted = max(int(section.seconds * self.fps), self.min_frames)
        return min(wanted, self.max_frames, section.num_frames)


def starts_of_equal_parts(section: Section, num_frames: int) -> tuple[int, ...]:
    """First frame of each of num_frames parts of a section.

    >>> starts_of_equal_parts(Section(100, 10, 1.0), 4)
    (100, 102, 105, 107)
    """
    return tuple(section.first + each * section.num_frames // num_frames for each in range(num_frames))


def middles_of_equal_parts(section: Section, num_frames: int) -> tuple[int, ...]:
    """Middle frame of each of num_frames parts of a section.

    >>> middles_of_equal_parts(Section(100, 10, 1.0), 4)
    (101, 103, 106, 108)
    """
    total = section.num_frames
    return tuple(section.first + (2 * each + 1) * total // (2 * num_frames) for each in range(num_frames))


def ends_and_between(section: Section, num_frames: int) -> tuple[int, ...]:
    """First and last frame and evenly spaced frames between, rounded to the nearest; halves to the even number.

    >>> ends_and_between(Section(100, 10, 1.0), 4)
    (100, 103, 106, 109)
    """
    last = section.num_frames - 1
    numbers = np.rint(np.arange(num_frames) * last / max(num_frames - 1, 1)).astype(np.int64)
    return tuple((section.first + numbers).tolist())


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3  # of Pillow's resampling filters
_ALWAYS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC, "rescale_factor": 1 / 255}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """Patches of patch_size x patch_size pixels of temporal_patch_size frames; merge_size x merge_size become a token.

    min_pixels, max_pixels: of a resized image or frame (Qwen3-VL: of all frames of a video together). mean, std: of
    red, green and blue from 0 to 1.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(values: Mapping[str, Any], *, name: str) -> Vision:
        """Read the settings in preprocessor_config.json. ConfigError for unsupported settings. name: the folder."""
        check_followed(values, _ALWAYS, name=name)
        size = values.get("size") or {}
        try:
            return Vision(
                patch_size=int(values.get("patch_size", 14)),
                temporal_patch_size=int(values.get("temporal_patch_size", 2)),
                merge_size=int(values.get("merge_size", 2)),
                min_pixels=int(values.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
                max_pixels=int(values.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
                mean=tuple(map(float, values.get("image_mean") or CLIP_MEAN)),
                std=tuple(map(float, values.get("image_std") or CLIP_STD)),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"processor {name!r} has settings of images that are not numbers ({error}): save it again"
            ) from error

    def within(self, min_pixels: int | None, max_pixels: int | None) -> Vision:
        """Return a copy with the limits that are not None; if limits cross, the folder's limit changes."""
        lowest = min_pixels or min(self.min_pixels, max_pixels or self.min_pixels)
        highest = max_pixels or max(self.max_pixels, min_pixels or self.max_pixels)
        return replace(self, min_pixels=lowest, max_pixels=highest)

    @property
    def description(self) -> dict[str, int]:
        """Settings that can change a number of tokens or patches."""
        names = ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels")
        return {name: getattr(self, name) for name in names}

    @property
    def patch_values(self) -> int:
        """Numbers in a patch: a row of the tower's input."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def patches(self, frames: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Patches of frames, float32[P, patch_values]. frames: uint8[N, H, W, 3], sides in whole numbers of tokens.

        out: see to_patches.
        """
        from ..media.pixels import to_patches

        return to_patches(
            frames,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            mean=self.mean,
            std=self.std,
            out=out,
        )


def check_decoded(shape: tuple[int, ...], facts: ImageFacts) -> None:
    """Raise DataError unless an image of shape (height, width, …) has its facts' size, or this size at one of JPEG's
    scales.
    """
    from ..media.images import SCALES

    if any(shape[:2] == (-(-facts.height // scale), -(-facts.width // scale)) for scale in (1, *SCALES)):
        return
    raise DataError(
        f"an image is stored as of {facts.width} x {facts.height} pixels, and its bytes are of {shape[1]} x "
        f"{shape[0]}: convert the dataset again"
    )


# Settings of towers of square tiles.

NO_LIMIT = 1 << 31  # of frames
_LIMITS_OF_PIXELS = ("image_min_pixels", "image_max_pixels", "video_min_pixels", "video_max_pixels")


def square_side(size: Mapping[str, Any] | int | None, *, name: str, default: int) -> int:
    """Side of a size in a folder's file; ConfigError for a size that is not a square. name: the folder."""
    if isinstance(size, int):
        return size
    said = {key: value for key, value in (size or {}).items() if value is not None}
    sides = {int(said[key]) for key in ("height", "width", "shortest_edge", "longest_edge") if key in said}
    if len(sides) > 1:
        raise ConfigError(f"processor {name!r} has tiles of size {said}, but only squares are supported: save it again")
    return next(iter(sides), default)


def numbers_of_tiles(files: ProcessorFiles, settings: MediaSettings, *, side: int) -> tuple[int, int]:
    """Minimum and maximum number of tiles of an image: the user's limits override the folder's."""
    lowest, highest = int(files.image.get("min_patches", 1)), int(files.image.get("max_patches", 12))
    if settings.image_max_pixels is not None:
        highest = max(1, settings.image_max_pixels // side**2)
        lowest = min(lowest, highest)
    if settings.image_min_pixels is not None:
        lowest = math.ceil(settings.image_min_pixels / side**2)
        highest = max(lowest, highest)
    return lowest, highest


def refuse_pixels(settings: MediaSettings, names: Sequence[str] = _LIMITS_OF_PIXELS, *, family: str) -> None:
    """Raise ConfigError for limits on pixels, for a family whose tiles have one size."""
    for name in names:
        if (value := getattr(settings, name)) is not None:
            raise ConfigError(
                f"processor.{name} {value} is not supported: {family} reads tiles of a fixed size, and their number "
                "follows from its own settings: leave it out"
            )


def choice_of(
    files: ProcessorFiles,
    settings: MediaSettings,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int = NO_LIMIT,
) -> FrameChoice:
    """Choice of frames by the user's settings, or a folder's file, or the defaults in the arguments: frames a second,
    or a number.
    """
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
