"""Rows of preferences: of two answers the better, or of one whether it is good. Pure.

Fine-tuning would learn the bad answers like the good ones, so that these rows are refused until the user says what of
them is to be learnt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...errors import DataError

_PAIR = ("chosen", "rejected")
_VERDICTS = ("label", "kto_tag")  # whether the answer of a row is good: true or false


def check_pairs(names: Collection[str], columns: Mapping[str, str]) -> None:
    """DataError for rows with a chosen and a rejected answer; columns: those that the user named, by role."""
    if set(_PAIR) <= set(names) and not set(_PAIR) & set(columns.values()):
        raise DataError(
            "columns chosen and rejected hold a good and a bad answer each: say what is to be learnt, with "
            "--kind messages --columns messages=chosen or --kind prompt-response --columns response=chosen, or keep "
            "them as they are with --kind columns"
        )


def check_verdicts(rows: Iterable[Mapping[str, Any]], kind: str) -> None:
    """DataError where rows of a kind say whether their answers are good."""
    for row in rows:
        for name in _VERDICTS:
            if _verdict(row.get(name)) is not None:
                raise DataError(
                    f"column {name!r} says of each answer whether it is good, and bad ones would be learnt as well: "
                    f"pass --kind {kind} --on-error skip to leave out those that are false, or remove the column"
                )


def check_verdict(row: Mapping[str, Any]) -> None:
    """DataError for a row that says that its answer is bad."""
    for name in _VERDICTS:
        if name in row and _verdict(row[name]) is False:
            raise DataError(f"column {name!r} is {row[name]}, so its answer is not one to be learnt: leave the row out")


def _verdict(value: Any) -> bool | None:
    """True or false, as text too, which is how CSV holds them; None for a value that is no verdict."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else None
