"""Rows with an image to be made: its bytes, facts about it, and the number of its class where it has one."""

from __future__ import annotations

import json
from typing import Any

from ...errors import DataError
from ..media.references import SampleMedia
from ..sources.arrow_values import ClassName
from . import schemas
from .chat import MEMBER_IMAGES
from .fields import Fields, named_alike
from .image_label import the_image
from .row_kind import ReadOptions, RowKind

NO_LABEL = -1  # of a row without one, as `datasets` has it
_MAX_LABEL = 1 << 31


def _read_image(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    part = media.add("image", the_image(fields))
    facts = {name: part[name] for name in ("width", "height", "mime")}
    return {"image": media.data, "facts": json.dumps(facts), "label": _label(fields)}


def _label(fields: Fields) -> int:
    """The number of a row's class: as it is, also as text, or that of a name that its column numbers (ClassLabel)."""
    value, name = fields.get("label"), fields.column("label")
    if value is None:
        return NO_LABEL
    if isinstance(value, ClassName):
        return value.number
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, bool) or not text.removeprefix("-").isdecimal() or not NO_LABEL <= int(text) < _MAX_LABEL:
        raise DataError(
            f"label {text[:80]!r} in column {name!r} is no number of a class, from 0 on (or -1 for none): number the "
            "classes, or pass --columns label= to leave labels out"
        )
    return int(text)


IMAGE = RowKind(
    name="image",
    may={**MEMBER_IMAGES, **named_alike("file_name"), "label": ("label", "cls")},
    needs_text="image (or file_name), and perhaps label, a number",
    schema=schemas.IMAGE,
    read=_read_image,
)
