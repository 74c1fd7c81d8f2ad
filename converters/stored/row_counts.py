"""Counts of rows that a conversion leaves out, by reason, and of names in rows that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Why = Literal["filtered", "empty", "by_filter", "by_map"]  # as the files of encoded units name it
RowsLeftOut = Mapping[Why, NDArray[np.int64]]  # the numbers of rows, ascending
_COUNTED_AS: Mapping[Why, str] = {
    "filtered": "num_filtered",
    "empty": "num_empty",
    "by_filter": "num_left_out_by_filter",
    "by_map": "num_left_out_by_map",
}
REASONS = tuple(_COUNTED_AS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """How many rows are in no dataset, under the names that dataset.json has for them.

    num_rejected: they did not fit. num_filtered: for their length. num_empty: their text is empty.
    num_left_out_by_filter, num_left_out_by_map: by the user's functions. num_duplicates: all that is stored of them is
    stored of an earlier one. num_dropped: a drop list names them.
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
        """Counts of the rows that a unit left out."""
        counts = {_COUNTED_AS[why]: len(numbers) for why, numbers in rows.items()}
        return RowCounts(num_rejected=num_rejected, num_duplicates=num_duplicates, num_dropped=num_dropped, **counts)

    @staticmethod
    def of_dataset(description: Mapping[str, Any]) -> RowCounts:
        """What a dataset.json says; earlier releases did not write all of it."""
        return RowCounts(**{name: description.get(name, 0) for name in _NAMES})

    @staticmethod
    def total(counts: Iterable[RowCounts]) -> RowCounts:
        return sum(counts, RowCounts())

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def as_dict(self) -> dict[str, Any]:
        """The counts by their names, without what else a report says."""
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def left_out(self) -> dict[str, int]:
        """Why rows are not in the dataset, in words for people, and how many."""
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


# Names in rows that nothing reads. Units are counted in the order of the sources, so the counts are the same for any
# number of processes.

KEY_OF_MESSAGES = "messages[]."  # before the name of a key of messages; other names are columns
UnreadRows = Mapping[str, NDArray[np.int64]]  # name -> numbers of the rows in the unit that hold something by this name


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """first: the first row that holds something by a name, as "source:row". num_rows: rows that do."""

    first: str
    num_rows: int


UnreadNames = Mapping[str, Unread]


def unread_of(rows: UnreadRows, *, source: str, first_row: int) -> dict[str, Unread]:
    """Counts of one unit. first_row: rows of the source before the unit."""
    return {
        name: Unread(first=f"{source}:{first_row + int(numbers[0]) + 1}", num_rows=len(numbers))
        for name, numbers in rows.items()
        if len(numbers)
    }


def joined_unread(each: Iterable[UnreadNames]) -> dict[str, Unread]:
    """Sum of the counts, in the order of the sources."""
    found: dict[str, Unread] = {}
    for names in each:
        for name, unread in names.items():
            before = found.get(name)
            num_rows = unread.num_rows + (before.num_rows if before else 0)
            found[name] = Unread(first=before.first if before else unread.first, num_rows=num_rows)
    return found


def described_unread(names: UnreadNames) -> dict[str, Any]:
    """Entry of a dataset.json; empty if every name is read."""
    return {"unread": {name: asdict(unread) for name, unread in names.items()}} if names else {}


def unread_of_dataset(description: Mapping[str, Any]) -> dict[str, Unread]:
    """Counts in a dataset.json; earlier releases did not write them."""
    return {name: Unread(**unread) for name, unread in description.get("unread", {}).items()}
