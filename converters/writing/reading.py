"""Units of all sources in order, each with the mapper of its rows; row numbers of rejects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...errors import ConfigError, DataError, LmmsStreamError
from ..rows.mapper import Mapper, find_mapper, is_stored, stored_mapper, stored_options
from ..rows.options import SchemaOptions
from ..rows.schemas import columns_schema
from ..rows.user_functions import RowFunctions, row_functions
from ..sources.files import Fetch
from ..sources.mds import ShardSamples
from ..sources.units import NoRowsError, Source, Unit
from ..stored.catalog import schema_of
from .encoded_units import UnitTask
from .unit_files import EncodedUnit

LOOK_ROWS = 100  # rows of a source for detecting the kind
LOOK_UNITS = 64  # maximum of units without a row that the functions keep, before the first stored row
SHOWN_EMPTY = 5  # files without rows in a log line
FETCHED_BYTES = 1 << 30  # of sources fetched ahead, unless a single source has more


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchTask:
    """Fetch the source with this number."""

    source: int
    source_name: str
    fetch: Fetch


class Reading:
    """Cuts sources into numbered units on demand. say: receives the kind of rows of each source.

    All sources must give samples of equal columns; DataError otherwise, and for a source without rows. Workers fetch
    sources that need complete files, before their turn and at most FETCHED_BYTES at once; this process fetches the
    first source, which decides the stored columns. share: yield only the units of a part, numbered in order.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: SchemaOptions,
        *,
        say: Callable[[str], None],
        share: Share | None = None,
    ):
        self._sources = sources
        self._options = options
        self._say = say
        self._share = share
        self._first_rows = [source.first_row for source in sources]
        self._rows_before = [*self._first_rows]  # rows of each source before the next unit to place
        # Source -> units that are cut and not read yet, plus 1 until the source is cut to its end.
        self._open: dict[int, int] = {}
        self._columns: dict[str, str] = {}
        self._schema = ""
        self._next_fetch = 1  # the first source not looked at yet
        self._fetched: dict[int, int] = {}  # source that is fetched or being fetched -> its bytes
        self._fetching: set[int] = set()
        self._failed: dict[int, LmmsStreamError] = {}  # sources with a failed fetch; the error is raised at their turn
        self.num_units: dict[int, int] = {}  # number of units of each source cut to its end
        self.empty: list[int] = []  # files without rows of folders and globs; they are passed over
        self._units = self._all_units()
        self._look_rows: list[dict[str, Any]] = []  # first rows, which decide the kind of the first source
        self._first: list[UnitTask] = []  # units up to the unit whose rows decide the stored columns
        self._look()

    def _look(self) -> None:
        for unit in self._units:
            assert unit is not None
            self._first.append(unit)
            if unit.mapper is not None:
                return
            if len(self._first) == LOOK_UNITS:
                what = "blank lines have" if unit.functions is None else "--filter and --map leave"
                raise DataError(
                    f"{what} no row of the first {LOOK_UNITS} units of {self._first[0].source_name}, so the columns to "
                    "store are unknown: name first a source with such rows"
                )
        if len(self.empty) == len(self._sources):
            raise DataError(f"{self._shown_empty} hold no rows: name files with rows, or write the files again")
        raise DataError("--filter and --map leave no row of any source: correct them")

    @property
    def mapper(self) -> Mapper:
        mapper = self._first[-1].mapper
        assert mapper is not None
        return mapper

    @property
    def has_media(self) -> bool:
        """Whether any of the first rows refers to media."""
        return self.mapper.any_holds_media(self._look_rows)

    def units(self) -> Iterator[UnitTask | None]:
        """Yield the units in order; yield None while the next unit's source is not fetched yet."""
        number = 0
        for task in chain(self._first, self._units):
            if task is None or self._share is None:
                yield task
            elif self._share.has(task.source, task.index):
                yield replace(task, number=number)
                number += 1
            else:
                self._let_go(task.source)

    def next_fetch(self) -> FetchTask | None:
        """Return the next source to fetch, if FETCHED_BYTES has room for it."""
        while self._next_fetch < len(self._sources):
            index, source = self._next_fetch, self._sources[self._next_fetch]
            if self._passes(index):
                self._next_fetch += 1
                continue
            num_bytes, fetch = source.num_bytes or FETCHED_BYTES // 4, source.fetch  # some stores do not report sizes
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
        is_looking = not self._columns  # before the first mapper, the source fetches its own file
        return is_looking or is_here or self._sources[index].fetch is None

    def _passes(self, index: int) -> bool:
        """Return whether a source has no units for this part, and is not needed to detect the stored columns."""
        return bool(self._columns) and self._share is not None and not self._share.reads(index)

    def _all_units(self) -> Iterator[UnitTask | None]:
        number = 0
        said: set[str] = set()
        for index, source in enumerate(self._sources):
            if self._passes(index):
                continue
            mapper: Mapper | None = None
            functions = row_functions(self._options.changed(source.settings))
            while not self._is_there(index):
                yield None
            self._open[index], first_number = 1, number
            has_rows = False
            for unit in self._units_of(source):
                if mapper is None:
                    mapper, found_rows = self._find(source, unit, functions)
                    has_rows = has_rows or found_rows
                    if mapper is not None and mapper.description not in said:
                        said.add(mapper.description)
                        which = f" ({index + 1} of {len(self._sources)} sources read)" if len(self._sources) > 1 else ""
                        self._say(f"{source.name}{which}: {mapper.description}")
                self._open[index] += 1
                if isinstance(unit, ShardSamples) and mapper is not None and is_stored(mapper):
                    unit = unit.moved()
                yield UnitTask(
                    number=number,
                    unit=unit,
                    mapper=mapper,
                    source=index,
                    index=number - first_number,
                    source_name=source.name,
                    functions=functions,
                )
                number += 1
                if self._passes(index):
                    break
            else:
                self.num_units[index] = number - first_number
            if not has_rows:
                self._pass_empty(index, source)
            self._let_go(index)
        if self.empty:
            are = "file holds no rows and is" if len(self.empty) == 1 else "files hold no rows and are"
            self._say(f"{len(self.empty)} {are} passed over: {self._shown_empty}")

    @property
    def _shown_empty(self) -> str:
        others = len(self.empty) - SHOWN_EMPTY
        names = ", ".join(self._sources[index].name for index in self.empty[:SHOWN_EMPTY])
        return f"{names} and {others} others" if others > 0 else names

    def _units_of(self, source: Source) -> Iterator[Unit]:
        """Yield the units of a source; no unit for a file without rows in a folder or glob."""
        try:
            yield from source.units()
        except NoRowsError:
            if not source.is_part:
                raise

    def _pass_empty(self, index: int, source: Source) -> None:
        """Record a file without rows; DataError unless the file comes from a folder or glob."""
        if not source.is_part:
            raise DataError(f"{source.name} holds no rows: leave it out, or write it again")
        self.empty.append(index)

    def _find(self, source: Source, unit: Unit, functions: RowFunctions | None) -> tuple[Mapper | None, bool]:
        """Return the mapper of a source's rows, from the first rows of a unit, and whether the unit has rows.

        None for the mapper if the unit has no rows, or if the user's functions keep no row.
        """
        options = self._options.changed(source.settings)
        if isinstance(unit, ShardSamples) and options == SchemaOptions():
            schema = unit.schema or schema_of([unit.info]) or columns_schema({}).name
            return self._agreed(source, stored_mapper(schema, unit.columns)), True
        if isinstance(unit, ShardSamples) and (functions is None or functions.map is None):
            options = stored_options(options, unit.schema)
        values, errors, num_read = _first_rows(unit, functions)
        if errors and len(errors) == num_read:
            first = f"; the first: {errors[0]}" if errors else ""
            remedy = ": check its format" if functions is None else ""
            raise DataError(f"{source.name}: none of its first {num_read} rows can be read{first}{remedy}")
        if not values:
            return None, num_read > 0
        try:
            mapper = find_mapper(values, options)
        except DataError as error:
            raise DataError(f"{source.name}: {error}") from error
        self._look_rows = self._look_rows or values
        return self._agreed(source, mapper), True

    def _agreed(self, source: Source, mapper: Mapper) -> Mapper:
        """Return the mapper, if it gives samples of the earlier sources' schema and columns; else DataError."""
        self._columns, self._schema = self._columns or dict(mapper.columns), self._schema or mapper.schema
        if mapper.schema != self._schema and dict(mapper.columns) == self._columns:  # chats and preferences
            raise DataError(
                f"{source.name} gives samples of {mapper.schema} and {self._sources[0].name} of {self._schema}: "
                "convert them to targets of their own"
            )
        if dict(mapper.columns) != self._columns:
            ours, others = _shown(mapper.columns, self._columns), _shown(self._columns, mapper.columns)
            raise DataError(
                f"{source.name} gives samples with {ours} and {self._sources[0].name} with {others}: convert them to "
                "separate targets, or choose the kind with --kind"
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

    def rows_before(self, task: UnitTask) -> int:
        """Return the number of rows of the source before a unit, including the rows before its slice.

        Call before `rejects` of the unit.
        """
        return self._rows_before[task.source]

    def rows_taken(self, index: int) -> tuple[int, int]:
        """First row of a source, and one past the last row in placed units."""
        return self._first_rows[index], self._rows_before[index]

    def rejects(self, task: UnitTask, encoded: EncodedUnit) -> list[tuple[str, int, str]]:
        """Return source, row from 1, and reason of each row that did not fit; call for the units in order."""
        before = self._rows_before[task.source]
        self._rows_before[task.source] += encoded.num_rows
        return [(task.source_name, before + number + 1, reason) for number, reason in encoded.rejects]


def _shown(columns: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Column names, with encodings if both sides have the same names."""
    same_names = columns.keys() == others.keys()
    return ", ".join(f"{name} ({encoding})" if same_names else name for name, encoding in columns.items())


def _first_rows(unit: Unit, functions: RowFunctions | None) -> tuple[list[dict[str, Any]], list[str], int]:
    """Return the first LOOK_ROWS rows that the functions keep, errors of other rows, and the number of rows read."""
    values: list[dict[str, Any]] = []
    errors: list[str] = []
    num_read = 0
    for row in unit.rows():
        num_read += 1
        if row.values is None:
            errors.append(row.error)
        elif functions is None:
            values.append(row.values)
        else:
            try:
                values += functions.rows(row.values) if functions.keeps(row.values) else []
            except DataError as error:
                errors.append(str(error))
        if len(values) + len(errors) >= LOOK_ROWS:
            break
    return values, errors, num_read


# Units of the sources for each part of a conversion. sizes of sources -> [share] -> a part's units. Pure.
#
# The division follows from the sources only: machines compute the same division without communication.

_FULLEST = 1.1  # limit of the largest part's bytes over the mean, to deal complete sources instead of units


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count`, counted from 0."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"part {self}: the number of parts must be at least 1, as in 0/1")
        if not 0 <= self.number < self.count:
            raise ConfigError(
                f"part {self}: parts are counted from 0, so {self.count} of them are 0/{self.count} to "
                f"{self.count - 1}/{self.count} (sbatch --array=0-{self.count - 1})"
            )

    @staticmethod
    def parse(text: str) -> Part:
        """Parse "3/16"; ConfigError for anything else."""
        found = re.fullmatch(r"\s*(-?\d+)\s*/\s*(-?\d+)\s*", text)
        if found is None:
            raise ConfigError(f"part {text!r}: expected I/N such as 3/16, the fourth of 16 parts")
        return Part(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True, slots=True)
class Share:
    """Units of a part. owners: for each source the part that encodes all of it; None if its units are dealt."""

    part: Part
    owners: tuple[int | None, ...]

    @staticmethod
    def of(part: Part, sizes: Sequence[int], *, is_fetched: Sequence[bool]) -> Share:
        """Deal sources to parts. sizes: bytes of each source, 0 if unknown. is_fetched: a complete copy is read.

        Complete sources are dealt if the division is even enough: then each part opens only its own sources. Otherwise
        units are dealt in turn; a fetched source still belongs to one part.

        >>> Share.of(Part(0, 2), [5, 4, 1], is_fetched=[False] * 3).owners
        (0, 1, 1)
        >>> Share.of(Part(0, 2), [9, 1, 1], is_fetched=[False, True, True]).owners
        (None, 0, 1)
        """
        owners, loads = _dealt(part.count, sizes, range(len(sizes)))
        if all(sizes) and max(loads) * part.count <= _FULLEST * sum(sizes):
            return Share(part, tuple(owners[source] for source in range(len(sizes))))
        fetched = [source for source, each in enumerate(is_fetched) if each]
        owners, _ = _dealt(part.count, sizes, fetched)
        return Share(part, tuple(owners.get(source) for source in range(len(sizes))))

    def reads(self, source: int) -> bool:
        """Whether any unit of the source may be this part's."""
        return self.owners[source] in (None, self.part.number)

    def has(self, source: int, index: int) -> bool:
        """Whether unit `index` of the source is this part's."""
        owner = self.owners[source]
        return (
            owner == self.part.number if owner is not None else (source + index) % self.part.count == self.part.number
        )


def _dealt(count: int, sizes: Sequence[int], sources: Sequence[int]) -> tuple[dict[int, int], list[int]]:
    """Deal sources, largest first, to the part with the fewest bytes; return each source's part, and bytes per part."""
    owners: dict[int, int] = {}
    loads = [0] * count
    for source in sorted(sources, key=lambda source: (-sizes[source], source)):
        owners[source] = min(range(count), key=lambda part: (loads[part], part))
        loads[owners[source]] += max(1, sizes[source])
    return owners, loads
