"""Columns that hold media by their values, whatever they are called: bytes, data URLs and paths of media. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import DataError
from ..media.references import kind_of_bytes
from .chat import MEDIA_COLUMNS
from .content import MEDIA_ROLES, file_kind
from .fields import is_filled
from .row_kind import RowKind

_NO_MEDIA = ("id", "__key__")  # names of a row, which often look like paths


def media_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Column -> kind of media that all its values in these rows are; columns of anything else are absent."""
    found: dict[str, str] = {}
    for name in names:
        kinds = {_media_kind(row[name]) for row in rows if name in row and is_filled(row[name])}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is not None and name not in _NO_MEDIA:
            found[name] = kind
    return found


def check_media_columns(
    rows: Sequence[Mapping[str, Any]],
    kind: RowKind,
    *,
    read: Sequence[str],
    left: Sequence[str],
    columns: Mapping[str, str],
) -> None:
    """DataError if rows of which no media are read have columns of media. columns: as the user named them, by role."""
    roles = {role: names for role, names in kind.columns.items() if role in MEDIA_COLUMNS}
    if any(name in read for names in (*roles.values(), ("file_name",)) for name in names) or set(columns) & {*roles}:
        return
    for name, media in media_columns(rows, left).items():
        role = MEDIA_ROLES[media]
        if columns.get(role) != "" and not _is_held(rows, name, by=read):
            raise DataError(
                f"column {name} holds media of kind {media}, and the rows would be {kind.name} without them: pass "
                f"--columns {role}={name} to read them, --keep {name} to keep them as they are, or --kind {kind.name} "
                "to leave them out"
            )


def _is_held(rows: Sequence[Mapping[str, Any]], name: str, *, by: Sequence[str]) -> bool:
    """Return whether the media of a column are in columns that are read, as members of a tar that rows refer to are."""
    filled = [row for row in rows if is_filled(row.get(name))]
    return all(any(_holds(row.get(each.split(".")[0]), row[name]) for each in by) for row in filled)


def _holds(value: Any, medium: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(each, medium) for each in value.values())
    return value is medium or (isinstance(value, list | tuple) and any(_holds(each, medium) for each in value))


def _media_kind(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        kinds = {_media_kind(each) for each in value}
        return kinds.pop() if len(kinds) == 1 else None
    if isinstance(value, Mapping):
        inner = (value.get("bytes"), value.get("path")) if value.keys() <= {"bytes", "path"} else ()
        return next((_media_kind(each) for each in inner if is_filled(each)), None)
    if isinstance(value, bytes):
        return kind_of_bytes(value)
    if not isinstance(value, str) or "://" in value or "\n" in value:
        return None
    if value.startswith("data:"):
        kind = value[len("data:") :].partition("/")[0]
        return kind if kind in MEDIA_ROLES else None
    return None if value.endswith(".ts") else file_kind(value)  # .ts: TypeScript as often as video
