"""SmolVLM: images as Idefics3 reads them; a video is a list of frames, each behind the minute at which it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from .family import Layout
from .files import ProcessorFiles
from .frames import FrameChoice, Section, ends_and_between
from .idefics3 import AROUND, IMAGE, WHOLE, Idefics3, with_longer_side
from .settings import MediaSettings
from .tiles import HALF, Shape, Tiles

if TYPE_CHECKING:
    from ..media.facts import VideoFacts
    from ..media.intervals import Interval

VIDEO = "<video>"
_MAX_FRAMES, _FPS = 64, 1.0  # of folders that do not say
_BICUBIC = 3  # transformers resizes frames by it where the folder says Lanczos
_DEFAULTS = {"image_mean": HALF, "image_std": HALF}
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True, kw_only=True)
class SmolVLM(Idefics3):
    """See Family. longest_of_frames: pixels of a frame's longer side before it becomes a tile."""

    longest_of_frames: int

    name = "SmolVLM"
    model_types = ("smolvlm",)
    processor_classes = ("SmolVLMProcessor",)
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE, "video": VIDEO}

    @classmethod
    def further(cls, files: ProcessorFiles, settings: MediaSettings, side: int) -> Mapping[str, Any]:
        """See Idefics3."""
        said = files.video.get("video_sampling") or {}
        size = said.get("video_size") or files.video.get("size") or {}
        choice = FrameChoice(
            fps=float(settings.fps or said.get("fps") or files.video.get("fps") or _FPS),
            frame_num=settings.frame_num,
            min_frames=1,
            max_frames=settings.video_max_frames
            or said.get("max_frames")
            or files.video.get("num_frames")
            or (settings.frame_num or _MAX_FRAMES),
            start=settings.video_start or 0.0,
            end=settings.video_end,
        )
        tiles = Tiles.of({**_DEFAULTS, **files.video, "resample": _BICUBIC}, side=side, name=files.name)
        return {"choice": choice, "video_tiles": tiles, "longest_of_frames": int(size.get("longest_edge") or side)}

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """See TiledFamily."""
        assert self.choice is not None
        section = self.choice.section(facts, interval)
        num_frames = max(1, self.choice.num_frames(section))
        length = timedelta(seconds=int(facts.frames / facts.fps))
        frames = [
            f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:{AROUND}{WHOLE}{IMAGE}{AROUND}"
            for second in (number / facts.fps for number in self.chosen(section, num_frames))
        ]
        text = (
            f"You are provided the following series of {in_words(num_frames)} frames from a {length} [H:MM:SS] video.\n"
            f"{''.join(frames)}\n\n"
        )
        shape = Shape(facts, num_frames, section=section, num_frames=num_frames)
        return Layout("video", (self.tokens,) * num_frames, num_frames, text, shape)

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """See TiledFamily."""
        return ends_and_between(section, num_frames)

    def frames_of(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """See TiledFamily. Resized twice, as transformers does."""
        from ..media.video import read_frames

        assert self.video_tiles is not None
        video = cast("VideoFacts", layout.shape.facts)
        width, height = with_longer_side(video.width, video.height, self.longest_of_frames)
        frames = read_frames(data, self.frames(layout), num_frames=video.frames, width=width, height=height)
        return self.video_tiles.resized(frames, width=self.video_tiles.side, height=self.video_tiles.side)


def in_words(number: int) -> str:
    """A number below a million as num2words of transformers' SmolVLMProcessor writes it.

    >>> in_words(64), in_words(121)
    ('sixty-four', 'one hundred and twenty-one')
    """
    if number < len(_ONES):
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    large, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, large)
    joint = ", " if rest >= 100 else " and "
    return f"{in_words(count)} {name}" + (f"{joint}{in_words(rest)}" if rest else "")


FAMILY = SmolVLM
