"""Rows that a drop list leaves out, by the sources of a conversion; which of them were met. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError
from .unit_files import EncodedUnit

_NO_ROWS = np.empty(0, np.int64)
_SHOWN = 5  # rows that an error names


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRows:
    """rows: of each name of a source int64[n], ascending, from 0. sources: names by their numbers; slices of one source
    have one name. is_known: names of sources that have all of these rows, as was looked up. file: the drop list.
    """

    file: str
    sources: Sequence[str]
    rows: Mapping[str, NDArray[np.int64]]
    is_known: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """Digest, equal for lists that leave out the same rows."""
        digest = xxhash.xxh3_128()
        for name in sorted(self.rows):
            digest.update(f"{name}\0".encode() + self.rows[name].astype("<i8").tobytes())
        return digest.hexdigest()

    def of_unit(self, source: int, first: int, stop: int) -> NDArray[np.int64]:
        """Dropped rows in [first, stop) of the source with this number, counted from `first`."""
        rows = self.rows.get(self.sources[source], _NO_ROWS)
        return rows[np.searchsorted(rows, first) : np.searchsorted(rows, stop)] - first


class Dropping:
    """Leaves rows out of units, which come in the order of the sources. dropped: None for no drop list."""

    def __init__(self, dropped: DroppedRows | None):
        self._dropped = dropped
        self._read: dict[str, dict[int, tuple[int, int]]] = {}  # by name and source, its rows [first, stop) so far
        self._last: int | None = None  # the source of the unit before

    def numbers(self, encoded: EncodedUnit, source: int, first: int) -> NDArray[np.int64]:
        """Numbers of rows of a unit that are left out, ascending. first: of its rows, in the source.

        DataError where another source has ended, and does not have a row that is listed.
        """
        dropped = self._dropped
        if dropped is None:
            return _NO_ROWS
        if self._last not in (None, source):
            self._check_ended(dropped)
        self._last = source
        read = self._read.setdefault(dropped.sources[source], {})
        stop = first + encoded.num_rows
        read[source] = read.get(source, (first, first))[0], stop
        return dropped.of_unit(source, first, stop)

    def finish(self) -> None:
        """DataError where a source does not have a row that is listed; not asked where a limit left rows unread."""
        for name in self._dropped.rows if self._dropped is not None else ():
            self._check(name)

    def _check_ended(self, dropped: DroppedRows) -> None:
        """The name of the source before, if no other source has it."""
        assert self._last is not None
        name = dropped.sources[self._last]
        if name in dropped.rows and name not in dropped.sources[self._last + 1 :]:
            self._check(name)

    def _check(self, name: str) -> None:
        assert self._dropped is not None
        if name in self._dropped.is_known:
            return
        rows, read = self._dropped.rows[name], list(self._read.get(name, {}).values())
        is_there = np.zeros(len(rows), bool)
        for first, stop in read:
            is_there |= (first <= rows) & (rows < stop)
        if not is_there.all():
            missing = rows[~is_there]
            shown = ", ".join(str(row + 1) for row in missing[:_SHOWN].tolist()) + ", …" * (len(missing) > _SHOWN)
            has = ", ".join(f"{first + 1} to {stop}" for first, stop in read) or "none"
            raise DataError(
                f"{self._dropped.file} names row {shown} of {name}, of which rows {has} are read: correct the list, or "
                "what is read of that source"
            )


def without(encoded: EncodedUnit, numbers: NDArray[np.int64]) -> tuple[EncodedUnit, int]:
    """A unit whose rejects, rows left out for other reasons and rows with unread names are none of some rows; and how
    many of these it had.

    numbers: of rows in the unit, ascending. The samples of these rows are still there: the layout takes none of them.
    """
    if not len(numbers):
        return encoded, 0
    rows = [encoded.rows, np.array([number for number, _ in encoded.rejects], np.int64), *encoded.left_out.values()]
    dropped = set(numbers.tolist())
    left = replace(
        encoded,
        rejects=[reject for reject in encoded.rejects if reject[0] not in dropped],
        left_out={why: each[~np.isin(each, numbers)] for why, each in encoded.left_out.items()},
        unread={name: each[~np.isin(each, numbers)] for name, each in encoded.unread.items()},
    )
    return left, int(np.isin(numbers, np.concatenate(rows)).sum())
