"""Rows with an image and a label: the samples of a classifier."""

from __future__ import annotations

from typing import Any

from ...errors import DataError
from ..media.references import SampleMedia
from .chat import MEMBER_IMAGES
from .content import file_kind
from .fields import Fields, check_text, named_alike
from .row_kind import ReadOptions, RowKind
from .schemas import columns_schema


def the_image(fields: Fields) -> Any:
    """The reference to the one image of a row; DataError for none, and for several."""
    references = fields.references("images")
    if not references and fields.get("file_name") is not None:
        references = [fields.get("file_name")]
    if len(references) != 1:
        raise DataError(
            f"{len(references)} images in column {fields.column('images')!r}, expected one: correct the row"
        )
    return references[0]


def _read_image_label(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    media.add("image", the_image(fields))
    label = fields.text("label")
    check_text("label", label)
    return {"image": media.data, "label": label}


def _shows(fields: Fields) -> bool:
    return bool(fields.references("images")) or file_kind(fields.get("file_name")) == "image"


IMAGE_LABEL = RowKind(
    name="image-label",
    needs={"label": ("label", "cls")},
    may={**MEMBER_IMAGES, **named_alike("file_name")},
    accepts=_shows,
    needs_text="image (or file_name) and label",
    schema=columns_schema({"image": "bytes", "label": "str"}),
    read=_read_image_label,
)
