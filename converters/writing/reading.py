"""The units of all sources in order, each with what maps its rows, and where rows stand that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ...errors import DataError
from ..rows.mapper import Mapper, find_mapper
from ..rows.options import SchemaOptions
from ..sources.units import Source, Unit
from .encoded_units import EncodedUnit, UnitTask

LOOK_ROWS = 100  # of a source, to find their kind by


class Reading:
    """Cuts sources into numbered units as they are asked for. say: is told what was found in each source.

    All sources must give samples of the same columns; DataError otherwise, and for one without rows.
    """

    def __init__(self, sources: Sequence[Source], options: SchemaOptions, *, say: Callable[[str], None]):
        self._sources = sources
        self._options = options
        self._say = say
        self._rows_before = [source.first_row for source in sources]  # of the units that were laid
        self._open: dict[int, int] = {}  # source -> units that are not read yet; 1 more while others follow
        self._columns: dict[str, str] = {}
        self._units = self._all_units()
        self._first = next(self._units)

    @property
    def mapper(self) -> Mapper:
        return self._first.mapper

    def units(self) -> Iterator[UnitTask]:
        yield self._first
        yield from self._units

    def _all_units(self) -> Iterator[UnitTask]:
        number = 0
        said: set[str] = set()
        for index, source in enumerate(self._sources):
            mapper: Mapper | None = None
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
            mapper = find_mapper(values, self._options)
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

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def rejects(self, task: UnitTask, encoded: EncodedUnit) -> list[tuple[str, int, str]]:
        """Source, row in it from 1, and reason of each row that did not fit; units are asked for in order."""
        before = self._rows_before[task.source]
        self._rows_before[task.source] += encoded.num_rows
        return [(task.source_name, before + number + 1, reason) for number, reason in encoded.rejects]
