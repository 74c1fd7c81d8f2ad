"""Rows with a `text`, all of which is learnt. Pure."""

from __future__ import annotations

from typing import Any

from ...errors import EmptyRowError
from ..media.references import SampleMedia
from . import schemas
from .fields import Fields, check_text, named_alike
from .row_kind import ReadOptions, RowKind


def _read_text(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    text, name = fields.text("text"), fields.column("text") or "text"
    if not text:
        raise EmptyRowError(f"column {name!r} is empty, so nothing would be learnt: complete or remove the row")
    check_text(name, text)
    return {"text": text}


TEXT = RowKind(name="text", needs=named_alike("text"), schema=schemas.TEXT, read=_read_text)
