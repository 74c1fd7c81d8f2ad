"""Small real media, made on the spot, and the first bytes of those that nothing here can make."""

from __future__ import annotations

import wave
from io import BytesIO

from PIL import Image

from ..processors.media.clips import video_bytes

CLIP = video_bytes(num_frames=12, size=(48, 32), sound=True)  # an MP4 with a picture and a sound
CLIP_FACTS = {"width": 48, "height": 32, "frames": 12, "fps": 10.0}
CLIP_SOUND_FACTS = {"samples": 4096, "rate": 16000}
CLIP_SOUND_OF_VIDEO = {f"sound_{name}": number for name, number in CLIP_SOUND_FACTS.items()}


def image_bytes(form: str = "PNG", *, size: tuple[int, int] = (4, 3), color: int = 0, mode: str = "RGB") -> bytes:
    """An image that differs from those of other colors."""
    buffer = BytesIO()
    Image.new("RGB", size, (color % 256, color // 256, 50)).convert(mode).save(buffer, format=form)
    return buffer.getvalue()


def wav_bytes(*, num_samples: int = 8, value: int = 1) -> bytes:
    buffer = BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(value.to_bytes(2, "little") * num_samples)
    return buffer.getvalue()


def box(brand: bytes, *compatible: bytes) -> bytes:
    """The file type box that ISO media begin with (ISO 14496-12, 4.3), and the next one's header."""
    body = b"ftyp" + brand + bytes(4) + b"".join(compatible)
    return (len(body) + 4).to_bytes(4, "big") + body + b"\0\0\0\x08free"


def ebml(document: bytes, before: bytes = b"") -> bytes:
    """The header that Matroska files begin with (RFC 8794): elements before, if any, and the DocType."""
    elements = before + b"\x42\x82" + bytes([0x80 | len(document)]) + document
    return b"\x1a\x45\xdf\xa3\x01" + len(elements).to_bytes(7, "big") + elements + b"\x18\x53\x80\x67\xff"


VERSIONS = b"\x42\x86\x81\x01\x42\xf7\x81\x01\x42\xf2\x81\x04\x42\xf3\x81\x08"  # as ffmpeg writes them
MP4 = box(b"isom", b"isom", b"iso2", b"avc1", b"mp41")
HEADERS = {  # first bytes -> what they are, as a medium of its own kind
    "audio/mpeg": [b"ID3\x04\0\0\0\0\0\0", b"\xff\xfb\x90\x64\0\0\0\0", b"\xff\xfd\x90\x64\0\0\0\0"],
    "audio/flac": [b"fLaC\0\0\0\x22", b"ID3\x04\0\0\0\0\x01\x02" + bytes(130) + b"fLaC\0\0\0\x22"],
    "audio/aac": [b"\xff\xf1\x60\x40\x01\x1f\xfc\0\xff\xf1", b"\xff\xf9\x60\x40\x20\x1f\xfc\0"],
    "audio/aiff": [b"FORM\0\0\x10\0AIFFCOMM", b"FORM\0\0\x10\0AIFCFVER"],
    "audio/basic": [b".snd\0\0\0\x18"],
    "audio/amr": [b"#!AMR\n", b"#!AMR-WB\n"],
    "audio/x-caf": [b"caff\0\1\0\0"],
    "audio/x-w64": [b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb"],
    "audio/x-wavpack": [b"wvpk\0\1\0\0"],
    "audio/x-tta": [b"TTA1\1\0"],
    "video/mp2t": [b"G" + bytes(187) + b"G", bytes(4) + b"G" + bytes(191) + b"G" + bytes(191) + b"G"],
    "video/mpeg": [b"\0\0\1\xba\x44"],
    "video/x-flv": [b"FLV\1\5"],
    "video/x-ms-wmv": [b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9"],
    "audio/ogg": [b"OggS\0\x02" + bytes(20)],
    "audio/mp4": [box(b"M4A ", b"M4A ", b"mp42"), box(b"M4B ", b"mp42")],
    "audio/wav": [b"RF64\xff\xff\xff\xffWAVEds64"],
    "video/mp4": [MP4, box(b"mp42", b"M4A "), box(b"dash")],
    "video/webm": [ebml(b"webm"), ebml(b"webm\0\0", VERSIONS)],
    "video/x-matroska": [ebml(b"matroska", VERSIONS), ebml(b"matroska", b"\xec\x40\x04webm"), ebml(b"")],
    "video/x-msvideo": [b"RIFF\x10\0\0\0AVI LIST"],
    "video/quicktime": [box(b"qt  "), b"\0\0\0\x08wide\0\0\0\0mdat"],
    "image/heic": [box(b"heic", b"mif1"), box(b"mif1", b"heic")],
    "image/avif": [box(b"avif"), box(b"mif1", b"avif")],
}
