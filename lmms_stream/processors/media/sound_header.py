"""The header of a WAV or FLAC file -> its samples and their rate, exact. bytes -> numbers, by hand."""

from __future__ import annotations

from typing import NamedTuple

from .fact_types import AudioFacts

_WAV_FORMATS = (1, 3, 0xFFFE)  # whole numbers, floats, and either with a longer header: samples of equal size
_UNKNOWN_BYTES = 0x7FFF0000  # at least this is said by programs that write to a pipe
_STREAMINFO = 0


def sound_facts_of_header(data: bytes) -> AudioFacts | None:
    """None for other files, and for those whose header does not say how many samples there are."""
    if data[:4] == b"fLaC":
        return _flac(data)
    wav = _wav(data)
    if wav is None or wav.is_piped or wav.said_bytes > wav.found_bytes or wav.said_bytes < wav.frame_bytes:
        return None
    return AudioFacts(wav.said_bytes // wav.frame_bytes, wav.rate)


def is_cut_short(data: bytes) -> bool:
    """Whether a WAV file has less than it says; no other files are looked at."""
    wav = _wav(data)
    return wav is not None and not wav.is_piped and wav.said_bytes > wav.found_bytes


class _Wav(NamedTuple):
    """frame_bytes: of a sample of all channels. said_bytes, found_bytes: of all samples."""

    rate: int
    frame_bytes: int
    said_bytes: int
    found_bytes: int

    @property
    def is_piped(self) -> bool:
        """It was written before its size was known."""
        return self.said_bytes == 0 or self.said_bytes >= _UNKNOWN_BYTES


def _wav(data: bytes) -> _Wav | None:
    """RIFF chunks (Microsoft and IBM, 1991): "fmt " says of what size samples are, "data" holds them."""
    offset, frame_bytes, rate = 12, 0, 0
    while data[:4] == b"RIFF" and data[8:12] == b"WAVE" and offset + 8 <= len(data):
        name, size = data[offset : offset + 4], int.from_bytes(data[offset + 4 : offset + 8], "little")
        offset += 8
        if name == b"fmt ":
            if int.from_bytes(data[offset : offset + 2], "little") not in _WAV_FORMATS:
                return None
            rate = int.from_bytes(data[offset + 4 : offset + 8], "little")
            frame_bytes = int.from_bytes(data[offset + 12 : offset + 14], "little")
        elif name == b"data":
            return _Wav(rate, frame_bytes, size, len(data) - offset) if rate and frame_bytes else None
        offset += size + size % 2
    return None


def _flac(data: bytes) -> AudioFacts | None:
    """STREAMINFO, the first metadata block (RFC 9639, 8.2): 20 bits of rate and 36 of samples, 0 where not known."""
    if len(data) < 26 or data[4] & 0x7F != _STREAMINFO:
        return None
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return AudioFacts(samples, rate) if rate and samples else None
