"""What a source is cut into: units of rows, each read by one process. sources -> [units] -> rows.

Sources cut themselves the same way each time, whatever the number of processes, and a unit travels to another process:
it says where its rows lie (a range of a file, a row group, names of files), or carries them where only reading all
that lies before finds them (in a compressed file, say).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import DataError
from .files import Fetch

UNIT_BYTES = 1 << 24  # of a source, about: what a process reads, maps and keeps at once, and does again after a kill
UNIT_ROWS = 1 << 12  # at most, about: rows that name media are short, and what they name takes long to read
CUT_VERSION = 2  # of how sources are cut: units that an earlier run encoded are those of this one only if it agrees


@dataclass(frozen=True, slots=True)
class Row:
    """number: in its unit, from 0; lines of text count even where they are blank and give no row.

    values: column name -> value; None where the row cannot be read, and then error says why. stored: the row of a
    stored dataset that is stored again as it is: its bytes in a shard.
    """

    number: int
    values: dict[str, Any] | None
    error: str = ""
    stored: bytes | None = None


class NoRowsError(DataError):
    """A source holds no rows. It is passed over if it is one of the files of a folder or glob."""


class Unit(Protocol):
    """Rows that one process reads, in order. Can be pickled; 32 MiB at most when it carries its rows.

    num_bytes: of the source, for progress. folder: what paths of media in its rows start from and do not leave, or
    None.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def folder(self) -> str | None: ...

    def rows(self) -> Iterator[Row]:
        """All rows; DataError if the content is not of the format at all, OSError if reading fails."""
        ...

    def count(self) -> int:
        """Rows and blank lines: one more than the highest number that rows() may give. Known once rows() has ended."""
        ...


class Source(Protocol):
    """Something that the user named: a file, a folder, a dataset of the hub.

    name: as messages call it; row n of it is `name:n`, counted from 1 (lines of text files are their rows). identity:
    JSON values that change when its content does (size and modification time; an object's entity tag). num_bytes: of
    all its units. rows: the slice of it that was named; first_row: how many that passes over. settings: how a list says
    that its rows are to be read: fields of SchemaOptions, in place of the conversion's. fetch: what brings it to this
    machine, which any process may do before units are asked for, and else is done then; None if the source is local, or
    if its units read it remotely. is_part: whether it is one of the files of a folder or glob, which may hold no rows.
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
        """In order, one after another: what a unit needs is there when it is given, and stays until `close`.

        Raises NoRowsError where there is no unit.
        """
        ...

    def close(self) -> None:
        """No unit of it is read any more: what was fetched for them may go."""
        ...
