"""Columns that hold media by their values, whatever they are called: bytes, data URLs and paths of media. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...errors import DataError
from .chat import MEDIA_COLUMNS
from .content import MEDIA_ROLES, file_kind
from .fields import Fields, head_of, is_filled, references_of
from .options import SchemaOptions
from .references import SampleMedia, usual_kind
from .row_kind import Choice, RowKind, UndecidedError

_OF_WEB = re.compile(rf"({'|'.join(MEDIA_ROLES)})s?_urls?", re.IGNORECASE)  # names of columns of addresses of media
_NO_MEDIA = ("id", "__key__")  # columns of row names, which often look like paths


def media_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Return column -> kind of media, for columns with only media of a single kind in the rows."""
    found: dict[str, str] = {}
    for name in names:
        of_name = _OF_WEB.fullmatch(name)
        kinds = {
            of_name[1].lower() if of_name and _are_on_web(row[name]) else _media_kind(row[name])
            for row in rows
            if name in row and is_filled(row[name])
        }
        if len(kinds) == 1 and name not in _NO_MEDIA and (kind := kinds.pop()):
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
    """Raise UndecidedError if rows with columns of media are read without media.

    columns: role -> the user's column.
    """
    roles = {role: names for role, names in kind.columns.items() if role in MEDIA_COLUMNS}
    if any(name in read for names in (*roles.values(), ("file_name",)) for name in names) or set(columns) & {*roles}:
        return
    found = {
        name: media
        for name, media in media_columns(rows, left).items()
        if columns.get(MEDIA_ROLES[media]) != "" and not _is_held(rows, name, by=read)
    }
    if not found:
        return
    named = {MEDIA_ROLES[media]: name for name, media in reversed(found.items())}
    are = f"columns {', '.join(found)} hold" if len(found) > 1 else f"column {next(iter(found))} holds"
    what = f"{are} media of kind {', '.join(dict.fromkeys(found.values()))}"
    kept, left_out = Choice(keep=tuple(found), why="kept as they are"), Choice(kind=kind.name, why="leaves them out")
    choices = [Choice(columns=named), kept, left_out]
    raise UndecidedError(f"{what}, and the rows would be {kind.name} without them", choices)


def any_holds_media(
    rows: Sequence[Mapping[str, Any]], kind: RowKind, *, options: SchemaOptions, found: Mapping[str, str]
) -> bool:
    """Return whether a row of this kind refers to media."""
    media = NoMedia(None)
    for row in rows:
        with suppress(DataError):  # raised again when the row is read
            kind.read(Fields(row, kind.columns, options.columns, found), options, media)
        if media.num_added:
            return True
    return False


class NoMedia(SampleMedia):
    """Takes any reference, and reads nothing."""

    num_added = 0

    def add(self, kind: str, reference: Any, *, said: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        self.num_added += 1
        return {"type": kind, "mime": f"{kind}/x", "span": [0, 0], "width": 1, "height": 1}


def _is_held(rows: Sequence[Mapping[str, Any]], name: str, *, by: Sequence[str]) -> bool:
    """Return whether read columns hold the media of a column; for example members of a tar to which rows refer."""
    filled = [row for row in rows if is_filled(row.get(name))]
    return all(any(_holds(row.get(head_of(each, row)), row[name]) for each in by) for row in filled)


def _holds(value: Any, medium: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(each, medium) for each in value.values())
    return value is medium or (isinstance(value, list | tuple) and any(_holds(each, medium) for each in value))


def _are_on_web(value: Any) -> bool:
    return all(isinstance(each, str) and each.startswith(("http://", "https://")) for each in references_of(value))


def _media_kind(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        kinds = {_media_kind(each) for each in value}
        return kinds.pop() if len(kinds) == 1 else None
    if isinstance(value, Mapping):
        inner = (value.get("bytes"), value.get("path")) if value.keys() <= {"bytes", "path"} else ()
        return next((_media_kind(each) for each in inner if is_filled(each)), None)
    if isinstance(value, bytes):
        return usual_kind(value)
    if not isinstance(value, str) or "://" in value or "\n" in value:
        return None
    if value.startswith("data:"):
        kind = value[len("data:") :].partition("/")[0]
        return kind if kind in MEDIA_ROLES else None
    return None if value.endswith(".ts") else file_kind(value)  # .ts: also TypeScript
