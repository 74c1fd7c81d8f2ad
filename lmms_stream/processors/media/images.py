"""Bytes of an image -> its pixels, turned by EXIF.

simplejpeg decodes a JPEG if it is installed and accepts the file, in half the time. It and Pillow use the same
libjpeg-turbo and give the same pixels: a run can resume with the other decoder. Pillow decodes all other images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...extras import need
from .formats import mime_type
from .image_header import JPEG_FORMATS, ON_ITS_SIDE, eight_bits, orientation_of, pillow_format, strictly_decoded

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 178_956_970  # Pillow's limit: twice its MAX_IMAGE_PIXELS
SCALES = (8, 4, 2)  # a JPEG's coefficients allow only these fractions
MIN_SCALED_SIDE = 16  # minimum side in pixels after scaling: below, decoders round sizes differently
_TURNED: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}  # EXIF's orientations -> turned pixels


def decode_image(
    data: bytes, *, min_width: int = 0, min_height: int = 0, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Decode an image to RGB: [H, W, 3]. EXIF's orientation is applied, and modes become RGB like Pillow's
    convert("RGB"), after `eight_bits`.

    With min_width and min_height a JPEG is decoded at 1/8, 1/4, 1/2 or all of its size: the smallest scale with enough
    pixels in both directions. DataError for broken bytes, and for an image with more than max_pixels in its header,
    without decoding.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of large images, and of harmless flaws
        image = _opened(data, max_pixels)
        try:
            if image.format in JPEG_FORMATS:
                orientation = orientation_of(image)
                if orientation in ON_ITS_SIDE:
                    min_width, min_height = min_height, min_width
                pixels = _decoded_jpeg(data, image, _scale(image.size, min_width, min_height))
            else:
                pixels = _decoded(image)
                orientation = orientation_of(image)  # a PNG may store it behind its pixels, and a TIFF is turned by now
        except (MemoryError, DataError):
            raise
        except Exception as error:  # any error of Pillow for damaged bytes
            raise DataError(f"the image cannot be decoded ({error!r}): repair or remove it") from error
    turned = _TURNED.get(orientation)
    return pixels if turned is None else np.ascontiguousarray(turned(pixels))


def _opened(data: bytes, max_pixels: int) -> Image:
    """Open an image and read its header; its pixels are decoded later."""
    need("PIL", by="images")
    from PIL import Image

    mime_type(data, "image")  # raises DataError for other data
    name = pillow_format(data, subject="the image")
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=[name])
        width, height = image.size
    except Image.DecompressionBombError as error:
        try:
            image = Image.OPEN[name][0](BytesIO(data), "")  # like Image.open without its guard: to report the size
        except Exception:  # noqa: BLE001 - some formats guard themselves
            raise DataError(f"{error}: make the image smaller, or remove it") from error
        width, height = image.size
        max_pixels = min(max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or max_pixels))
    except Exception as error:  # any error of Pillow for damaged bytes
        raise DataError(f"Pillow cannot read the header of the image ({error!r}): repair or remove it") from error
    if not 0 < width * height <= max_pixels:
        raise DataError(
            f"the image has {width} x {height} pixels, expected 1 to {max_pixels}, because more are taken for a "
            "decompression bomb: make it smaller, or remove it"
        )
    return image


def _scale(size: tuple[int, int], min_width: int, min_height: int) -> int:
    """Return the largest scale at which both sides keep their minimum; 1 if no scale does."""
    least = (max(min_width, MIN_SCALED_SIDE), max(min_height, MIN_SCALED_SIDE))
    if min_width < 1 and min_height < 1:
        return 1
    fitting = (
        scale for scale in SCALES if all(-(-side // scale) >= few for side, few in zip(size, least, strict=True))
    )
    return next(fitting, 1)


def _decoded_jpeg(data: bytes, image: Image, scale: int) -> NDArray[np.uint8]:
    """Decode a JPEG at 1/scale of its size, rounded up.

    CMYK is converted with Pillow's colors.
    """
    width, height = (-(-side // scale) for side in image.size)
    is_cmyk = image.mode == "CMYK"
    colors: Literal["RGB", "CMYK"] = "CMYK" if is_cmyk else "RGB"
    pixels = strictly_decoded(data, width=width, height=height, scale=scale, colors=colors, subject="the image")
    if pixels is not None and not is_cmyk:
        return pixels
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    return _decoded(image)


def _decoded(image: Image) -> NDArray[np.uint8]:
    image.load()
    image.info.pop("transparency", None)  # of a palette: a needless conversion
    shown = eight_bits(image)
    return np.array(shown if shown.mode == "RGB" else shown.convert("RGB"))
