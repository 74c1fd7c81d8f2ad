"""Media -> exact facts: from the header if it is exact, otherwise by decoding once."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError
from .formats import extension_of, is_cut_short, shown_mime
from .image_header import check_image, image_facts, image_size
from .types import FACT_TYPES, AudioFacts, Facts, ImageFacts, Interval, VideoFacts, check_samples, interval_of

__all__ = [
    "FACT_TYPES", "SOUND_OF_VIDEO", "AudioFacts", "Facts", "ImageFacts", "VideoFacts", "checked_facts", "facts_of",
    "sound_of_video", "sound_to_store", "stored_facts", "stored_sound",
]  # fmt: skip
SOUND_OF_VIDEO = ("sound_samples", "sound_rate")  # in a part of type video: AudioFacts of its sound


def facts_of(data: bytes, kind: str) -> Facts:
    """Facts about an image, a video or a sound. data: the bytes of its file.

    Images, WAV, FLAC, and MP4, MOV and AVI at a constant rate are read from their headers; a single frame of these
    videos is decoded. All others are decoded once. DataError for broken bytes, for empty media and for sounds with NaN;
    ConfigError if PyAV is needed and missing.
    """
    if kind == "image":
        return image_facts(data)
    if kind == "video":
        from .containers import video_facts

        return video_facts(data)
    if kind == "audio":
        known = sound_facts_of_header(data)
        if known is not None:
            return known
        from .containers import sound_facts

        return sound_facts(data)
    raise ConfigError(f"media of kind {kind!r} have no facts: choose one of {', '.join(FACT_TYPES)}")


def sound_of_video(data: bytes) -> AudioFacts | None:
    """Decode the sound of a video; return its facts, or None for a video without sound."""
    from .containers import has_sound, sound_facts

    return sound_facts(data) if has_sound(data) else None


def sound_to_store(data: bytes) -> dict[str, int]:
    """Facts of the sound of a video, by name. Empty for a video whose sound cannot be decoded: only a processor that
    reads the sound needs them.
    """
    try:
        found = sound_of_video(data)
    except DataError:
        return {}
    return {} if found is None else dict(zip(SOUND_OF_VIDEO, found, strict=True))


def stored_sound(part: Mapping[str, Any]) -> AudioFacts | None:
    """Facts about the sound of a video in a stored part; None for a part without these facts.

    DataError unless they are whole numbers above 0.
    """
    values = [part[name] for name in SOUND_OF_VIDEO if name in part]
    if not values:
        return None
    if len(values) < len(SOUND_OF_VIDEO) or any(type(value) is not int or value < 1 for value in values):
        said = {name: part.get(name) for name in SOUND_OF_VIDEO}
        raise DataError(
            f"a part of type 'video' says {said} of its sound, expected whole numbers above 0: convert the dataset "
            "again"
        )
    return AudioFacts(*values)


def checked_facts(data: bytes, kind: str) -> Facts:
    """Return facts like facts_of, after decoding all of the media: DataError if any part is broken."""
    if kind == "image":
        check_image(data)
        return image_facts(data)
    from .containers import sound_facts, video_facts

    if is_cut_short(data):
        raise DataError("it is cut short, with fewer bytes than in its header: repair or remove it")
    if kind == "video":
        return video_facts(data, is_checked=True)
    decoded, said = sound_facts(data, is_checked=True), sound_facts_of_header(data)
    if said not in (None, decoded):
        raise DataError(f"its header says {said}, decoding gives {decoded}: repair or remove it")
    return decoded


def stored_facts(part: Mapping[str, Any]) -> Facts | None:
    """Facts in a stored part; None for a part without facts, from earlier versions.

    DataError unless they are numbers above 0.
    """
    if part.get("type") == "image":  # most media are images: a shortcut in a third of the time
        width, height = part.get("width"), part.get("height")
        if type(width) is int and type(height) is int and width > 0 and height > 0:
            return ImageFacts(width, height)
    fact_type = FACT_TYPES.get(str(part.get("type")))
    if fact_type is None:
        return None
    try:
        values = [part[name] for name in fact_type._fields]
    except KeyError:
        return None
    for name, value in zip(fact_type._fields, values, strict=True):
        allowed = (int, float) if name == "fps" else (int,)
        if type(value) not in allowed or not math.isfinite(value) or value <= 0:
            what = "a number" if name == "fps" else "a whole number"
            raise DataError(
                f"a part of type {part['type']!r} has the {name} {value!r}, expected {what} above 0: convert the "
                "dataset again"
            )
    return fact_type(*values)


# The header of a WAV or FLAC file -> its samples and their rate, exact. bytes -> numbers, by hand.

_WAV_FLOAT, _WAV_EXTENSIBLE = 3, 0xFFFE
_WAV_FLOATS = {32: "<f4", 64: "<f8"}  # by their bits
_WAV_BITS = {1: (8, 16, 24, 32), _WAV_FLOAT: (*_WAV_FLOATS,)}  # of decodable whole numbers and floats
_WAV_HEADER = struct.Struct("<HHIIHH")
_STREAMINFO = 0


def sound_facts_of_header(data: bytes) -> AudioFacts | None:
    """Return the facts in the header; None for other files, and for a header without the number of samples."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav(data)
    return _flac(data) if data[:4] == b"fLaC" else None


def _wav(data: bytes) -> AudioFacts | None:
    """RIFF chunks (Microsoft and IBM, 1991): "fmt " has the size of samples, "data" has the samples.

    DataError for floats that are not numbers. None for a header without the number of samples (written to a pipe), and
    for a file that was cut.
    """
    offset, frame_bytes, rate, floats = 12, 0, 0, None
    while offset + 8 <= len(data):
        name, size = data[offset : offset + 4], int.from_bytes(data[offset + 4 : offset + 8], "little")
        offset += 8
        if name == b"fmt ":
            form, channels, rate, _, frame_bytes, bits = _WAV_HEADER.unpack(data[offset : offset + 16].ljust(16, b"\0"))
            if form == _WAV_EXTENSIBLE:
                form = int.from_bytes(data[offset + 24 : offset + 26], "little")
            if bits not in _WAV_BITS.get(form, ()) or frame_bytes != channels * bits // 8:
                return None
            floats = _WAV_FLOATS[bits] if form == _WAV_FLOAT else None
        elif name == b"data":
            is_said = 0 < rate < 1 << 31 and 0 < frame_bytes <= size <= len(data) - offset  # decoders count in int32
            if is_said and floats is not None:
                num_values = size // frame_bytes * (frame_bytes // np.dtype(floats).itemsize)
                check_samples(np.frombuffer(data, floats, num_values, offset))
            return AudioFacts(size // frame_bytes, rate) if is_said else None
        offset += size + size % 2
    return None


def _flac(data: bytes) -> AudioFacts | None:
    """STREAMINFO, the first metadata block (RFC 9639, 8.2): 20 bits of rate and 36 of samples, 0 if not known."""
    if len(data) < 26 or data[4] & 0x7F != _STREAMINFO:
        return None
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return AudioFacts(samples, rate) if rate and samples else None


# The media of a stored sample: byte ranges and facts of its parts. Nothing is decoded.


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """A medium of a sample. kind: "image", "audio", "video" or the sample's own name; mime: from the sample, or "".

    facts: from the sample, or None. interval: of a video, the seconds to read. sound: of a video, the sample's facts
    about its sound.
    """

    kind: str
    mime: str
    data: bytes
    facts: Facts | None = None
    interval: Interval | None = None
    sound: AudioFacts | None = None

    @property
    def real_mime(self) -> str:
        """The format by the first bytes, or else by the sample."""
        return shown_mime(self.data, self.kind) or self.mime

    @property
    def extension(self) -> str:
        return extension_of(self.real_mime)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Width and height in pixels, turned by EXIF, from the header; None for anything but an image of a known
        format.
        """
        return image_size(self.data) if self.real_mime.startswith("image/") else None


def media_part(part: dict[str, Any], media: bytes) -> MediaPart:
    """Read a part of a message that is not text. DataError for a span outside of the sample's media, for facts that are
    not numbers above 0, and for an invalid interval.
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
    """All media of a sample in the order of its messages; DataError for a wrong span."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [media_part(part, media) for content in contents for part in content if part["type"] != "text"]
