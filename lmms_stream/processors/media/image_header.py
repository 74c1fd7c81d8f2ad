"""The header of an image -> its size in the shown orientation; size limits; a full decode as a check."""

from __future__ import annotations

import math
import struct
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...extras import need
from .formats import media_format
from .types import ImageFacts

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_DECODED_PIXELS = 1 << 33  # of all frames of a checked animation; Pillow has a limit for each frame
JPEG_FORMATS = ("JPEG", "MPO")  # cameras write MPO: a JPEG with previews behind it
_LOSSY_QUALITY = 95
_OF_ONE_BIT = ("tiff_ccitt", "group3", "group4")  # compressions of TIFF for only black and white
_ORIENTATION = 0x0112  # EXIF's tag
ON_ITS_SIDE = (5, 6, 7, 8)  # values for an image that is turned by 90 degrees
_MAY_ORIENT = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}  # with it, in Pillow's `info`
_PNG_MAY_ORIENT = (b"eXIf", b"iTXt", b"zTXt", b"tEXt")
_PNG_HEAD_BYTES = 1 << 16  # of a PNG, in which an animation is announced
_PNG_CHUNK = struct.Struct(">I4s")


def image_facts(data: bytes) -> ImageFacts:
    """Width and height, from the header.

    DataError for a header that Pillow cannot read, and for an image beyond its guard against decompression bombs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of large images, and of harmless flaws
        return _facts(_open(data), data)


def image_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in the shown orientation, from the header; None if Pillow cannot read the header."""
    try:
        return image_facts(data)
    except DataError:
        return None


def fit_image(data: bytes, *, max_pixels: int | None) -> tuple[bytes, ImageFacts]:
    """Return the image and its facts after checking its header; an image of more than max_pixels is made smaller, in
    its format and aspect.

    Decoded are only images that are made smaller, and images of 32 bits: only their pixels show which value is white.
    DataError: see `image_facts` and `eight_bits`; also for an animation of more than max_pixels, because resizing would
    lose its frames.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data)
        width, height = image.size
        if max_pixels is None or width * height <= max_pixels:
            if has_unknown_range(image):
                check_image(data)
            return data, _facts(image, data)
        scale = math.sqrt(max_pixels / (width * height))
        new_width = max(1, int(width * scale))
        new_height = max(1, min(int(height * scale), max_pixels // new_width))
        try:
            num_frames = getattr(image, "n_frames", 1)
            if num_frames > 1 and image.format != "MPO":  # cameras write MPO: a JPEG with previews behind it
                raise DataError(
                    f"it has {width} x {height} pixels, more than {max_pixels}, in {num_frames} frames: only single "
                    "images are made smaller: do it beforehand"
                )
            small = _resized(image, min(new_width, max_pixels), new_height)
        except DataError:
            raise
        except Exception as error:  # any error of Pillow for damaged bytes
            raise DataError(f"it cannot be made smaller ({error!r}): repair or remove it") from error
        return small, _facts(_open(small), small)


def has_more_frames(data: bytes) -> bool:
    """Return whether an image has frames or pages after the first (only the first is read); False if unknown."""
    name = media_format(data)
    if name == "png":
        return b"acTL" in data[:_PNG_HEAD_BYTES]
    if name not in ("gif", "tiff", "webp", "avif"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(getattr(_open(data), "is_animated", False))
        except Exception:  # noqa: BLE001 - damaged frames behind the first
            return False


def check_image(data: bytes) -> None:
    """Decode an image with all its frames; DataError if any part is broken or missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data)
        try:
            num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            if num_frames * image.width * image.height > MAX_DECODED_PIXELS:
                raise DataError(
                    f"it has {num_frames} frames of {image.width} x {image.height} pixels, more than "
                    f"{MAX_DECODED_PIXELS} in all: store it as a video"
                )
            if image.format in JPEG_FORMATS:
                colors: Literal["RGB", "CMYK"] = "CMYK" if image.mode == "CMYK" else "RGB"
                if strictly_decoded(data, width=image.width, height=image.height, colors=colors) is not None:
                    return  # otherwise Pillow decides
            for number in range(num_frames):
                image.seek(number)
                image.load()
                if has_unknown_range(image):
                    eight_bits(image)
        except DataError:
            raise
        except Exception as error:  # any error of Pillow for damaged bytes
            raise DataError(f"it cannot be decoded ({error!r}): repair or remove it") from error


def orientation_of(image: Image) -> int:
    """Orientation of an image opened by Pillow, 1 to 8 in EXIF's numbers; 1 without an orientation.

    Same result as ImageOps.exif_transpose, without decoding. A PNG may store the orientation behind its pixels; load
    such a PNG first.
    """
    need("PIL", by="images")
    from PIL import Image

    if image.format == "TIFF" or _MAY_ORIENT.isdisjoint(image.info):  # Pillow turns a TIFF itself
        return 1
    try:
        orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)  # PngImageFile.getexif decodes the image
    except Exception:  # noqa: BLE001 - damaged EXIF data have no meaning, and do no harm to the image
        return 1
    return orientation if orientation in range(1, 9) else 1


def _facts(image: Image, data: bytes) -> ImageFacts:
    if image.format == "PNG" and _says_more_behind_pixels(data):
        try:
            image.load()
        except Exception as error:  # any error of Pillow for damaged bytes
            raise DataError(f"it cannot be decoded ({error!r}): repair or remove it") from error
    width, height = image.size
    return ImageFacts(height, width) if orientation_of(image) in ON_ITS_SIDE else ImageFacts(width, height)


def _says_more_behind_pixels(data: bytes) -> bool:
    """Return whether chunks for EXIF or XMP data come after the pixels of a PNG, beyond the header that Pillow
    reads.
    """
    offset, is_behind = 8, False
    while offset + _PNG_CHUNK.size <= len(data):
        size, name = _PNG_CHUNK.unpack_from(data, offset)
        if name == b"IDAT":
            is_behind = True
        elif is_behind and name in _PNG_MAY_ORIENT:
            return True
        offset += 12 + size
    return False


def pillow_format(data: bytes, *, subject: str = "it") -> str:
    """Pillow's name of the format of an image, "" if it is not an image. For HEIC, enable Pillow to read it or raise
    DataError.

    subject: name of the image in the error.
    """
    name = (media_format(data) or "").upper()
    if name != "HEIC":
        return name
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise DataError(
            f"{subject} is HEIC, which Pillow alone does not read: convert it to JPEG or PNG, or pip install "
            "pillow-heif"
        ) from error
    register_heif_opener()
    return "HEIF"


def _open(data: bytes) -> Image:
    need("PIL", by="images")
    from PIL import Image

    name = pillow_format(data)
    try:
        image = Image.open(BytesIO(data), formats=[name])
    except Image.DecompressionBombError as error:
        raise DataError(f"{error}: make it smaller beforehand") from error
    except Exception as error:  # any error of Pillow for damaged bytes
        raise DataError(
            f"Pillow cannot read its header ({error!r}): repair it, or convert it to JPEG or PNG"
        ) from error
    if 0 in image.size:
        raise DataError(f"it has {image.size[0]} x {image.size[1]} pixels: remove it")
    return image


def _resized(image: Image, width: int, height: int) -> bytes:
    need("PIL", by="images")
    from PIL import Image

    form = "JPEG" if image.format == "MPO" else image.format
    image.draft(None, (width, height))  # decodes a JPEG at its smallest sufficient scale
    image.load()  # a PNG may have EXIF data behind its pixels
    found = {"exif": _exif_to_keep(image), "icc_profile": image.info.get("icc_profile")}
    kept: dict[str, Any] = {name: value for name, value in found.items() if value}
    image = eight_bits(image)  # interpolated values would leave their range
    if image.mode in ("1", "P", "PA"):  # Pillow does not interpolate these modes
        has_alpha = "transparency" in image.info and form != "GIF"  # a GIF would lose the colors of transparent pixels
        image = image.convert("L" if image.mode == "1" else "RGBA" if has_alpha else "RGB")
    if form in ("JPEG", "WEBP", "AVIF"):
        kept["quality"] = _LOSSY_QUALITY
    if form == "WEBP":
        kept["exact"] = True  # keeps the colors of transparent pixels
    if form == "TIFF" and image.info.get("compression") in _OF_ONE_BIT:
        kept["compression"] = "tiff_adobe_deflate"
    # Band by band: together, Pillow would turn transparent pixels black, and their colors are shown without the alpha.
    bands = [band.resize((width, height), Image.Resampling.LANCZOS) for band in image.split()]
    small = Image.merge(image.mode, bands)
    buffer = BytesIO()
    small.save(buffer, format=form, **kept)
    return buffer.getvalue()


def _exif_to_keep(image: Image) -> bytes | None:
    """EXIF data with the orientation of the image, also if only its XMP data have it; None without EXIF data."""
    need("PIL", by="images")
    from PIL import Image

    said: bytes | None = image.info.get("exif")
    orientation = orientation_of(image)
    if orientation == 1:
        return said
    exif = Image.Exif()
    exif.load(said or b"")
    if exif.get(_ORIENTATION) == orientation:
        return said
    exif[_ORIENTATION] = orientation
    return exif.tobytes()


# A JPEG -> its pixels, by simplejpeg. It reports pixels that libjpeg makes up for missing data; Pillow does not.

# libjpeg's warnings when it fills in pixels missing in the data: a JPEG that was cut short and closed with an end
# marker, and damaged codes. It warns of harmless flaws, too.
_LOSSES = ("premature end of data segment", "bad Huffman code", "bad arithmetic code")


def strictly_decoded(
    data: bytes, *, width: int, height: int, scale: int = 1, colors: Literal["RGB", "CMYK"] = "RGB", subject: str = "it"
) -> NDArray[np.uint8] | None:
    """Decode a JPEG at 1/scale of its size: [height, width, colors]. width, height: after scaling.

    None if simplejpeg is missing, or refuses for another reason: then Pillow decodes or refuses. DataError for a JPEG
    with missing pixels; subject: name of the image in the error.
    """
    decoder = _simplejpeg()
    if decoder is None:
        return None
    at_least = {"min_width": width, "min_height": height, "min_factor": scale} if scale > 1 else {}
    try:
        pixels: NDArray[np.uint8] = decoder.decode_jpeg(data, colors, **at_least)
    except ValueError as error:
        if any(loss in str(error) for loss in _LOSSES):
            raise DataError(
                f"{subject} lacks pixels, and a decoder would invent them ({error}): repair or remove it"
            ) from error
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


# Grey images of more than 8 bits a pixel -> 8 bits. Pillow's own conversion clips their values at 255.

_WITHOUT_RANGE = ("I", "F")  # Pillow's modes of 32 bits, without a defined value of white
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def has_unknown_range(image: Image) -> bool:
    """Return whether only the pixels of an image show which value is white."""
    return image.mode in _WITHOUT_RANGE


def eight_bits(image: Image) -> Image:
    """Return the image with 8 bits a channel: the high bits of grey with 12 and 16 bits, like Pillow's own for colors.

    Whole numbers of 32 bits and floats keep their values if all are from 0 to 255; floats from 0 to 1 are scaled to
    255. Other images are returned unchanged. DataError for other values.
    """
    if not (has_unknown_range(image) or image.mode.startswith("I;16")):
        return image
    from PIL import Image

    values = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    grey = _levels(values) if has_unknown_range(image) else (values >> (_num_bits(tags) - 8)).astype(np.uint8)
    return Image.fromarray(~grey if tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO else grey)


def _num_bits(tags: Any) -> int:
    """Bits of a value in a TIFF with these tags; 16 in other formats."""
    bits = tags.get(_TIFF_BITS, 16)
    return int(bits[0] if isinstance(bits, tuple) else bits)


def _levels(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Values of 32 bits as levels of 255."""
    lowest, highest = float(values.min()), float(values.max())
    if not (lowest >= 0 and highest <= 255):  # NaN is neither
        kind = "floats" if values.dtype.kind == "f" else "whole numbers of 32 bits"
        raise DataError(
            f"the image is grey with {kind} from {lowest:g} to {highest:g}, and the value of white is unknown: write "
            "it with 8 or 16 bits, or with floats from 0 to 1"
        )
    if values.dtype.kind == "f" and highest <= 1:
        values = np.rint(values * 255)
    return values.astype(np.uint8)
