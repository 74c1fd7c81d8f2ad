"""The size of an image by its header is the size that decoding gives, turned as its EXIF data say."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import DataError
from lmms_stream.processors.media.facts import ImageFacts, checked_facts, facts_of
from lmms_stream.processors.media.image_header import fit_image, image_facts
from lmms_stream.processors.media.images import decode_image
from PIL import Image

from ...converters.media_files import image_bytes
from ...strategies import examples
from .pictures import png_with, shown_size, turned

ORIENTATIONS = range(1, 9)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_the_size_of_an_image_is_that_with_its_exif_orientation_applied(form: str, orientation: int) -> None:
    data = turned(form, orientation)
    facts = facts_of(data, "image")
    assert facts == checked_facts(data, "image") == shown_size(data)
    assert facts == ((4, 6) if orientation >= 5 else (6, 4))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_the_size_of_an_image_is_what_decoding_gives(form: str, mode: str) -> None:
    data = image_bytes(form, size=(37, 23), mode=mode)
    assert facts_of(data, "image") == checked_facts(data, "image") == shown_size(data) == ImageFacts(37, 23)


@pytest.mark.parametrize("behind", [False, True])
def test_a_png_may_say_its_orientation_before_or_behind_its_pixels(behind: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="8"/>'
    for name, body in ((b"eXIf", exif.tobytes()[6:]), (b"iTXt", xmp)):
        data = png_with(image_bytes(size=(6, 4)), name, body, behind=behind)
        assert facts_of(data, "image") == shown_size(data) == (4, 6)
    data = png_with(image_bytes(size=(6, 4)), b"tEXt", b"Comment\0of no use", behind=behind)
    assert facts_of(data, "image") == shown_size(data) == (6, 4)


def test_exif_data_that_are_damaged_turn_nothing() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        buffer = BytesIO()
        Image.new("RGB", (6, 4)).save(buffer, "JPEG", exif=exif)
        assert facts_of(buffer.getvalue(), "image") == (6, 4)
    assert facts_of(turned("JPEG", 9), "image") == (6, 4)


@examples(60)
@given(form=st.sampled_from(["JPEG", "PNG", "WEBP"]), width=st.integers(1, 300), height=st.integers(1, 300))
def test_headers_alone_are_read_of_images(form: str, width: int, height: int) -> None:
    data = turned(form, 6, size=(width, height))
    start = {"JPEG": data.find(b"\xff\xda") + 14, "PNG": data.find(b"IDAT") + 4, "WEBP": len(data)}[form]
    assert image_facts(data[:start] + bytes(9)) == (height, width) == shown_size(data)


@pytest.mark.parametrize(
    "form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "PNG behind its pixels", "JPEG XMP", "WEBP XMP"]
)
def test_an_image_made_smaller_is_turned_as_before(form: str) -> None:
    """Wherever the file says how it is turned: EXIF or XMP data, before or behind the pixels."""
    half = np.zeros((40, 60, 3), np.uint8)
    half[:20] = 255
    name, _, where = form.partition(" ")
    buffer, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif} if not where else {"xmp": b'<x tiff:Orientation="6"/>'} if where == "XMP" else {}
    Image.fromarray(half).save(buffer, name, **options)
    data = (
        buffer.getvalue()
        if where != "behind its pixels"
        else png_with(buffer.getvalue(), b"eXIf", exif.tobytes()[6:], behind=True)
    )
    for stored in (data, fit_image(data, max_pixels=600)[0]):
        shown = decode_image(stored)
        height, width, _ = shown.shape
        assert height > width
        assert shown[:, : width // 3].mean() < 40  # 6: the top of what is stored is shown at the right
        assert shown[:, -(width // 3) :].mean() > 215


def test_the_facts_of_an_image_made_smaller_are_of_the_smaller_one() -> None:
    for orientation in ORIENTATIONS:
        data, facts = fit_image(turned("JPEG", orientation, size=(60, 30)), max_pixels=450)
        assert facts == facts_of(data, "image") == shown_size(data) == ((15, 30) if orientation >= 5 else (30, 15))


def _clear(form: str, mode: str) -> bytes:
    """An image of noise of which one half is transparent."""
    random = np.random.default_rng(0)
    image = Image.fromarray(np.repeat(np.repeat(random.integers(0, 256, (6, 9, 3), np.uint8), 8, 0), 8, 1))
    if mode == "P":
        image = image.quantize(32)
        image.info["transparency"] = bytes([0, 255] * 16) if form == "PNG" else 3
    else:
        image = image.convert(mode)
        image.putalpha(Image.fromarray(np.repeat(np.arange(48)[:, None] % 16 // 8 * 255, 72, 1).astype(np.uint8)))
    written = BytesIO()
    image.save(written, form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))
    return written.getvalue()


@pytest.mark.parametrize(
    ("form", "mode"),
    [("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("WEBP", "RGBA"), ("TIFF", "RGBA"), ("BMP", "RGBA"), ("GIF", "P")],
)
def test_an_image_made_smaller_keeps_the_colors_of_what_is_transparent(form: str, mode: str) -> None:
    data = _clear(form, mode)
    small, facts = fit_image(data, max_pixels=24 * 36)
    expected = np.asarray(Image.fromarray(decode_image(data)).resize(facts, Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(decode_image(small) - expected).mean() < (20 if form in ("GIF", "WEBP") else 1)


def test_a_scan_in_black_and_white_is_made_smaller() -> None:
    written = BytesIO()
    scan = Image.new("L", (80, 60), 255)
    scan.paste(0, (20, 20, 60, 40))
    scan.convert("1").save(written, "TIFF", compression="group4")
    small, facts = fit_image(written.getvalue(), max_pixels=300)
    assert facts == (20, 15)
    assert np.abs(decode_image(small)[..., 0] - np.asarray(scan.resize((20, 15), Image.Resampling.LANCZOS))).max() < 2


def test_a_broken_page_behind_the_first_is_an_error_of_the_image() -> None:
    pages, written = [Image.new("L", (40, 40)), Image.new("L", (40, 40))], BytesIO()
    pages[0].save(written, "TIFF", save_all=True, append_images=pages[1:])
    data = written.getvalue()
    width = b"\x00\x01\x04\x00\x01\x00\x00\x00"  # the tag of the width, as Pillow writes it
    behind = data.rindex(width)
    assert data.index(width) < behind
    broken = data[:behind] + b"\xfe\x01" + data[behind + 2 :]
    assert facts_of(broken, "image") == (40, 40)
    with pytest.raises(DataError, match="cannot be made smaller"):
        fit_image(broken, max_pixels=100)
