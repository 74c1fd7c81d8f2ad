"""Rows with an image and a label: the samples of a classifier."""

from __future__ import annotations

from typing import Any

from ...errors import DataError
from ..media.references import SampleMedia
from .chat import MEDIA_COLUMNS
from .fields import Fields, check_text
from .row_kind import ReadOptions, RowKind
from .schemas import columns_schema


def _read_image_label(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    references = fields.references("images")
    if len(references) != 1:
        raise DataError(
            f"{len(references)} images in column {fields.column('images')!r}, expected one: correct the row"
        )
    media.add("image", references[0])
    label = fields.text("label")
    check_text("label", label)
    return {"image": media.data, "label": label}


IMAGE_LABEL = RowKind(
    name="image-label",
    needs={"images": MEDIA_COLUMNS["images"], "label": ("label",)},
    schema=columns_schema({"image": "bytes", "label": "str"}),
    read=_read_image_label,
)
