"""Row groups and record batches of a file -> pieces of them, each a unit. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from .table import Location, share_of
from .units import UNIT_ROWS


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive groups (row groups, record batches) of a file, and which of their rows."""

    first: int  # group
    stop: int  # group, not included
    skip: int  # rows
    num_rows: int
    num_bytes: int  # of the file
    is_slice: bool  # of one group, of which other pieces are other slices


def cut(rows: list[int], sizes: list[int], *, start: int, stop: int | None, location: Location) -> Iterator[Piece]:
    """Pieces of about `unit_bytes`, and UNIT_ROWS at most, that hold rows start <= number < stop of groups.

    rows, sizes: of each group, its rows and bytes. A group that has more than a piece holds is cut into slices of rows.
    """
    ends = list(accumulate(rows))
    total = ends[-1] if ends else 0
    stop = total if stop is None else min(stop, total)
    bytes_before = [0, *accumulate(sizes)]
    file_bytes = location.file.num_bytes

    def share(row: int, group: int) -> int:
        """Bytes of the file before a row of a group, by the group's bytes."""
        passed = sizes[group] * (row - ends[group] + rows[group]) // max(1, rows[group])
        return share_of(file_bytes, before=bytes_before[group] + passed, whole=bytes_before[-1])

    while start < stop:
        first = bisect_right(ends, start)
        begin = ends[first] - rows[first]
        slice_rows = min(UNIT_ROWS, max(1, location.unit_bytes * rows[first] // max(1, sizes[first])))
        is_slice = slice_rows < rows[first]
        if is_slice:
            last = first + 1
            until = min(stop, ends[first], begin + ((start - begin) // slice_rows + 1) * slice_rows)
        else:
            last = bisect_right(bytes_before, bytes_before[first] + location.unit_bytes) - 1
            last = max(first + 1, min(last, bisect_right(ends, begin + UNIT_ROWS)))
            until = min(stop, ends[last - 1])
        num_bytes = share(until, last - 1) - share(start, first)
        yield Piece(first, last, start - begin, until - start, num_bytes, is_slice)
        start = until
