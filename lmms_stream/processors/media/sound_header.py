"""The header of a WAV or FLAC file -> its samples and their rate, exact. bytes -> numbers, by hand."""

from __future__ import annotations

from .fact_types import AudioFacts

_WAV_FORMATS = (1, 3, 0xFFFE)  # whole numbers, floats, and either with a longer header: samples of equal size
_STREAMINFO = 0


def sound_facts_of_header(data: bytes) -> AudioFacts | None:
    """None for other files, and for those whose header does not say how many samples there are."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav(data)
    return _flac(data) if data[:4] == b"fLaC" else None


def _wav(data: bytes) -> AudioFacts | None:
    """RIFF chunks (Microsoft and IBM, 1991): "fmt " says of what size samples are, "data" holds them.

    What was written to a pipe does not say how many they are, and what was cut has fewer: None.
    """
    offset, frame_bytes, rate = 12, 0, 0
    while offset + 8 <= len(data):
        name, size = data[offset : offset + 4], int.from_bytes(data[offset + 4 : offset + 8], "little")
        offset += 8
        if name == b"fmt ":
            if int.from_bytes(data[offset : offset + 2], "little") not in _WAV_FORMATS:
                return None
            rate = int.from_bytes(data[offset + 4 : offset + 8], "little")
            frame_bytes = int.from_bytes(data[offset + 12 : offset + 14], "little")
        elif name == b"data":
            is_said = rate and 0 < frame_bytes <= size <= len(data) - offset
            return AudioFacts(size // frame_bytes, rate) if is_said else None
        offset += size + size % 2
    return None


def _flac(data: bytes) -> AudioFacts | None:
    """STREAMINFO, the first metadata block (RFC 9639, 8.2): 20 bits of rate and 36 of samples, 0 where not known."""
    if len(data) < 26 or data[4] & 0x7F != _STREAMINFO:
        return None
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return AudioFacts(samples, rate) if rate and samples else None
