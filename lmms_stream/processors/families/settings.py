"""Settings of users for reading media. Settings -> checked settings."""

from __future__ import annotations

from dataclasses import dataclass

from ...checks import check_fields
from ...errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSettings:
    """Settings for reading media. None: the value in the processor's files."""

    # Media
    image_min_pixels: int | None = None  # minimum pixels of an image after resizing
    image_max_pixels: int | None = None  # maximum pixels of an image after resizing
    # minimum pixels of a frame after resizing; of all frames of a video together for Qwen3-VL
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None  # maximum pixels, likewise
    frame_max_pixels: int | None = None  # maximum pixels of a frame, if video_max_pixels is for all frames (Qwen3-VL)
    video_max_frames: int | None = None  # maximum frames of a video
    fps: float | None = None  # frames read per second of video, evenly spaced
    frame_num: int | None = None  # frames read of a video, evenly spaced, instead of fps
    # of LLaVA-OneVision: one in every slow_every frames of a video has all its tokens, the others have a quarter; the
    # model needs the same setting (model.slow_every)
    slow_every: int | None = None
    frame_times: bool | None = None  # of LLaVA-OneVision: whether the text has the times of a video's frames
    video_start: float | None = None  # start of videos in seconds, for parts without their own start
    video_end: float | None = None  # end of videos in seconds, likewise
    audio_max_length: float | None = None  # maximum seconds read of a sound, within the family's limit
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
                object.__setattr__(self, name, float(number))  # 2 and 2.0 measure the same, by the same name
        if self.audio_max_length is not None and not 0 < self.audio_max_length < float("inf"):
            raise ConfigError(
                f"processor.audio_max_length must be seconds of a sound, above 0, got {self.audio_max_length!r}"
            )
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise ConfigError(f"processor.fps must be above 0, got {self.fps!r}")
        if self.fps is not None and self.frame_num is not None:
            raise ConfigError(
                f"processor.fps {self.fps} and processor.frame_num {self.frame_num} both set the number of frames of a "
                "video: set only one of them"
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
                f"processor.video_start {start} and processor.video_end {end} must be seconds of a video, 0 or more, "
                "and the end must be after the start: correct them"
            )
