"""Rows of questions whose answers are chosen: the choices are in a column of their own, which no kind reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import DataError
from .fields import is_filled

CHOICES = ("choices", "options", "endings")


def choices_in(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the column of choices that holds something in any of the rows."""
    return next((name for row in rows for name in CHOICES if is_filled(row.get(name))), None)


def choices_unread(name: str) -> str:
    """Return the part of an error that says what is wrong and what to do."""
    return (
        f"column {name} holds what the answer is chosen from, and no kind reads it: write the choices into the "
        "question and the chosen one into the answer, with --map FILE.py:FUNCTION"
    )


def check_choices(rows: Iterable[Mapping[str, Any]], kind: str) -> None:
    """DataError if rows of questions and answers have choices, without which neither tells anything."""
    name = choices_in(rows) if kind == "question-answer" else None
    if name is not None:
        raise DataError(f"{choices_unread(name)}, or pass --kind {kind} to leave the column out")
