"""A JPEG -> its pixels, by simplejpeg, which tells what libjpeg makes up where data are missing. Pillow does not."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

# What libjpeg warns of where it fills in pixels that the data do not hold: a JPEG that was cut short and closed with an
# end marker, and damaged codes. It warns of harmless things, too.
_LOSSES = ("premature end of data segment", "bad Huffman code", "bad arithmetic code")


def strictly_decoded(
    data: bytes, *, width: int, height: int, scale: int = 1, colors: Literal["RGB", "CMYK"] = "RGB", subject: str = "it"
) -> NDArray[np.uint8] | None:
    """[height, width, colors]: a JPEG at 1/scale of its size, which width and height are of.

    None for what simplejpeg refuses otherwise, and where it is missing: Pillow is to decode or refuse that. DataError
    for a JPEG without all of its pixels; subject: the image, as the error calls it.
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
                f"{subject} lacks pixels, which a decoder would make up ({error}): repair or remove it"
            ) from error
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
