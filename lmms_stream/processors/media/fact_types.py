"""What is known of media without decoding them: the numbers that their tokens are counted from."""

from __future__ import annotations

from typing import NamedTuple


class ImageFacts(NamedTuple):
    """In pixels, as the image is shown: its EXIF orientation is applied."""

    width: int
    height: int


class VideoFacts(NamedTuple):
    """width, height: in pixels, as it is shown: rotated where it says so. frames: that decoding gives. fps: average."""

    width: int
    height: int
    frames: int
    fps: float


class AudioFacts(NamedTuple):
    """samples: of each channel, that decoding gives. rate: of them a second."""

    samples: int
    rate: int


Facts = ImageFacts | VideoFacts | AudioFacts

FACT_TYPES: dict[str, type[ImageFacts] | type[VideoFacts] | type[AudioFacts]] = {
    "image": ImageFacts,
    "video": VideoFacts,
    "audio": AudioFacts,
}
