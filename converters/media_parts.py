"""The media of a stored messages sample: where its parts lie, and what their first bytes say. Nothing is decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError

_MAGIC = (  # place, bytes there, what they mean
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (8, b"WAVE", "audio/wav"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
)
_EXTENSIONS = {mime: f".{mime.partition('/')[2]}" for _, _, mime in _MAGIC} | {
    "image/jpeg": ".jpg", "audio/mpeg": ".mp3", "audio/x-wav": ".wav", "audio/mp4": ".m4a", "image/tiff": ".tiff",
    "video/quicktime": ".mov", "video/x-msvideo": ".avi", "video/x-matroska": ".mkv",
}  # fmt: skip
_IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """kind: "image", "audio", "video" or what the sample calls it; mime: as the sample says, "" where it does not."""

    kind: str
    mime: str
    data: bytes

    @property
    def real_mime(self) -> str:
        """What the first bytes say, and where they say nothing, what the sample says."""
        return sniff(self.data) or self.mime

    @property
    def extension(self) -> str:
        return _EXTENSIONS.get(self.real_mime, ".bin")

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Width and height in pixels, from the header; None for what is no image of a kind that is known."""
        return image_size(self.data) if self.real_mime.startswith("image/") else None


def media_part(part: dict[str, Any], media: bytes) -> MediaPart:
    """The part of a message that is not text; DataError unless its span lies in the sample's media."""
    kind, span = str(part.get("type")), part.get("span")
    if not isinstance(span, Sequence) or len(span) != 2 or not all(type(number) is int for number in span):
        raise DataError(f"a part of type {kind!r} has no span [offset, size] but {span!r}: convert the dataset again")
    offset, size = span
    if offset < 0 or size < 1 or offset + size > len(media):
        raise DataError(
            f"a part of type {kind!r} lies at bytes [{offset}, {offset + size}) of {len(media)} bytes of media: "
            "convert the dataset again"
        )
    return MediaPart(kind=kind, mime=str(part.get("mime") or ""), data=media[offset : offset + size])


def media_parts(messages: Sequence[dict[str, Any]], media: bytes) -> list[MediaPart]:
    """All media of a sample in the order of its messages; DataError for one whose span is wrong."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [media_part(part, media) for content in contents for part in content if part["type"] != "text"]


def sniff(data: bytes) -> str | None:
    """The media type that the first bytes of a file show."""
    return next((mime for at, magic, mime in _MAGIC if data[at : at + len(magic)] == magic), None)


def image_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of an image, read from its header."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of images too large to be decoded, which is not done
            with Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS) as image:
                return int(image.width), int(image.height)
    except Exception:  # noqa: BLE001 - whatever Pillow raises for damaged bytes, or for too many pixels
        return None
