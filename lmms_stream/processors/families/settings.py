"""Settings of users for reading media. Settings -> checked settings."""

from __future__ import annotations

from dataclasses import dataclass

from ...checks import check_fields
from ...errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSettings:
    """How media are read. None: as the processor's files say."""

    # Media
    image_min_pixels: int | None = None  # of an image, as the tower sees it, at least
    image_max_pixels: int | None = None  # the same, at most
    # of a frame, at least; of all frames of a video together where the family counts so (Qwen3-VL)
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None  # the same, at most
    frame_max_pixels: int | None = None  # of a frame, at most, where video_max_pixels is of all frames (Qwen3-VL)
    video_max_frames: int | None = None  # of a video, at most
    fps: float | None = None  # frames a second that are read, equally far apart
    frame_num: int | None = None  # frames of a video that are read, equally far apart, instead of fps
    # of LLaVA-OneVision: one of so many frames of a video has all its tokens, the others have a quarter; the model has
    # to be built with it, too (model.slow_every)
    slow_every: int | None = None
    frame_times: bool | None = None  # of LLaVA-OneVision: whether the text says when the frames of a video are shown
    video_start: float | None = None  # second at which videos begin whose parts do not say their own
    video_end: float | None = None  # second at which they end
    audio_max_length: float | None = None  # seconds of a sound that are read, at most; no more than the family reads
    use_audio_in_video: bool | None = None  # whether the sound of a video is read with its frames

    def __post_init__(self) -> None:
        check_fields(self, prefix="processor.")
        self._check_media()

    def _check_media(self) -> None:
        for name in (
            "image_min_pixels", "image_max_pixels", "video_min_pixels", "video_max_pixels", "video_max_frames",
            "frame_max_pixels", "frame_num", "slow_every",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"processor.{name} must be a whole number of at least 1, got {value!r}")
        for name in ("fps", "video_start", "video_end", "audio_max_length"):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(number))  # 2 and 2.0 measure the same, under the same name
        if self.audio_max_length is not None and not 0 < self.audio_max_length < float("inf"):
            raise ConfigError(
                f"processor.audio_max_length must be seconds of a sound, above 0, got {self.audio_max_length!r}"
            )
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise ConfigError(f"processor.fps must be above 0, got {self.fps!r}")
        if self.fps is not None and self.frame_num is not None:
            raise ConfigError(
                f"processor.fps {self.fps} and processor.frame_num {self.frame_num} both say how many frames of a "
                "video are read: set one of them"
            )
        for kind in ("image", "video"):
            lowest, highest = getattr(self, f"{kind}_min_pixels"), getattr(self, f"{kind}_max_pixels")
            if lowest is not None and highest is not None and lowest > highest:
                raise ConfigError(
                    f"processor.{kind}_min_pixels {lowest} is more than processor.{kind}_max_pixels {highest}: make it "
                    "smaller"
                )
        start, end = self.video_start, self.video_end
        if (start is not None and not 0 <= start < float("inf")) or (end is not None and not (start or 0) < end):
            raise ConfigError(
                f"processor.video_start {start} and processor.video_end {end} must be seconds of a video, from 0 on, "
                "of which the end lies behind the start: correct them"
            )
