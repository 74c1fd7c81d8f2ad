"""Slices of a large row group or record batch, each a unit: a process that reads several reads what lies between once.

Neither Parquet nor compressed Arrow gives a row of a group without all that lies before it there. A process gets the
slices of a group in order, so it keeps the group open after a slice, and goes on from there at the next.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from typing import Any

OpenGroup = Callable[[], Generator[Any, None, None]]  # all record batches of a group


class _OpenGroup:
    """A group that is read from its start. at: rows that were taken of it."""

    def __init__(self, key: Hashable, batches: Generator[Any, None, None]):
        self.key = key
        self.at = 0
        self._batches = batches
        self._batch: Any = None

    def take(self, num_rows: int) -> Any:
        """The next rows, no more than so many, as a record batch; None at the end."""
        while self._batch is None or not self._batch.num_rows:
            self._batch = next(self._batches, None)
            if self._batch is None:
                return None
        rows, self._batch = self._batch.slice(0, num_rows), self._batch.slice(num_rows)
        self.at += rows.num_rows
        return rows

    def close(self) -> None:
        self._batch = None
        self._batches.close()


class GroupReader:
    """Keeps the group open of which the last slice was read, where it was read to its end."""

    def __init__(self) -> None:
        self._open: _OpenGroup | None = None

    def slice(self, key: Hashable, open_group: OpenGroup, *, start: int, stop: int) -> Iterator[Any]:
        """Record batches of rows start <= number < stop of a group. key: tells the groups of all files apart."""
        group, self._open = self._open, None
        if group is None or group.key != key or group.at > start:
            if group is not None:
                group.close()
            group = _OpenGroup(key, open_group())
        is_whole = False
        try:
            while group.at < start and group.take(start - group.at) is not None:
                pass
            while (rows := group.take(stop - group.at)) is not None:
                is_whole = group.at == stop  # asked here, since nobody reads on after the last rows
                yield rows
                if is_whole:
                    return
        finally:
            if is_whole:
                self._open = group
            else:
                group.close()


GROUPS = GroupReader()  # of this process
