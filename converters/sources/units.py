"""Pieces of a source: units of rows, each read by one process. sources -> [units] -> rows.

A source is cut into the same units in every run, for any number of processes. A unit is sent to another process: it
holds the place of its rows (a byte range, a row group, names of files), or the rows if only reading all earlier bytes
finds them (for example in a compressed file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from ...errors import DataError
from .files import Fetch

UNIT_BYTES = 1 << 24  # of a source, about: what a process reads, maps and keeps at once, and does again after a kill
UNIT_ROWS = 1 << 12  # approximate maximum: rows with media are short, and reading their media is slow
CUT_VERSION = 2  # version of the cuts: units encoded by an earlier run are used only if the versions agree


class Row(NamedTuple):
    """A row. number: in its unit, from 0; blank lines of text count, and give no row.

    values: column name -> value; None for an unreadable row, with the reason in `error`. stored: bytes in a shard of a
    sample that is stored again unchanged.
    """

    number: int
    values: dict[str, Any] | None
    error: str = ""
    stored: bytes | None = None


class NoRowsError(DataError):
    """A source holds no rows. A file of a folder or glob is then passed over."""


class Unit(Protocol):
    """Rows that one process reads, in order. Can be pickled, in at most 32 MiB if it carries its rows.

    num_bytes: of the source, for progress. folder: start of media paths, which must stay inside; or None.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def folder(self) -> str | None: ...

    def rows(self) -> Iterator[Row]:
        """All rows; DataError if the content is not of the format at all, OSError if reading fails."""
        ...

    def count(self) -> int:
        """Number of rows and blank lines: one more than the highest row number. Known after rows() has ended."""
        ...


class Source(Protocol):
    """A source named by the user: a file, a folder, a dataset of the hub.

    name: for messages; `name:n` is row n, counted from 1 (the rows of text files are lines). identity: JSON values that
    change with the content (size and modification time; an object's entity tag). num_bytes: of all units. rows: named
    slice. first_row: number of rows before the slice. settings: fields of SchemaOptions from a list, in place of the
    conversion's. fetch: copies the source to this machine, in any process before `units`, else in `units`; None for a
    local source and for units that read remotely. is_part: whether the source is a file of a folder or glob, which may
    hold no rows.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def rows(self) -> slice: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def first_row(self) -> int: ...

    @property
    def fetch(self) -> Fetch | None: ...

    @property
    def is_part(self) -> bool: ...

    def units(self) -> Iterator[Unit]:
        """Yield the units in order; files of a yielded unit stay until `close`.

        Raise NoRowsError for a source without units.
        """
        ...

    def close(self) -> None:
        """Release the source's fetched files: no unit is read afterwards."""
        ...
