"""The units of all sources in order, each with what maps its rows, and where rows stand that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ...errors import DataError, LmmsStreamError
from ..rows.mapper import Mapper, find_mapper
from ..rows.options import SchemaOptions
from ..sources.files import Fetch
from ..sources.units import Source, Unit
from .encoded_units import EncodedUnit, UnitTask

LOOK_ROWS = 100  # of a source, by which the kind of its rows is found
FETCHED_BYTES = 1 << 30  # of sources that lie fetched at once, unless one alone has more


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchTask:
    """Fetch the source of that number."""

    source: int
    source_name: str
    fetch: Fetch


class Reading:
    """Cuts sources into numbered units as they are asked for. say: is told what was found in each source.

    All sources must give samples of the same columns; DataError otherwise, and for one without rows. Sources that are
    fetched whole are fetched by workers, before their turn and FETCHED_BYTES at most; the first of all, which says what
    is stored, by this process.
    """

    def __init__(self, sources: Sequence[Source], options: SchemaOptions, *, say: Callable[[str], None]):
        self._sources = sources
        self._options = options
        self._say = say
        self._rows_before = [source.first_row for source in sources]  # of each source, rows in units that were laid
        # Source -> units that are cut and not read yet, and 1 more while others may follow.
        self._open: dict[int, int] = {}
        self._columns: dict[str, str] = {}
        self._next_fetch = 1  # the first source that was not looked at yet
        self._fetched: dict[int, int] = {}  # source that lies fetched, or is being fetched -> its bytes
        self._fetching: set[int] = set()
        self._failed: dict[int, LmmsStreamError] = {}  # sources that could not be fetched; raised at their turn
        self._units = self._all_units()
        first = next(self._units)
        assert first is not None
        self._first = first

    @property
    def mapper(self) -> Mapper:
        return self._first.mapper

    def units(self) -> Iterator[UnitTask | None]:
        """None as often as the source of the next unit is not fetched yet."""
        yield self._first
        yield from self._units

    def next_fetch(self) -> FetchTask | None:
        """A source to be fetched, if there is one and room for it."""
        while self._next_fetch < len(self._sources):
            index, source = self._next_fetch, self._sources[self._next_fetch]
            num_bytes, fetch = source.num_bytes or FETCHED_BYTES // 4, source.fetch  # some stores tell no sizes
            if fetch is not None and self._fetched and sum(self._fetched.values()) + num_bytes > FETCHED_BYTES:
                return None
            self._next_fetch += 1
            if fetch is not None:
                self._fetched[index] = num_bytes
                self._fetching.add(index)
                return FetchTask(source=index, source_name=source.name, fetch=fetch)
        return None

    def has_fetched(self, task: FetchTask, error: LmmsStreamError | None) -> None:
        self._fetching.remove(task.source)
        if error is not None:
            self._failed[task.source] = error

    def _is_there(self, index: int) -> bool:
        if index in self._failed:
            raise self._failed[index]
        is_here = index in self._fetched and index not in self._fetching
        return index == 0 or is_here or self._sources[index].fetch is None

    def _all_units(self) -> Iterator[UnitTask | None]:
        number = 0
        said: set[str] = set()
        for index, source in enumerate(self._sources):
            mapper: Mapper | None = None
            while not self._is_there(index):
                yield None
            self._open[index] = 1
            for unit in source.units():
                if mapper is None:
                    mapper = self._find(source, unit)
                    if mapper.description not in said:
                        said.add(mapper.description)
                        self._say(f"{source.name}: {mapper.description}")
                self._open[index] += 1
                yield UnitTask(number=number, unit=unit, mapper=mapper, source=index, source_name=source.name)
                number += 1
            if mapper is None:
                raise DataError(f"{source.name} holds no rows: leave it out, or write it again")
            self._let_go(index)

    def _find(self, source: Source, unit: Unit) -> Mapper:
        rows = list(islice(unit.rows(), LOOK_ROWS))
        values = [row.values for row in rows if row.values is not None]
        if not values:
            first = f"; the first: {rows[0].error}" if rows else ""
            raise DataError(f"{source.name}: none of its first {len(rows)} rows can be read{first}: check its format")
        try:
            mapper = find_mapper(values, self._options.changed(source.settings))
        except DataError as error:
            raise DataError(f"{source.name}: {error}") from error
        self._columns = self._columns or dict(mapper.columns)
        if dict(mapper.columns) != self._columns:
            raise DataError(
                f"{source.name} gives samples with {', '.join(mapper.columns)} and {self._sources[0].name} with "
                f"{', '.join(self._columns)}: convert them to targets of their own, or say which with --kind"
            )
        return mapper

    def has_read(self, task: UnitTask) -> None:
        """A unit is encoded."""
        self._let_go(task.source)

    def _let_go(self, index: int) -> None:
        self._open[index] -= 1
        if not self._open[index]:
            self._sources[index].close()
            self._fetched.pop(index, None)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def rejects(self, task: UnitTask, encoded: EncodedUnit) -> list[tuple[str, int, str]]:
        """Source, row in it from 1, and reason of each row that did not fit; units are asked for in order."""
        before = self._rows_before[task.source]
        self._rows_before[task.source] += encoded.num_rows
        return [(task.source_name, before + number + 1, reason) for number, reason in encoded.rejects]
