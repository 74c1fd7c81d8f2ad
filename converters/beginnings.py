"""Sources -> the first units of some of them, by which a dry run tells what all of them hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .sources.files import Fetch
from .sources.units import NoRowsError, Source, Unit
from .writing.reading import LOOK_ROWS

_MOST_BYTES = 1 << 28  # read of all sources


class Beginning:
    """The first units of a source, as a source that lies here: nobody else fetches it."""

    fetch: Fetch | None = None

    def __init__(self, source: Source, *, num_rows: int, num_bytes: int):
        self._source, self._num_rows, self._num_bytes = source, num_rows, num_bytes
        self.name, self.identity = source.name, source.identity
        self.num_bytes, self.rows, self.settings = source.num_bytes, source.rows, source.settings
        self.is_part = source.is_part
        self.rows_read = self.bytes_read = 0
        self.is_whole = False  # whether all of its rows were read

    @property
    def first_row(self) -> int:
        return self._source.first_row

    def units(self) -> Iterator[Unit]:
        try:
            for unit in self._source.units():
                if self.rows_read >= self._num_rows or self.bytes_read >= self._num_bytes:
                    return
                yield unit
                self.rows_read += unit.count()  # known now, since it was read
                self.bytes_read += unit.num_bytes
        except NoRowsError:
            self.is_whole = True
            raise
        self.is_whole = True

    def close(self) -> None:
        self._source.close()

    def expected_rows(self, rows_a_byte: float) -> float:
        """Of all of it. rows_a_byte: of the rows that were read of others too, for a source without any."""
        if self.is_whole:
            return self.rows_read
        density = self.rows_read / self.bytes_read if self.bytes_read else rows_a_byte
        start, stop, _ = self.rows.indices(int(self.num_bytes * density))
        return max(self.rows_read, stop - start)


def beginnings(sources: Sequence[Source], num_rows: int) -> list[Beginning]:
    """Of as many sources as LOOK_ROWS rows can be read of each, evenly spread."""
    count = min(len(sources), max(1, num_rows // LOOK_ROWS))
    chosen = [sources[number * len(sources) // count] for number in range(count)]
    return [Beginning(source, num_rows=num_rows // count, num_bytes=_MOST_BYTES // count) for source in chosen]
