"""Rows of preferences that are read as chats: bad answers are not learnt. Pure.

Fine-tuning would learn the bad answers like the good ones, so that such rows are refused as chats until the user says
what of them is to be learnt. The kinds that read both answers are in preference_kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...errors import DataError

PAIR = ("chosen", "rejected")
VERDICT_COLUMNS = ("label", "kto_tag")  # whether the answer of a row is good: true or false


def check_pairs(names: Collection[str], columns: Mapping[str, str]) -> None:
    """DataError for rows with a chosen and a rejected answer; columns: those that the user named, by role."""
    if set(PAIR) <= set(names) and not set(PAIR) & set(columns.values()):
        raise DataError(
            "columns chosen and rejected hold a good and a bad answer each: say what is to be learnt, with "
            "--kind messages --columns messages=chosen or --kind prompt-response --columns response=chosen, or read "
            "both with --kind preference"
        )


def check_verdicts(rows: Iterable[Mapping[str, Any]], kind: str) -> None:
    """DataError where rows of a kind say whether their answers are good."""
    for row in rows:
        for name in VERDICT_COLUMNS:
            if _verdict(row.get(name)) is not None:
                raise DataError(
                    f"column {name!r} says of each answer whether it is good, and bad ones would be learnt as well: "
                    f"pass --kind {kind} --on-error skip to leave out those that are false, or remove the column"
                )


def check_verdict(row: Mapping[str, Any]) -> None:
    """DataError for a row that says that its answer is bad."""
    for name in VERDICT_COLUMNS:
        if name in row and _verdict(row[name]) is False:
            raise DataError(f"column {name!r} is {row[name]}, so its answer is not one to be learnt: leave the row out")


def is_verdict(value: Any) -> bool:
    """Whether it says good or bad: true or false, or 1 or 0, as text too."""
    if isinstance(value, str):
        return value.lower() in ("true", "false", "1", "0")
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def _verdict(value: Any) -> bool | None:
    """True or false, as text too, which is how CSV holds them; None for a value that is no verdict."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else None
