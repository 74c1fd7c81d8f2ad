"""Formats of media, by their first bytes. bytes -> MIME type; whether a file ends too early."""

from __future__ import annotations

import re
from typing import Literal

from ...errors import DataError, if_lfs_pointer

Kind = Literal["image", "audio", "video"]

_MIMES: dict[str, dict[str, str]] = {
    "png": {"image": "image/png"},
    "jpeg": {"image": "image/jpeg"},
    "gif": {"image": "image/gif"},
    "webp": {"image": "image/webp"},
    "bmp": {"image": "image/bmp"},
    "tiff": {"image": "image/tiff"},
    "avif": {"image": "image/avif"},
    "heic": {"image": "image/heic"},
    "wav": {"audio": "audio/wav"},
    "mp3": {"audio": "audio/mpeg"},
    "flac": {"audio": "audio/flac"},
    "m4a": {"audio": "audio/mp4"},
    "ogg": {"audio": "audio/ogg", "video": "video/ogg"},  # either kind is possible: the reference specifies it
    "mp4": {"video": "video/mp4", "audio": "audio/mp4"},
    "webm": {"video": "video/webm", "audio": "audio/webm"},
    "mkv": {"video": "video/x-matroska", "audio": "audio/x-matroska"},
    "avi": {"video": "video/x-msvideo"},
    "mov": {"video": "video/quicktime", "audio": "audio/quicktime"},
    "mpegts": {"video": "video/mp2t", "audio": "audio/mp2t"},
    "mpeg": {"video": "video/mpeg"},
    "flv": {"video": "video/x-flv", "audio": "audio/x-flv"},
    "asf": {"video": "video/x-ms-wmv", "audio": "audio/x-ms-wma"},
    "aac": {"audio": "audio/aac"},
    "aiff": {"audio": "audio/aiff"},
    "au": {"audio": "audio/basic"},
    "amr": {"audio": "audio/amr"},
    "caf": {"audio": "audio/x-caf"},
    "w64": {"audio": "audio/x-w64"},
    "wv": {"audio": "audio/x-wavpack"},
    "tta": {"audio": "audio/x-tta"},
}
_EXTENSIONS = {mime: f".{name}" for name, mimes in reversed(_MIMES.items()) for mime in mimes.values()} | {
    "image/jpeg": ".jpg", "video/mp2t": ".ts", "audio/mp2t": ".ts", "video/mpeg": ".mpg", "video/x-ms-wmv": ".wmv",
    "audio/x-ms-wma": ".wma",
}  # fmt: skip
_STARTS = {
    b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif", b"II*\0": "tiff",
    b"MM\0*": "tiff", b"II+\0": "tiff", b"MM\0+": "tiff", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3",
    b"FLV\1": "flv", b"\0\0\1\xba": "mpeg", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf", b".snd": "au", b"#!AMR": "amr",
    b"caff\0": "caf", b"riff\x2e\x91\xcf\x11": "w64", b"wvpk": "wv", b"TTA1": "tta",
}  # fmt: skip
_RIFF_FORMS = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_BRANDS = {
    b"avif": "avif", b"avis": "avif", b"heic": "heic", b"heix": "heic", b"hevc": "heic", b"hevx": "heic",
    b"heim": "heic", b"heis": "heic", b"mif1": "heic", b"msf1": "heic", b"M4A ": "m4a", b"M4B ": "m4a", b"qt  ": "mov",
}  # fmt: skip
_EBML = b"\x1a\x45\xdf\xa3"
_DOCTYPE_ID = b"\x42\x82"
_SEGMENT_ID = b"\x18\x53\x80\x67"
_UNKNOWN_RIFF_BYTES = 0x7FFF0000  # this size or more is written by programs that write to a pipe
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_FRAMES_BYTES = 1 << 14  # more than two frames of AAC
_BITMAP_HEADER_BYTES = (12, 40, 52, 56, 64, 108, 124)


def media_format(data: bytes) -> str | None:
    """Name of the format by the first bytes (a key of _MIMES); None if unknown."""
    for start, name in _STARTS.items():
        if data.startswith(start):
            return name if name != "mp3" else _behind_tags(data)
    if data[:4] in (b"RIFF", b"RF64"):
        return _RIFF_FORMS.get(data[8:12])
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        compatible = data[16 : min(int.from_bytes(data[:4], "big"), 256)]
        if brand in (b"mif1", b"msf1") and b"avif" in compatible:
            return "avif"
        return _BRANDS.get(brand, "mp4")
    if data.startswith(_EBML):
        return "webm" if _document_type(data) == b"webm" else "mkv"
    if data[:2] == b"BM" and data[6:10] == bytes(4) and int.from_bytes(data[14:18], "little") in _BITMAP_HEADER_BYTES:
        return "bmp"
    if data[4:8] in _QUICKTIME_ATOMS:
        return "mov"
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if _is_transport_stream(data):
        return "mpegts"
    return "mp3" if _is_mp3_frame(data) else "aac" if _is_adts_frame(data) else None


def mime_type(data: bytes, kind: Kind) -> str:
    """MIME type of media of a kind; DataError for bytes of no known format, or of another kind."""
    name = media_format(data)
    if name is None and (problem := if_lfs_pointer(data)):
        raise DataError(f"it {problem}")
    if name is None:
        known = ", ".join(name for name, mimes in _MIMES.items() if kind in mimes)
        raise DataError(f"its first bytes {data[:8]!r} are of no known format: expected {known}")
    if kind not in _MIMES[name]:
        raise DataError(f"it is {next(iter(_MIMES[name].values()))}, where media of kind {kind} are expected")
    return _MIMES[name][kind]


def usual_kind(data: bytes) -> Kind | None:
    """Usual kind of media in a file, by its first bytes; None for bytes of no known format."""
    kinds: dict[str, Kind] = {"image": "image", "audio": "audio", "video": "video"}
    return next((kinds[kind] for kind in _MIMES.get(media_format(data) or "", {})), None)


def shown_mime(data: bytes, kind: str) -> str | None:
    """MIME type by the first bytes, of the kind if the format has several; None for bytes of no known format."""
    mimes = _MIMES.get(media_format(data) or "", {})
    return mimes.get(kind) or next(iter(mimes.values()), None)


def extension_of(mime: str) -> str:
    """Extension of file names of a MIME type."""
    return _EXTENSIONS.get(mime, ".bin")


def is_cut_short(data: bytes) -> bool:
    """Return whether the file is shorter than in its outermost header, for containers of videos and sounds with a size.

    These are RIFF (WAV, AVI), Matroska and ISO media. Files written to a pipe have no size.
    """
    if data[:4] == b"RIFF":
        size = int.from_bytes(data[4:8], "little")
        return len(data) - 8 < size < _UNKNOWN_RIFF_BYTES
    if data.startswith(_EBML):
        size, offset = _vint(data, len(_EBML))
        offset += size
        if data[offset : offset + 4] != _SEGMENT_ID:
            return offset > len(data)
        size, begin = _vint(data, offset + 4)
        is_unknown = size == (1 << 7 * (begin - offset - 4)) - 1
        return not is_unknown and begin + size > len(data)
    return media_format(data) in ("mp4", "mov", "m4a") and _boxes_end(data) > len(data)


def _boxes_end(data: bytes) -> int:
    """Offset of the end of the last box of ISO media (ISO 14496-12, 4.2)."""
    offset = 0
    while offset + 8 <= len(data):
        size = int.from_bytes(data[offset : offset + 4], "big")
        if size == 1:
            size = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if size < 8:  # 0: up to the end of the file
            return len(data)
        offset += size
    return offset


def _document_type(data: bytes) -> bytes:
    """DocType of an EBML header, from among its elements (RFC 8794, 6 and 11.2.4); b"" without a DocType."""
    size, offset = _vint(data, len(_EBML))
    stop = min(offset + size, len(data))
    while offset < stop:
        after_id = offset + _vint_width(data[offset])
        if after_id >= stop:
            break
        size, begin = _vint(data, after_id)
        if data[offset:after_id] == _DOCTYPE_ID:
            return data[begin : begin + size].rstrip(b"\0")
        offset = begin + size
    return b""


def _vint(data: bytes, offset: int) -> tuple[int, int]:
    """Read a number of variable size; return the number and the offset behind it. The leading zeros of the first byte
    are the number of bytes that follow.
    """
    first = data[offset : offset + 1] or b"\x80"
    stop = offset + _vint_width(first[0])
    return int.from_bytes(data[offset:stop], "big") & ((1 << 7 * (stop - offset)) - 1), stop


def _vint_width(first: int) -> int:
    return 9 - first.bit_length()


def _behind_tags(data: bytes) -> str:
    """Return the format of a sound with an ID3 tag, by the bytes behind the tag, or MP3. The tag's size has 7 bits a
    byte.
    """
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    found = media_format(data[10 + size : 10 + size + _FRAMES_BYTES])
    return found if found is not None and "audio" in _MIMES[found] else "mp3"


def _is_transport_stream(data: bytes) -> bool:
    """Check for packets of an MPEG transport stream (ISO 13818-1, 2.4.3): each begins with a sync byte, in M2TS after a
    time.
    """
    first, size = (0, 188) if data[:1] == b"G" else (4, 192)
    starts = range(first, min(len(data), first + 3 * size), size)
    return len(starts) > 1 and all(data[start] == ord("G") for start in starts)


def _is_adts_frame(data: bytes) -> bool:
    """Check for a frame of AAC (ISO 14496-3, 1.A.2.2) with a valid rate, followed by another frame or the end of the
    data.
    """
    if len(data) < 7 or data[0] != 0xFF or data[1] & 0xF6 != 0xF0 or data[2] >> 2 & 15 > 12:
        return False
    size = (data[3] & 3) << 11 | data[4] << 3 | data[5] >> 5
    following = data[size : size + 2]
    return size >= 7 and (len(following) < 2 or (following[0] == 0xFF and following[1] & 0xF6 == 0xF0))


def _is_mp3_frame(data: bytes) -> bool:
    """Check for a frame header of MPEG audio, layer II or III (ISO 11172-3, 2.4.1.3), with valid values."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return False
    version, layer, bitrate, rate = data[1] >> 3 & 3, data[1] >> 1 & 3, data[2] >> 4, data[2] >> 2 & 3
    return version != 1 and layer in (1, 2) and bitrate not in (0, 15) and rate != 3


_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
MIN_BASE64 = 44  # characters; a shorter text is a path


def looks_like_base64(text: str) -> bool:
    """Return whether a text is media in base64, and not a path: its alphabet, and a known format in its first bytes."""
    import base64

    if len(text) < MIN_BASE64 or not _BASE64.fullmatch(text):
        return False
    start = "".join(text[:512].split())
    return media_format(base64.b64decode(start[: len(start) // 4 * 4])) is not None
