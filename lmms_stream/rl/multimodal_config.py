"""MultimodalConfig: limits on the media of prompts, by Relax's names and with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError

_HEARD = ("image_max_token_num", "image_min_token_num")


@dataclass(frozen=True)
class MultimodalConfig:
    """image_min_token_num, image_max_token_num: tokens of an image, which is resized to have so many, in whole tokens.

    Videos and sounds are given as bytes, so ConfigError for a limit on them that is not the default.
    """

    image_max_token_num: int = 16384
    image_min_token_num: int = 4
    image_resize_scale_factor: int | None = None
    video_min_token_num: int = 128
    video_max_token_num: int = 768
    video_fps: float = 2.0
    video_fps_min_frames: int = 4
    video_fps_max_frames: int = 768
    audio_sample_rate: int = 16000
    frame_factor: int = 2

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in _HEARD and value != each.default:
                raise ConfigError(
                    f"{each.name} is {value!r}, and nothing here resizes or samples so: leave it out, and do it where "
                    "the media are decoded, or prepare the rows so"
                )
        if not 1 <= self.image_min_token_num <= self.image_max_token_num:
            raise ConfigError(
                f"image_min_token_num is {self.image_min_token_num} and image_max_token_num "
                f"{self.image_max_token_num}: set 1 <= minimum <= maximum"
            )

    @classmethod
    def from_args(cls, args: Any) -> MultimodalConfig:
        """The limits that args have; defaults where they are None."""
        given = {each.name: getattr(args, each.name, None) for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})
