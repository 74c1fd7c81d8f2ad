"""Columns that hold nothing in the first rows, by which rows are read, and hold something in a later row. Pure.

Most rows have no such column, so that the question costs them a comparison of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import DataError
from .fields import is_filled
from .kinds import KINDS
from .preferences import VERDICT_COLUMNS
from .row_kind import RowKind

# Whether an answer is good is asked of every row (preferences.py).
_USUAL_NAMES = {name for kind in KINDS.values() for names in kind.columns.values() for name in names} - {
    *VERDICT_COLUMNS
}


def filled_names(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the columns that hold something in any of these rows."""
    return frozenset(name for row in rows for name in row if is_filled(row[name]))


def late_columns(values: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """Names of the columns that hold something in this row. names: columns of the first rows, which are left out."""
    return [name for name in values if name not in names and is_filled(values[name])]


def check_kind(values: Mapping[str, Any], late: Sequence[str], kind: RowKind, columns: Mapping[str, str]) -> None:
    """DataError if late columns make a row one of another kind than the first rows. columns: as the user named them."""
    usual = [name for name in late if name in _USUAL_NAMES or name in columns.values()]
    if not usual or (kind.needs and not kind.fits(values, columns)):
        return  # a row that does not fit is refused where it is read
    found = next((each for each in KINDS.values() if each.fits(values, columns)), kind)
    if found.name == kind.name:
        return
    are = "columns" if len(usual) > 1 else "column"
    raise DataError(
        f"{are} {', '.join(usual)}: the first rows have none, so they are {kind.name}, and with it this row is "
        f"{found.name}: convert the rows of each kind on their own, or pass --kind {kind.name} to leave it out of all "
        "rows (counted)"
    )
