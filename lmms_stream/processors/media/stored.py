"""The media of a stored messages sample: where its parts lie, and what they are. Nothing is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DataError
from .facts import AudioFacts, Facts, stored_facts, stored_sound
from .formats import extension_of, shown_mime
from .image_header import image_size
from .types import Interval, interval_of


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """kind: "image", "audio", "video" or what the sample calls it; mime: as the sample says, "" where it does not.

    facts: as the sample says, None where it does not. interval: of a video, the seconds that are read of it. sound: of
    a video, the facts about its sound, as the sample says.
    """

    kind: str
    mime: str
    data: bytes
    facts: Facts | None = None
    interval: Interval | None = None
    sound: AudioFacts | None = None

    @property
    def real_mime(self) -> str:
        """What the first bytes say, and where they say nothing, what the sample says."""
        return shown_mime(self.data, self.kind) or self.mime

    @property
    def extension(self) -> str:
        return extension_of(self.real_mime)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Width and height in pixels as shown, from the header; None for what is no image of a kind that is known."""
        return image_size(self.data) if self.real_mime.startswith("image/") else None


def media_part(part: dict[str, Any], media: bytes) -> MediaPart:
    """The part of a message that is not text; DataError for a span outside of the sample's media, for facts that are no
    numbers above 0, and for an interval that is none.
    """
    kind, span = str(part.get("type")), part.get("span")
    if not isinstance(span, Sequence) or len(span) != 2 or not all(type(number) is int for number in span):
        raise DataError(f"a part of type {kind!r} has no span [offset, size] but {span!r}: convert the dataset again")
    offset, size = span
    if offset < 0 or size < 1 or offset + size > len(media):
        raise DataError(
            f"a part of type {kind!r} lies at bytes [{offset}, {offset + size}) of {len(media)} bytes of media: "
            "convert the dataset again"
        )
    data, facts = media[offset : offset + size], stored_facts(part)
    interval, sound = (interval_of(part), stored_sound(part)) if kind == "video" else (None, None)
    mime = str(part.get("mime") or "")
    return MediaPart(kind=kind, mime=mime, data=data, facts=facts, interval=interval, sound=sound)


def media_parts(messages: Sequence[dict[str, Any]], media: bytes) -> list[MediaPart]:
    """All media of a sample in the order of its messages; DataError for one whose span is wrong."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [media_part(part, media) for content in contents for part in content if part["type"] != "text"]
