"""Counts of rows left out of a conversion, by reason, and of unread names in rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Why = Literal["filtered", "empty", "by_filter", "by_map"]  # names in the files of encoded units
RowsLeftOut = Mapping[Why, NDArray[np.int64]]  # numbers of rows, ascending
_COUNTED_AS: Mapping[Why, str] = {
    "filtered": "num_filtered",
    "empty": "num_empty",
    "by_filter": "num_left_out_by_filter",
    "by_map": "num_left_out_by_map",
}
REASONS = tuple(_COUNTED_AS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Numbers of rows left out of a dataset, with their names in dataset.json.

    num_rejected: invalid rows. num_filtered: rows of unwanted length. num_empty: rows with empty text.
    num_left_out_by_filter, num_left_out_by_map: rows left out by the user's functions. num_duplicates: rows whose
    samples are all stored from earlier rows. num_dropped: rows named in a drop list.
    """

    num_rejected: int = 0
    num_filtered: int = 0
    num_empty: int = 0
    num_left_out_by_filter: int = 0
    num_left_out_by_map: int = 0
    num_duplicates: int = 0
    num_dropped: int = 0

    @staticmethod
    def of_unit(rows: RowsLeftOut, *, num_rejected: int, num_duplicates: int, num_dropped: int = 0) -> RowCounts:
        """Return the counts of rows left out by a unit."""
        counts = {_COUNTED_AS[why]: len(numbers) for why, numbers in rows.items()}
        return RowCounts(num_rejected=num_rejected, num_duplicates=num_duplicates, num_dropped=num_dropped, **counts)

    @staticmethod
    def of_dataset(description: Mapping[str, Any]) -> RowCounts:
        """Return the counts of a dataset.json; counts missing in earlier releases are 0."""
        return RowCounts(**{name: description.get(name, 0) for name in _NAMES})

    @staticmethod
    def total(counts: Iterable[RowCounts]) -> RowCounts:
        return sum(counts, RowCounts())

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def left_out(self) -> dict[str, int]:
        """Nonzero counts of rows left out, by reason in words."""
        reasons = {
            "with values that do not fit, listed in _lmms/rejects.jsonl": self.num_rejected,
            "of too few or too many tokens": self.num_filtered,
            "of empty text": self.num_empty,
            "that --filter left out": self.num_left_out_by_filter,
            "that --map left out": self.num_left_out_by_map,
            "whose samples came before": self.num_duplicates,
            "that --drop names": self.num_dropped,
        }
        return {reason: count for reason, count in reasons.items() if count}


_NAMES = tuple(field.name for field in fields(RowCounts))


# Unread names in rows. Units are counted in the order of the sources, which makes the counts independent of the number
# of processes.

KEY_OF_MESSAGES = "messages[]."  # prefix of keys of messages; other names are columns
UnreadRows = Mapping[str, NDArray[np.int64]]  # name -> numbers of the unit's rows that hold a value with this name


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """Rows with an unread name. first: the first such row, as "source:row". num_rows: number of rows."""

    first: str
    num_rows: int


UnreadNames = Mapping[str, Unread]


def unread_of(rows: UnreadRows, *, source: str, first_row: int) -> dict[str, Unread]:
    """Return the counts of one unit. first_row: number of rows of the source before the unit."""
    return {
        name: Unread(first=f"{source}:{first_row + int(numbers[0]) + 1}", num_rows=len(numbers))
        for name, numbers in rows.items()
        if len(numbers)
    }


def joined_unread(each: Iterable[UnreadNames]) -> dict[str, Unread]:
    """Return the sum of the counts, in the order of the sources."""
    found: dict[str, Unread] = {}
    for names in each:
        for name, unread in names.items():
            before = found.get(name)
            num_rows = unread.num_rows + (before.num_rows if before else 0)
            found[name] = Unread(first=before.first if before else unread.first, num_rows=num_rows)
    return found


def described_unread(names: UnreadNames) -> dict[str, Any]:
    """Return an entry for dataset.json; empty if every name is read."""
    return {"unread": {name: asdict(unread) for name, unread in names.items()}} if names else {}


def unread_of_dataset(description: Mapping[str, Any]) -> dict[str, Unread]:
    """Return the counts in a dataset.json; {} for earlier releases without them."""
    return {name: Unread(**unread) for name, unread in description.get("unread", {}).items()}
