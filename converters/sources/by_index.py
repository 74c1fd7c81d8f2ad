"""Rows of a unit by their index, of which only those that are asked for are parsed: for who goes on within a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .table import RowOf, json_row
from .units import Row, Unit


class RowsByIndex(Protocol):
    """The rows of a unit, in the order of its rows(): the first has index 0."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        """Rows in the order of their indices, which differ; no other row is parsed. Raises what rows() raises."""
        ...


@runtime_checkable
class HasIndex(Protocol):
    """A unit that tells where its rows lie without parsing them."""

    def by_index(self) -> RowsByIndex: ...


def by_index(unit: Unit) -> RowsByIndex:
    """Of a unit of any kind; one whose rows only parsing finds is parsed whole."""
    return unit.by_index() if isinstance(unit, HasIndex) else ParsedRows(list(unit.rows()))


@dataclass(frozen=True, slots=True)
class ParsedRows:
    parsed: Sequence[Row]

    def __len__(self) -> int:
        return len(self.parsed)

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        return (self.parsed[index] for index in indices)


@dataclass(frozen=True, slots=True)
class RowTexts:
    """texts: the number of a row and its text. row_of: what makes the row of them."""

    texts: Sequence[tuple[int, bytes]]
    row_of: RowOf = json_row

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        return (self.row_of(*self.texts[index]) for index in indices)


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """wanted: gives the rows with ascending numbers, which are their indices. name: of the file."""

    num_rows: int
    wanted: Callable[[NDArray[np.int64]], Iterator[Row]]
    name: str

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        numbers = np.asarray(indices, np.int64)
        ascending = np.sort(numbers)
        if np.array_equal(numbers, ascending):
            yield from self.wanted(ascending)
            return
        found = {row.number: row for row in self.wanted(ascending)}
        for number in numbers.tolist():
            if number not in found:
                raise DataError(f"{self.name}: row {number + 1} of a unit of {self.num_rows} is missing: copy it again")
            yield found[number]
