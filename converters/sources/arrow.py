"""Parquet and Arrow files -> units: row groups and record batches."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from pyarrow.lib import ArrowException

from ...errors import DataError, LmmsStreamError, if_lfs_pointer
from .arrow_values import Convert, converters
from .files import File, LocalFile, more_than_zeros
from .table import Location, NumberedRows, share_of
from .units import UNIT_ROWS, Row, Unit

STEP_BYTES = 1 << 23  # of columns, turned into rows at once
STEP_ROWS = 1024
LOCAL_BUFFER, STORE_BUFFER = 1 << 20, 1 << 22  # buffer per column of Parquet; for a store, bytes of a request
_FOOTER_BYTES = 1 << 23  # limit of the Parquet footers whose metadata a process keeps, in about four times the memory


@contextmanager
def arrow_errors(name: str, kind: str) -> Iterator[None]:
    """Raise pyarrow's errors in the data again as DataError; errors of the operating system pass unchanged."""
    try:
        yield
    except LmmsStreamError:
        raise
    except (ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        text = " ".join(str(error).split())
        raise DataError(f"{name}: not readable as {kind} ({text}): copy it again, or write it again") from error


class _Footers:
    """Metadata of the last opened Parquet files. Parsing a footer takes time in proportion to its row groups."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """Return the metadata of a file, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: Hashable, metadata: Any) -> None:
        """Keep the metadata of a file, and of earlier files until all footers exceed _FOOTER_BYTES."""
        with self._lock:
            self._kept[key] = metadata
            self._kept.move_to_end(key)
            num_bytes = sum(each.serialized_size for each in self._kept.values())
            while num_bytes > _FOOTER_BYTES and len(self._kept) > 1:
                num_bytes -= self._kept.popitem(last=False)[1].serialized_size


_FOOTERS = _Footers()  # of this process


@contextmanager
def open_parquet(file: File, **options: Any) -> Iterator[Any]:
    """Open a file with pyarrow's ParquetFile; a process parses its footer once. options: of ParquetFile."""
    key = file.key
    known = _FOOTERS.get(key)
    with file.open_raw() as stream, pyarrow.parquet.ParquetFile(stream, metadata=known, **options) as opened:
        if known is None:
            _FOOTERS.keep(key, opened.metadata)
        yield opened


def row_group_batches(file: File, groups: Sequence[int], *, columns: Sequence[str] | None = None) -> Generator[Any]:
    """Yield the record batches of consecutive row groups, some megabytes each. columns: names to read; None: all."""
    buffer_bytes = LOCAL_BUFFER if isinstance(file, LocalFile) else STORE_BUFFER
    # Without pre_buffer and with a buffer, columns are read piece by piece and not as whole row groups.
    with open_parquet(file, pre_buffer=False, buffer_size=buffer_bytes) as parquet:
        described = [parquet.metadata.row_group(group) for group in groups]
        row_bytes = max(group.total_byte_size // max(1, group.num_rows) for group in described)
        batch_rows = max(1, min(STEP_ROWS, STEP_BYTES // max(1, row_bytes)))
        yield from parquet.iter_batches(batch_rows, row_groups=list(groups), columns=columns, use_threads=False)


def rows_of(
    batches: Iterable[Any], *, skip: int, num_rows: int, wanted: NDArray[np.int64] | None = None
) -> Iterator[Row]:
    """Yield the rows of record batches, a few megabytes at a time; a value without a form in Python is an error.

    wanted: ascending numbers of the rows to convert; None: all.
    """
    number = 0
    columns: dict[str, Convert] | None = None
    for batch in batches:
        columns = converters(batch.schema) if columns is None else columns
        passed = min(skip, batch.num_rows)
        skip -= passed
        batch = batch.slice(passed, num_rows - number)
        step = max(1, min(STEP_ROWS, STEP_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for at in range(0, batch.num_rows, step):
            piece = batch.slice(at, step)
            yield from _wanted_rows(piece, number, columns, wanted)
            number += piece.num_rows
        if number == num_rows:
            return


def _wanted_rows(batch: Any, first: int, columns: Mapping[str, Convert], wanted: NDArray[np.int64] | None) -> list[Row]:
    if wanted is None:
        return python_rows(batch, first, columns)
    begin, end = np.searchsorted(wanted, [first, first + batch.num_rows])
    numbers = wanted[begin:end]
    if len(numbers) == batch.num_rows:
        return python_rows(batch, first, columns)
    rows = python_rows(batch.take(pyarrow.array(numbers - first)), 0, columns) if len(numbers) else []
    return [Row(number, row.values, row.error) for number, row in zip(numbers.tolist(), rows, strict=True)]


def python_rows(batch: Any, first: int, columns: Mapping[str, Convert]) -> list[Row]:
    """Return all rows of a batch, numbered from `first`."""
    rows = enumerate(python_values(batch, columns), first)
    return [Row(at, None, row) if isinstance(row, str) else Row(at, row) for at, row in rows]


def python_values(batch: Any, columns: Mapping[str, Convert]) -> list[dict[str, Any] | str]:
    """Return the values of each row of a batch; the reason, if a row has no form in Python."""
    try:
        rows: list[dict[str, Any] | str] = batch.to_pylist()
        for name, convert in columns.items():
            for row in rows:
                if (value := row[name]) is not None:  # type: ignore[index]
                    row[name] = convert(value)  # type: ignore[index]
    except (ValueError, OverflowError) as error:  # a date beyond Python's, invalid UTF-8, or invalid JSON
        if batch.num_rows == 1:
            return [f"a value has no form in Python ({error}): write the column as text or numbers"]
        return [row for at in range(batch.num_rows) for row in python_values(batch.slice(at, 1), columns)]
    return rows


def check_columns(names: list[str], name: str) -> None:
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise DataError(f"{name}: column {twice[0]!r} occurs more than once: rename one of them")


def piece_rows(
    piece: Piece, key: Hashable, open_groups: OpenGroup, wanted: NDArray[np.int64] | None = None
) -> Iterator[Row]:
    """Yield the piece's rows, or only `wanted`. key: of the file. open_groups: opens the groups' record batches."""
    if piece.is_slice:
        stop = piece.skip + piece.num_rows
        batches = GROUPS.slice((key, piece.first), open_groups, start=piece.skip, stop=stop)
        yield from rows_of(batches, skip=0, num_rows=piece.num_rows, wanted=wanted)
        return
    with closing(open_groups()) as batches:
        yield from rows_of(batches, skip=piece.skip, num_rows=piece.num_rows, wanted=wanted)


@dataclass(frozen=True, slots=True)
class RowGroups:
    file: File
    name: str
    piece: Piece
    folder: str | None

    @property
    def num_bytes(self) -> int:
        return self.piece.num_bytes

    def rows(self) -> Iterator[Row]:
        yield from self._rows()

    def by_index(self) -> NumberedRows:
        return NumberedRows(self.piece.num_rows, self._rows, name=self.name)

    def _rows(self, wanted: NDArray[np.int64] | None = None) -> Iterator[Row]:
        with arrow_errors(self.name, "Parquet"):
            yield from piece_rows(self.piece, self.file.key, self._batches, wanted)

    def _batches(self) -> Generator[Any, None, None]:
        return row_group_batches(self.file, range(self.piece.first, self.piece.stop))

    def count(self) -> int:
        return self.piece.num_rows


class ParquetTable:
    def __init__(self, location: Location):
        self._location = location
        with arrow_errors(location.name, "Parquet"), open_parquet(location.file) as file:
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            self._rows = [group.num_rows for group in groups]
            self._sizes = [group.total_byte_size for group in groups]
            check_columns(file.schema_arrow.names, location.name)

    def num_rows(self) -> int:
        return sum(self._rows)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        location = self._location
        for piece in cut(self._rows, self._sizes, start=start, stop=stop, location=location):
            yield RowGroups(location.file, location.name, piece, location.folder)


@dataclass(frozen=True, slots=True)
class RecordBatches:
    """Record batches of a file. offset: of the first batch in a stream of batches; None for a file with an index."""

    path: Path
    name: str
    piece: Piece
    offset: int | None
    folder: str | None

    @property
    def num_bytes(self) -> int:
        return self.piece.num_bytes

    def rows(self) -> Iterator[Row]:
        yield from self._rows()

    def by_index(self) -> NumberedRows:
        return NumberedRows(self.piece.num_rows, self._rows, name=self.name)

    def _rows(self, wanted: NDArray[np.int64] | None = None) -> Iterator[Row]:
        with arrow_errors(self.name, "Arrow"):
            yield from piece_rows(self.piece, LocalFile(self.path).key, self._batches, wanted)

    def _batches(self) -> Generator[Any, None, None]:
        with pyarrow.memory_map(str(self.path)) as file:
            yield from self._read_batches(file)

    def _read_batches(self, file: Any) -> Iterator[Any]:
        numbers = range(self.piece.first, self.piece.stop)
        if self.offset is None:
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(number) for number in numbers)
            return
        reader = pyarrow.ipc.open_stream(file)
        if self.offset:
            file.seek(self.offset)
            yield from (_read_batch(file, reader.schema) for _ in numbers)
            return
        for number, batch in enumerate(reader):
            if number in numbers:
                yield batch
            elif number == numbers.stop:
                return

    def count(self) -> int:
        return self.piece.num_rows


def _read_batch(file: Any, schema: Any) -> Any:
    return pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(file), schema)


class ArrowTable:
    """An Arrow IPC file (such as Feather), or a stream of batches (the files of `datasets`)."""

    def __init__(self, location: Location):
        self._location = location
        self._rows: list[int] = []
        self._sizes: list[int] = []
        self._offsets: list[int] | None = None
        with arrow_errors(location.name, "Arrow"), pyarrow.memory_map(str(location.path)) as file:
            head = file.read(64)
            file.seek(0)
            if problem := if_lfs_pointer(head):
                raise DataError(f"{location.name} {problem}")
            if head.startswith(b"ARROW1"):
                self._survey_file(file)
            else:
                self._survey_stream(file)

    def _survey_file(self, file: Any) -> None:
        reader = pyarrow.ipc.open_file(file)
        check_columns(reader.schema.names, self._location.name)
        for number in range(reader.num_record_batches):
            self._add(reader.get_batch(number))

    def _survey_stream(self, file: Any) -> None:
        self._offsets = []
        reader = pyarrow.ipc.open_stream(file)
        check_columns(reader.schema.names, self._location.name)
        if any(pyarrow.types.is_dictionary(kind) for kind in _nested_types(reader.schema)):
            for batch in reader:  # read from the start: a batch needs earlier dictionaries
                self._offsets.append(0)
                self._add(batch)
            self._check_end(file)
            return
        end = file.size()
        while (offset := file.tell()) < end:
            try:
                batch = _read_batch(file, reader.schema)
            except EOFError:
                self._check_end(file)
                return
            self._offsets.append(offset)
            self._add(batch)

    def _check_end(self, file: Any) -> None:
        """Raise DataError if bytes other than zeros follow the end of a stream."""
        if more_than_zeros(file):
            raise DataError(
                f"{self._location.name}: more data follows the end of its stream, for example another stream, and "
                "would not be read: write each stream to a separate file"
            )

    def _add(self, batch: Any) -> None:
        self._rows.append(batch.num_rows)
        self._sizes.append(batch.nbytes)

    def num_rows(self) -> int:
        return sum(self._rows)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        location, offsets = self._location, self._offsets
        for piece in cut(self._rows, self._sizes, start=start, stop=stop, location=location):
            offset = None if offsets is None else offsets[piece.first]
            yield RecordBatches(location.path, location.name, piece, offset, location.folder)


def _nested_types(schema: Any) -> Iterator[Any]:
    """Yield the types of all columns and of their nested fields."""
    waiting = list(schema.types)
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += [kind.field(number).type for number in range(kind.num_fields)]


# Row groups and record batches of a file -> pieces of them, each a unit. Arithmetic only.


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive groups (row groups, record batches) of a file, and the rows to read from them."""

    first: int  # group
    stop: int  # group, not included
    skip: int  # rows
    num_rows: int
    num_bytes: int  # of the file
    is_slice: bool  # of one group, shared with other pieces


def cut(rows: list[int], sizes: list[int], *, start: int, stop: int | None, location: Location) -> Iterator[Piece]:
    """Yield pieces of about `unit_bytes` and at most UNIT_ROWS, with rows start <= number < stop of the groups.

    rows, sizes: rows and bytes of each group. A group above these limits is cut into slices of rows.
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


# Slices of a large row group or record batch, each a unit: a process reads the rows between its slices only once.
#
# In Parquet and compressed Arrow, reading a row of a group needs all earlier rows of the group. A process gets the
# slices of a group in order: it keeps the group open after a slice, and continues there for the next slice.

OpenGroup = Callable[[], Generator[Any, None, None]]  # all record batches of a group


class _OpenGroup:
    """A group, read from its start. at: number of rows taken."""

    def __init__(self, key: Hashable, batches: Generator[Any, None, None]):
        self.key = key
        self.at = 0
        self._batches = batches
        self._batch: Any = None

    def take(self, num_rows: int) -> Any:
        """Return the next rows in a record batch of at most num_rows; None at the end."""
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
    """Keeps the group of the last slice open, if the slice was read to its end."""

    def __init__(self) -> None:
        self._open: _OpenGroup | None = None

    def slice(self, key: Hashable, open_group: OpenGroup, *, start: int, stop: int) -> Iterator[Any]:
        """Yield record batches of rows start <= number < stop of a group. key: identifies a group among all files."""
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
