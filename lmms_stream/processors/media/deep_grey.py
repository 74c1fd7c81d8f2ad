"""Grey images of more than 8 bits a pixel -> 8 bits. Pillow's own conversion clips their values at 255."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_WITHOUT_RANGE = ("I", "F")  # Pillow's modes of 32 bits, in which the format does not say which value is white
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def has_unknown_range(image: Image) -> bool:
    """Whether only the pixels of an image tell which of its values is white."""
    return image.mode in _WITHOUT_RANGE


def eight_bits(image: Image) -> Image:
    """The image with 8 bits a channel: grey of 12 and 16 bits by its high bits, as Pillow makes them of colors.

    Whole numbers of 32 bits and floats are taken as they are where all are from 0 to 255, and floats that are all from
    0 to 1 by their share of 1. Other images are returned unchanged. DataError for other values.
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
            f"the image is grey with {kind} from {lowest:g} to {highest:g}, and which of them is white is not said: "
            "write it with 8 or 16 bits, or with floats from 0 to 1"
        )
    if values.dtype.kind == "f" and highest <= 1:
        values = np.rint(values * 255)
    return values.astype(np.uint8)
