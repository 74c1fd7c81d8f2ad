"""Rows of any columns, which are kept as they are: none of them is read for what it means."""

from __future__ import annotations

from typing import Any

from ..media.references import SampleMedia
from .fields import Fields
from .row_kind import ReadOptions, RowKind
from .schemas import columns_schema


def _read_nothing(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    return {}


COLUMNS = RowKind(name="columns", schema=columns_schema({}), read=_read_nothing)
