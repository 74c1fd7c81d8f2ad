"""Small pictures, made on the spot."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

from PIL import Image, ImageOps


def turned(form: str, orientation: int, *, size: tuple[int, int] = (6, 4)) -> bytes:
    """A picture whose EXIF data say how it is turned to be shown."""
    buffer, exif = BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "a camera"
    Image.new("RGB", size, (9, 99, 199)).save(buffer, form, exif=exif)
    return buffer.getvalue()


def shown_size(data: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).size


def png_with(data: bytes, name: bytes, body: bytes, *, behind: bool) -> bytes:
    """A PNG with one more chunk, before or behind its pixels."""
    chunk = struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    at = data.index(b"IEND" if behind else b"IDAT") - 4
    return data[:at] + chunk + data[at:]


def noisy(form: str) -> bytes:
    buffer = BytesIO()
    Image.effect_noise((90, 70), 80).convert("RGB").save(buffer, form)
    return buffer.getvalue()
