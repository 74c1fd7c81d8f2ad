"""Columns by role: named by the user, found in the first rows, or with usual names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...errors import DataError
from ...processors.json_text import parsed

Columns = Mapping[str, tuple[str, ...]]  # role -> usual names of its column, in order of preference
QUESTIONS = ("question", "query", "prompt", "problem", "instruction", "input", "inputs")  # usual names of questions


def named_alike(*roles: str) -> Columns:
    """Return roles whose usual column has the name of the role."""
    return {role: (role,) for role in roles}


@dataclass(frozen=True, slots=True)
class Fields:
    """Values of a row by role.

    usual: role -> usual names of its column. columns: role -> the user's column, "" for no column; a column named for
    one role is not read for another role by its usual name. found: role -> column of the first rows, for roles without
    a column in this row. unread: receives keys of messages that nothing reads.
    """

    values: Mapping[str, Any]
    usual: Columns
    columns: Mapping[str, str] = field(default_factory=dict)
    found: Mapping[str, str] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)

    def column(self, role: str) -> str | None:
        """Return the column of a role, present or not; None if the role has no column."""
        if role in self.columns:
            return self.columns[role] or None
        taken = self.columns.values()
        present = [name for name in self.usual[role] if name in self.values and name not in taken]
        filled = [name for name in present if is_filled(self.values[name])]
        return next(iter(filled or present), self.found.get(role))

    def get(self, role: str) -> Any:
        """Return the role's value; None for a missing value or NaN, which stands for a missing value in tables."""
        column = self.column(role)
        value = None if column is None else value_at(self.values, column)
        if role == "messages" and isinstance(value, dict):
            lists = list(value.values())  # `datasets` stores a list of objects in an object of equally long lists
            if lists and all(isinstance(each, list) and len(each) == len(lists[0]) for each in lists):
                value = [dict(zip(value, each, strict=True)) for each in zip(*lists, strict=True)]
        return None if _is_missing(value) else value

    def text(self, role: str) -> str:
        """Return the role's value in text form, also for numbers; DataError for null and other types."""
        value, name = self.get(role), self.column(role) or self.usual[role][0]
        if value is None:
            raise DataError(f"expected text in column {name!r}, found {_found(self.values, name)}: complete the row")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise DataError(
                f"column {name!r} must hold text, found {type(value).__name__}: convert it with --map FILE.py:FUNCTION"
            )
        return str(value)

    def items(self, role: str, what: str) -> list[Any]:
        """Return the role's value, a list that is not empty, also from JSON text; else DataError."""
        value, name = self.get(role), self.column(role) or self.usual[role][0]
        listed = parse_json(value, name) if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed:
            found = "an empty list" if listed == [] else type(listed).__name__
            found = _found(self.values, name) if value is None else found
            raise DataError(f"expected a list of {what} in column {name!r}, found {found}: correct or remove the row")
        return listed

    def references(self, role: str) -> list[Any]:
        """Return the references to media in the role's column; see references_of."""
        return references_of(self.get(role))


def references_of(value: Any) -> list[Any]:
    """Return references to media: from a list, its JSON text, or one reference; [] for none."""
    value = unpacked(value)
    if value is None or value in ("", b""):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def value_at(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column or a nested column (`json.conversations`); None if missing.

    >>> value_at({"json": {"conversations": [1]}}, "json.conversations")
    [1]
    """
    if column in values or "." not in column:
        return values.get(column)
    outer, _, inner = column.partition(".")
    nested = values.get(outer)
    return value_at(nested, inner) if isinstance(nested, Mapping) else None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def head_of(column: str, names: Collection[str]) -> str:
    """Return the top column of a column: itself, or the first name of a nested column.

    >>> head_of("json.text", ["json", "img.jpg"]), head_of("img.jpg", ["json", "img.jpg"])
    ('json', 'img.jpg')
    """
    return column if column in names else column.partition(".")[0]


def is_filled(value: Any) -> bool:
    """Return whether a value holds something: not null, not NaN, and not an empty text, list or object."""
    return not _is_missing(value) and (not isinstance(value, (str, bytes, list, tuple, dict)) or bool(value))


def unpacked(value: Any) -> Any:
    """Return the list of a JSON text (the form of lists in tables of texts); other values unchanged."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        with suppress(ValueError):
            return parsed(value.encode())
    return value


def parse_json(text: str, name: str) -> Any:
    try:
        return parsed(text.encode())
    except ValueError as error:
        raise DataError(
            f"column {name!r} holds text that is not JSON ({error}): write it as JSON, or as a list"
        ) from error


def check_text(name: str, text: str) -> None:
    """Raise DataError for half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"column {name!r} holds text that UTF-8 cannot encode ({error.reason}): repair it") from error


def _found(values: Mapping[str, Any], name: str) -> str:
    """Describe a missing value: null in this column, or the names of the row's columns."""
    return "null" if name in values else f"columns {', '.join(map(str, values)) or 'none'}"
