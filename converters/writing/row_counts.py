"""Rows that are in no dataset: how many there are, by why they were left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
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
        """Of the rows that a unit left out."""
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
