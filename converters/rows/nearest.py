"""Columns that fit no kind of rows -> the kind that they are nearest to, and what is to be said for them to be it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from ...errors import DataError
from .row_kind import RowKind

_ALIKE = 0.75  # of SequenceMatcher: one letter of five missing, doubled or swapped


def no_kind(names: Sequence[str], kinds: Iterable[RowKind]) -> DataError:
    """The error for columns of these names."""
    needy = [kind for kind in kinds if kind.needs]
    nearest = max(needy, key=lambda kind: _nearness(kind, names))
    found = f"columns {', '.join(names)} fit no kind of rows"
    keep = "or keep columns as they are with --keep"
    if not _nearness(nearest, names):
        return DataError(
            f"{found} and are not named like those of one: name one's columns with --columns ROLE=COLUMN and --kind "
            f"({', '.join(kind.name for kind in needy)}), {keep}"
        )
    missing = [role for role, usual in nearest.needs.items() if not set(usual) & set(names)]
    said = " ".join(f"{role}={_most_alike(nearest.needs[role], names)[1] or 'COLUMN'}" for role in missing)
    remedy = f"pass --columns {said} for what has another name" if missing else "complete the rows"
    return DataError(f"{found}; the nearest is {nearest.name}, which needs {nearest.needed}: {remedy}, {keep}")


def _nearness(kind: RowKind, names: Sequence[str]) -> float:
    """1 for each needed column that is there, less for one of a similar name, over the columns that it needs.

    What a kind may have besides decides between kinds of which equally much is there.
    """
    needed = sum(_most_alike(usual, names)[0] for usual in kind.needs.values()) / len(kind.needs)
    may = sum(bool(set(usual) & set(names)) for usual in kind.may.values())
    return needed + may / 1000 if needed else 0.0


def _most_alike(usual: Sequence[str], names: Sequence[str]) -> tuple[float, str]:
    """How much the name that is most alike to one of the usual ones is so, and that name; 0 and "" for none."""
    found = [(SequenceMatcher(None, name.lower(), other).ratio(), name) for name in names for other in usual]
    best = max(found, key=lambda each: each[0], default=(0.0, ""))
    return best if best[0] >= _ALIKE else (0.0, "")
