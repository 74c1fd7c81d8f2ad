"""Rows that a drop list leaves out, by the sources of a conversion; checks that the sources have them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError
from .unit_files import EncodedUnit

_NO_ROWS = np.empty(0, np.int64)
_SHOWN = 5  # rows in an error message


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRows:
    """Rows of a drop list. rows: source name -> int64[n], ascending, from 0. sources: names by source number.

    Slices of one source have one name. is_known: names of sources that were found to have all listed rows. file: the
    drop list.
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
    """Removes dropped rows from units, in the order of the sources. dropped: None without a drop list."""

    def __init__(self, dropped: DroppedRows | None):
        self._dropped = dropped
        self._read: dict[str, dict[int, tuple[int, int]]] = {}  # name -> source -> its rows [first, stop) read yet
        self._last: int | None = None  # the source of the unit before

    def numbers(self, encoded: EncodedUnit, source: int, first: int) -> NDArray[np.int64]:
        """Return the numbers of dropped rows in a unit, ascending. first: the unit's first row in the source.

        DataError if the source before has ended without a listed row.
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
        """Raise DataError if a source lacks a listed row; not called if a limit left rows unread."""
        for name in self._dropped.rows if self._dropped is not None else ():
            self._check(name)

    def _check_ended(self, dropped: DroppedRows) -> None:
        """Check the name of the last source, unless another source follows under this name."""
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
                f"{self._dropped.file} names row {shown} of {name}, but only rows {has} are read: correct the list, or "
                "the slice of this source"
            )


def without(encoded: EncodedUnit, numbers: NDArray[np.int64]) -> tuple[EncodedUnit, int]:
    """Return a unit without rejects, left-out rows and unread names of dropped rows; and the number of dropped rows.

    numbers: dropped rows in the unit, ascending; a row counts if the unit has a sample, reject or left-out entry of it.
    The samples of these rows stay in the unit: the placement does not take them.
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
