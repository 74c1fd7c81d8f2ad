"""The kinds of rows that are known, in the order in which they are looked for: the first that fits a row is taken.

Those of other packages are looked for after those of this one, or asked for by --kind.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...errors import EmptyRowError
from ...registry import Registry
from ..media.references import SampleMedia
from . import schemas
from .chat_kinds import ALPACA, CAPTION, DIALOG, EXCHANGES, MESSAGES, PROMPT_RESPONSE, QUESTION_ANSWER, SHAREGPT
from .fields import Fields, check_text, named_alike
from .image import IMAGE, IMAGE_LABEL
from .preference_kinds import KTO, PREFERENCE
from .row_kind import ReadOptions, RowKind
from .schemas import columns_schema
from .tokens import TOKENS

# Rows with a `text`, all of which is learnt. Pure.


def _read_text(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    text, name = fields.text("text"), fields.column("text") or "text"
    if not text:
        raise EmptyRowError(f"column {name!r} is empty, so nothing would be learnt: complete or remove the row")
    check_text(name, text)
    return {"text": text}


TEXT = RowKind(name="text", needs=named_alike("text"), schema=schemas.TEXT, read=_read_text)


# Rows of any columns, which are kept as they are: none of them is read for what it means.


def _read_nothing(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    return {}


COLUMNS = RowKind(name="columns", schema=columns_schema({}), read=_read_nothing)


_IN_ORDER: tuple[RowKind, ...] = (
    TOKENS,
    PREFERENCE,
    KTO,
    MESSAGES,
    SHAREGPT,
    EXCHANGES,
    ALPACA,
    PROMPT_RESPONSE,
    QUESTION_ANSWER,
    CAPTION,
    TEXT,
    IMAGE_LABEL,
    DIALOG,
    IMAGE,
    COLUMNS,
)
KINDS = Registry[RowKind]("rows", {kind.name: kind for kind in _IN_ORDER})


@cache
def column_roles() -> tuple[str, ...]:
    """The roles that --columns may name, of all kinds."""
    return tuple(dict.fromkeys(role for kind in KINDS.values() for role in kind.columns))


@cache
def usual_names() -> frozenset[str]:
    """The usual names of columns, of all roles of all kinds."""
    return frozenset(name for kind in KINDS.values() for names in kind.columns.values() for name in names)
