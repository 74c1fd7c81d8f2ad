"""Pixels of images: those of Pillow, whatever decodes them, turned as they are shown."""

from __future__ import annotations

import builtins
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import DataError
from lmms_stream.processors.media import image_header, images
from lmms_stream.processors.media.image_header import check_image
from lmms_stream.processors.media.images import decode_image
from lmms_stream.processors.media.pixels import resize
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps

# Found without an import of matplotlib, which takes half a second in each process that collects tests.
PHOTOGRAPH = Path(
    str(distribution("matplotlib").locate_file("matplotlib/mpl-data/sample_data/grace_hopper.jpg"))
).read_bytes()
# Of a photograph that is decoded at a fraction of its size, against one decoded whole and resized: levels of 255.
FRACTION_TOLERANCE = {1.0: 2.0, 1.1: 2.5, 1.5: 1.5, 1.95: 1.0}  # decoded pixels for one of the target, along a side


@pytest.fixture(params=["simplejpeg", "Pillow alone"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without simplejpeg."""
    if request.param == "Pillow alone":
        imported = builtins.__import__

        def without_simplejpeg(name: str, *arguments: Any, **keywords: Any) -> Any:
            if name == "simplejpeg":
                raise ImportError(name)
            return imported(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", without_simplejpeg)
    return str(request.param)


def photograph(mode: str = "RGB", size: tuple[int, int] = (123, 77)) -> Image.Image:
    return Image.open(BytesIO(PHOTOGRAPH)).resize(size).convert(mode)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def by_pillow(data: bytes) -> NDArray[np.uint8]:
    image = Image.open(BytesIO(data))
    image.load()
    image.info.pop("transparency", None)
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("options", [
    {}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 30}, {"progressive": True}, {"optimize": True},
    {"keep_rgb": True},
])  # fmt: skip
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_has_the_pixels_of_pillow(decoder: str, mode: str, options: dict[str, Any]) -> None:
    if options.get("keep_rgb") and mode != "RGB":
        options = {}
    data = encoded(photograph(mode), "JPEG", **options)
    pixels = decode_image(data)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert np.array_equal(pixels, by_pillow(data))


def palette(transparency: bytes | int | None) -> bytes:
    options = {} if transparency is None else {"transparency": transparency}
    return encoded(photograph("P"), "PNG", **options)


def deep_png() -> bytes:
    levels = np.linspace(0, 65535, 60 * 40).astype(np.uint16).reshape(40, 60)
    rows = np.repeat(levels.astype(">u2")[..., None], 3, -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 60, 40, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    framed = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def animation(form: str) -> bytes:
    frames = [photograph(), ImageOps.mirror(photograph()), ImageOps.flip(photograph())]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:])


def of_mode(mode: str) -> bytes:
    return encoded(photograph(mode), "PNG")


OTHERS: dict[str, Callable[[], bytes]] = {
    **{f"PNG {mode}": partial(of_mode, mode) for mode in ("RGB", "RGBA", "L", "LA", "1")},
    "PNG palette": lambda: palette(None),
    "PNG palette with a transparent colour": lambda: palette(3),
    "PNG palette with transparencies": lambda: palette(bytes(range(256))),
    "PNG 16 bits": deep_png,
    "WebP": lambda: encoded(photograph(), "WEBP"),
    "WebP with alpha": lambda: encoded(photograph("RGBA"), "WEBP", lossless=True),
    "GIF": lambda: encoded(photograph(), "GIF"),
    "BMP": lambda: encoded(photograph(), "BMP"),
    "TIFF": lambda: encoded(photograph(), "TIFF"),
    "TIFF CMYK": lambda: encoded(photograph("CMYK"), "TIFF", compression="tiff_lzw"),
    "TIFF float": lambda: encoded(photograph("F"), "TIFF"),
    "AVIF": lambda: encoded(photograph(), "AVIF"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_images_have_the_pixels_of_pillow(name: str) -> None:
    data = OTHERS[name]()
    pixels = decode_image(data, min_width=10, min_height=10)
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert np.array_equal(pixels, by_pillow(data))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_an_animation_the_first_frame_is_decoded(form: str) -> None:
    data = animation(form)
    first = Image.open(BytesIO(data))
    assert getattr(first, "n_frames", 1) == 3
    first.seek(0)
    assert np.array_equal(decode_image(data), np.asarray(first.convert("RGB")))


def with_orientation(form: str, orientation: int, *, size: tuple[int, int] = (123, 77)) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photograph(size=size), form, exif=exif)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_images_are_turned_as_exif_says(decoder: str, form: str, orientation: int) -> None:
    data = with_orientation(form, orientation)
    pixels = decode_image(data)
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels, by_pillow(data))
    assert pixels.shape == ((123, 77, 3) if orientation in (5, 6, 7, 8) else (77, 123, 3))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("least", "scale"),
    [((64, 40), 8), ((65, 40), 4), ((64, 41), 4), ((128, 80), 4), ((200, 159), 2), ((255, 160), 1), ((9, 0), 8)],
)
def test_a_jpeg_comes_at_the_smallest_scale_that_is_large_enough(
    decoder: str, orientation: int, least: tuple[int, int], scale: int
) -> None:
    data = with_orientation("JPEG", orientation, size=(509, 317))
    size = (-(-509 // scale), -(-317 // scale))
    if orientation in (5, 6, 7, 8):
        least, size = (least[1], least[0]), (size[1], size[0])
    pixels = decode_image(data, min_width=least[0], min_height=least[1])
    assert (pixels.shape[1], pixels.shape[0]) == size
    upright = decode_image(with_orientation("JPEG", 1, size=(509, 317)), min_width=size[0], min_height=size[1])
    assert orientation != 1 or np.array_equal(pixels, upright)


def test_a_scaled_jpeg_has_the_same_pixels_with_and_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ((509, 317), (16, 300), (131, 17), (33, 40), (640, 480)):
        for options in ({}, {"subsampling": 0}, {"progressive": True}):
            data = encoded(photograph(size=size), "JPEG", **options)
            for divisor in (2, 3, 4, 8, 12):
                least = {"min_width": size[0] // divisor, "min_height": size[1] // divisor}
                scaled = decode_image(data, **least)
                with monkeypatch.context() as patch:
                    patch.setattr(image_header, "_simplejpeg", lambda: None)
                    assert np.array_equal(scaled, decode_image(data, **least))


@pytest.mark.parametrize("ratio", FRACTION_TOLERANCE)
def test_a_photograph_decoded_at_a_fraction_is_close_to_one_decoded_whole(ratio: float) -> None:
    for scale in (2, 4):
        width, height = int(512 / scale / ratio), int(600 / scale / ratio)
        scaled = decode_image(PHOTOGRAPH, min_width=width, min_height=height)
        assert scaled.shape == (600 // scale, 512 // scale, 3)
        whole = resize(decode_image(PHOTOGRAPH), width=width, height=height).astype(int)
        difference = np.abs(resize(scaled, width=width, height=height) - whole).mean()
        assert 0 < difference <= FRACTION_TOLERANCE[ratio]


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.1])
@pytest.mark.parametrize(
    "data",
    [PHOTOGRAPH, encoded(photograph(), "JPEG", progressive=True), encoded(photograph("L"), "JPEG"),
     encoded(photograph("CMYK"), "JPEG"), encoded(photograph(), "PNG"), encoded(photograph(), "WEBP")],
    ids=["JPEG", "progressive", "grey", "CMYK", "PNG", "WebP"],
)  # fmt: skip
def test_an_image_that_is_cut_short_is_an_error(decoder: str, data: bytes, kept: float) -> None:
    with pytest.raises(DataError, match=r"the image.* \(.*\): repair or remove it"):
        decode_image(data[: int(len(data) * kept)])


def test_a_jpeg_that_lacks_its_last_bytes_is_an_error(decoder: str) -> None:
    for missing in (1, 2, 3, 10):
        with pytest.raises(DataError, match="repair or remove it"):
            decode_image(PHOTOGRAPH[:-missing])


@pytest.mark.parametrize(
    "data",
    [PHOTOGRAPH, encoded(photograph(size=(640, 480)), "JPEG", progressive=True), encoded(photograph("L"), "JPEG"),
     encoded(photograph("CMYK"), "JPEG")],
    ids=["JPEG", "progressive", "grey", "CMYK"],
)  # fmt: skip
def test_a_jpeg_that_is_cut_short_and_closed_is_an_error_and_not_half_grey(data: bytes) -> None:
    closed = data[: len(data) // 2] + b"\xff\xd9"
    with Image.open(BytesIO(closed)) as image:
        image.load()  # Pillow does not notice
    message = (
        r"image lacks pixels, and a decoder would invent them \(Corrupt JPEG data: premature end of data segment\): re"
    )
    for size in (0, 60):
        with pytest.raises(DataError, match=message):
            decode_image(closed, min_width=size, min_height=size)
    with pytest.raises(DataError, match=r"it lacks pixels, .*: repair or remove it"):
        check_image(closed)
    check_image(data)


def test_a_jpeg_with_damaged_codes_is_an_error() -> None:
    damaged = bytearray(encoded(photograph(), "JPEG"))
    damaged[-50:-10] = b"\xff\0" * 20  # ones alone, which are no code
    with pytest.raises(DataError, match=r"a decoder would invent them \(Corrupt JPEG data: bad Huffman code\): repair"):
        decode_image(bytes(damaged))


def test_a_jpeg_with_bytes_behind_it_or_damaged_exif_data_is_read(decoder: str) -> None:
    assert np.array_equal(decode_image(PHOTOGRAPH + b"behind"), by_pillow(PHOTOGRAPH))
    damaged = encoded(photograph(), "JPEG", exif=b"Exif\0\0no TIFF header at all")
    assert decode_image(damaged).shape == (77, 123, 3)


def test_bytes_that_are_no_image_are_an_error() -> None:
    with pytest.raises(DataError, match="its first bytes b'not an i' are of no known format: expected png, jpeg"):
        decode_image(b"not an image at all")
    with pytest.raises(DataError, match="it is audio/wav, where media of kind image are expected"):
        decode_image(b"RIFF\0\0\0\0WAVEfmt ")
    with pytest.raises(DataError, match=r"Pillow cannot read the header of the image \(.*\): repair or remove it"):
        decode_image(b"\x89PNG\r\n\x1a\n and nothing else")


def test_a_heic_image_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match=r"the image is HEIC, .* convert it to JPEG or PNG, or pip install pillow-heif"):
        decode_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")


def test_an_image_of_more_pixels_than_the_limit_is_an_error_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for form in ("JPEG", "PNG"):
        data = encoded(photograph(), form)
        assert decode_image(data, max_pixels=123 * 77).shape == (77, 123, 3)
        with monkeypatch.context() as patch:
            patch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("the image was decoded"))
            with pytest.raises(
                DataError,
                match=r"the image has 123 x 77 pixels, expected 1 to 9470, .* decompression bomb: make it smaller",
            ):
                decode_image(data, max_pixels=123 * 77 - 1)


@pytest.mark.parametrize("max_pixels", [images.MAX_PIXELS, 1 << 40])
def test_a_bomb_that_pillow_refuses_is_an_error_that_says_its_size(max_pixels: int) -> None:
    data = bytearray(encoded(photograph(), "PNG"))
    data[16:24] = struct.pack(">II", 100_000, 50_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(DataError, match=r"100000 x 50000 pixels, expected 1 to 178956970, .* bomb: make it smaller"):
        decode_image(bytes(data), max_pixels=max_pixels)


def test_a_worker_needs_neither_torch_nor_transformers_to_decode() -> None:
    program = (
        "import sys; from lmms_stream.processors.media import images, patches, resize, video; "
        "print(sorted({'torch', 'torchvision', 'transformers', 'av', 'PIL', 'simplejpeg'} & {*sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"
