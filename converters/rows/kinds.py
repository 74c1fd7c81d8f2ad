"""Known kinds of rows, in the order of detection (the first that fits is taken); kinds of texts and images.

Kinds of other packages are tried after this package's kinds, or are named by --kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from ...errors import DataError, EmptyRowError
from ...registry import Registry
from ...types import Sample
from ..sources.arrow_values import ClassName
from . import schemas
from .chat import MEMBER_IMAGES
from .chat_kinds import ALPACA, CAPTION, DIALOG, EXCHANGES, MESSAGES, PROMPT_RESPONSE, QUESTION_ANSWER, SHAREGPT
from .content import file_kind
from .fields import Columns, Fields, check_text, named_alike
from .preference_kinds import KTO, PREFERENCE
from .references import SampleMedia
from .row_kind import ReadOptions, ReadSimple, RowKind
from .schemas import columns_schema
from .tokens import TOKENS

# Rows with a `text` to train on.


def _read_text(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    text, name = fields.text("text"), fields.column("text") or "text"
    if not text:
        raise EmptyRowError(f"column {name!r} is empty, so nothing would be learnt: complete or remove the row")
    check_text(name, text)
    return {"text": text}


def _of_text(found: Mapping[str, str], options: ReadOptions) -> ReadSimple:
    return partial(_read_plain_text, column=found.get("text", "text"))


def _read_plain_text(values: Mapping[str, Any], *, column: str) -> Sample | None:
    text = values.get(column)
    try:
        return {"text": text} if type(text) is str and text.encode() else None
    except UnicodeEncodeError:
        return None


TEXT = RowKind(name="text", needs=named_alike("text"), schema=schemas.TEXT, read=_read_text, simple=_of_text)


# Rows of any columns, all kept unchanged.


def _read_nothing(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    return {}


COLUMNS = RowKind(name="columns", schema=columns_schema({}), read=_read_nothing)


# Rows with an image to be generated: bytes, facts and, if any, a class number.


NO_LABEL = -1  # label of a row without a class, by `datasets`
_MAX_LABEL = 1 << 31


def _read_image(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    part = media.add("image", the_image(fields))
    facts = {name: part[name] for name in ("width", "height", "mime")}
    return {"image": media.data, "facts": json.dumps(facts), "label": _label(fields)}


def _label(fields: Fields) -> int:
    """Return the number of a row's class: a number, its text, or the number of a name in its column (ClassLabel)."""
    value = fields.get("label")
    if value is None:
        return NO_LABEL
    if isinstance(value, ClassName):
        return value.number
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, bool) or not text.removeprefix("-").isdecimal() or not NO_LABEL <= int(text) < _MAX_LABEL:
        raise DataError(
            f"label {text[:80]!r} in column {fields.column('label')!r} is no number of a class, from 0 on (or -1 for "
            "none): number the classes, or pass --columns label= to leave labels out"
        )
    return int(text)


_IMAGE: Columns = {**MEMBER_IMAGES, **named_alike("file_name")}
_LABEL: Columns = {"label": ("label", "cls")}
IMAGE = RowKind(
    name="image",
    may={**_IMAGE, **_LABEL},
    needs_text="image (or file_name), and perhaps label, a number",
    schema=schemas.IMAGE,
    read=_read_image,
)


# Rows with an image and a label: the samples of a classifier.


def the_image(fields: Fields) -> Any:
    """Return the reference to the only image of a row; DataError for no image or several."""
    references = fields.references("images") or fields.references("file_name")
    column = fields.column("images") or fields.column("file_name")
    if column is None:
        raise DataError(
            f"no column of an image among {', '.join(fields.values)}: name the column image, or pass --columns "
            "images=COLUMN"
        )
    if len(references) != 1:
        raise DataError(f"{len(references)} images in column {column!r}, expected one: correct the row")
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
    needs=_LABEL,
    may=_IMAGE,
    accepts=_shows,
    needs_text="image (or file_name) and label",
    schema=columns_schema({"image": "bytes", "label": "str"}),
    read=_read_image_label,
)


_IN_ORDER = (
    TOKENS, PREFERENCE, KTO, MESSAGES, SHAREGPT, EXCHANGES, ALPACA, PROMPT_RESPONSE, QUESTION_ANSWER, CAPTION, TEXT,
    IMAGE_LABEL, DIALOG, IMAGE, COLUMNS,
)  # fmt: skip
KINDS = Registry[RowKind](
    "rows",
    {kind.name: kind for kind in _IN_ORDER},
    accepts=lambda kind: isinstance(kind, RowKind),
    expected="a RowKind",
)


@cache
def column_roles() -> tuple[str, ...]:
    """Return the roles of all kinds, for --columns."""
    return tuple(dict.fromkeys(role for kind in KINDS.values() for role in kind.columns))


@cache
def usual_names() -> frozenset[str]:
    """The usual names of columns, of all roles of all kinds."""
    return frozenset(name for kind in KINDS.values() for names in kind.columns.values() for name in names)
