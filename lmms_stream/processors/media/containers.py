"""Containers of videos and sounds, opened by PyAV. bytes -> a container and the stream of a kind in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Literal

from ...errors import ConfigError, DataError, LmmsStreamError
from .formats import media_format

MAX_FRAME_PIXELS = 178_956_970  # of a video: as many as Pillow decodes of an image, against decompression bombs
_DEMUXERS = {"mp4": "mov", "mov": "mov", "m4a": "mov", "webm": "matroska", "mkv": "matroska"}  # others by their name


@contextmanager
def opened(
    data: bytes, kind: Literal["video", "audio"], *, is_strict: bool = False, subject: str = "it"
) -> Iterator[tuple[Any, Any]]:
    """The container and its stream of a kind, to be decoded in one thread.

    is_strict: what the decoder finds wrong is an error. What PyAV cannot read or decode inside becomes a DataError, in
    which the media are called subject. ConfigError where PyAV is missing.
    """
    av = _library()
    name = media_format(data) or ""
    try:
        # With the format that the first bytes say, so that no other (a playlist, say) is tried, which may read files.
        with av.open(BytesIO(data), format=_DEMUXERS.get(name, name)) as container:
            stream = container.streams.best(kind)
            if stream is None or stream.codec_context is None:
                raise DataError(f"it has no {kind} that can be decoded: remove it, or write it with another codec")
            if kind == "video" and stream.width * stream.height > MAX_FRAME_PIXELS:
                raise DataError(
                    f"it has frames of {stream.width} x {stream.height} pixels, more than {MAX_FRAME_PIXELS}: make it "
                    "smaller beforehand"
                )
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            options = {"err_detect": "crccheck+explode"} if is_strict else {}
            if kind == "video":
                options["max_pixels"] = str(MAX_FRAME_PIXELS)  # also of frames that are larger than the header says
            stream.codec_context.options = options
            yield container, stream
    except LmmsStreamError:
        raise
    except (av.FFmpegError, ValueError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{subject} cannot be decoded ({reason}): repair or remove it") from error


def has_sound(data: bytes) -> bool:
    """Whether a video has sound beside its frames."""
    with opened(data, "video") as (container, _):
        return bool(container.streams.audio)


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            'videos and sounds are decoded by PyAV, which is missing: pip install "lmms-stream[media]"'
        ) from error
    return av
