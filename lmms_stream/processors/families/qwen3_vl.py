"""Qwen3-VL: pairs of frames are separate in the text, each after its time in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from .family import Layout, TokenIds
from .files import ProcessorFiles
from .qwen_vl import END, START, VIDEO, PatchGrid, QwenVL, check_aspect
from .settings import MediaSettings
from .vision import Section, ends_and_between

if TYPE_CHECKING:
    from typing import Self

    from ..media.facts import VideoFacts
    from ..media.types import Interval


@dataclass(frozen=True, kw_only=True)
class Qwen3VL(QwenVL):
    """See Family. frame_max_pixels: of a frame of a video, in addition to the limits on the pixels of all its
    frames.
    """

    frame_max_pixels: int | None = None

    name = "Qwen3-VL"
    model_types = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    processor_classes = ("Qwen3VLProcessor",)
    image_defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    video_defaults: ClassVar[Mapping[str, Any]] = {
        **image_defaults,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
    }

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Self:
        """See FamilyMaker."""
        return replace(super().of(files, settings, token_ids), frame_max_pixels=settings.frame_max_pixels)

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        limit = {} if self.frame_max_pixels is None else {"frame_max_pixels": self.frame_max_pixels}
        return {**super().description, **limit}

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """See QwenVL. A single frame is read twice."""
        videos, section = self.videos, self.choice.section(facts, interval)
        num_frames = self.choice.num_frames(section)
        height, width = self._fitting(max(num_frames, videos.temporal_patch_size), facts.height, facts.width)
        grid = self.grid_of(num_frames, height, width)
        counts = (grid[1] * grid[2] // videos.merge_size**2,) * grid[0]
        seconds = [f"<{each:.1f} seconds>" for each in self._seconds(self.chosen(section, num_frames), facts.fps)]
        text = "".join(f"{each}{START}{VIDEO}{END}" for each in seconds)
        return Layout(
            "video", counts, math.prod(grid), text, PatchGrid(facts, width, height, grid, section, num_frames)
        )

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """See QwenVL."""
        return ends_and_between(section, num_frames)

    def runs(self, layout: Layout) -> list[tuple[int, int, int, float]]:
        """See QwenVL."""
        ((num_times, height, width, steps),) = super().runs(layout)
        return [(1, height, width, steps)] * num_times

    def _seconds(self, frames: tuple[int, ...], fps: float) -> list[float]:
        """The second in the middle of each group of frames; the last group may repeat its last frame."""
        size = self.videos.temporal_patch_size
        times = [frame / fps for frame in frames]
        times += times[-1:] * (-len(times) % size)
        return [(first + last) / 2 for first, last in zip(times[::size], times[size - 1 :: size], strict=True)]

    def _fitting(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of frames with sides in whole numbers of tokens, within the limits on pixels of all frames.

        The same arithmetic as smart_resize of transformers' Qwen3VLVideoProcessor; versions before 5.18 refuse sides
        shorter than a token's.
        """
        videos = self.videos
        factor, group = videos.patch_size * videos.merge_size, videos.temporal_patch_size
        check_aspect(height, width)
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        num_pixels = round(num_frames / group) * group * new_height * new_width
        max_pixels = videos.max_pixels
        if self.frame_max_pixels is not None:  # never below the processor's own lower limit
            max_pixels = min(max_pixels, max(videos.min_pixels, num_frames * self.frame_max_pixels))
        if num_pixels > max_pixels:
            shrink = math.sqrt((num_frames * height * width) / max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif num_pixels < videos.min_pixels:
            grow = math.sqrt(videos.min_pixels / (num_frames * height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width


FAMILY = Qwen3VL
