"""A source whose rows are a table, which is fetched and opened when its turn comes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from ...storage.disk_errors import disk_errors
from .files import Fetch
from .table import Table
from .units import NoRowsError, Row, Unit


class TableSource:
    """A source whose table is opened at its turn.

    pieces: of a source of several files its files in order, each as a place and a number of rows; None for one file.
    """

    def __init__(
        self,
        name: str,
        open_table: Callable[[], Table],
        *,
        identity: Mapping[str, Any],
        num_bytes: int,
        rows: slice,
        settings: Mapping[str, Any],
        scratch: Path,
        fetch: Fetch | None = None,
        is_part: bool = False,
        pieces: Callable[[], Iterator[tuple[str, int]]] | None = None,
    ):
        self.name = name
        self.identity = identity
        self.num_bytes = num_bytes
        self._fetch = fetch
        self._open_table = open_table
        self.rows = rows
        self.settings = settings
        self.is_part = is_part
        self.pieces = pieces
        self._scratch = scratch
        self._table: Table | None = None

    @property
    def fetch(self) -> Fetch | None:
        return None if self._table is not None else self._fetch

    @property
    def first_row(self) -> int:
        """Counts the rows if the slice counts from their end."""
        return self._bounds()[0]

    def units(self) -> Iterator[Unit]:
        start, stop = self._bounds()
        found = False
        with disk_errors(self.name):
            for unit in self._opened().units(start, stop):
                found = True
                yield unit
        if not found:
            what = "" if self.rows == slice(None) else f" from {start} to {'its end' if stop is None else stop}"
            raise NoRowsError(
                f"{self.name} holds no rows{what}: leave it out, or {'correct the slice' if what else 'write it again'}"
            )

    def take_first(self, limit: int) -> None:
        """Leave out rows behind the first `limit`."""
        start, stop = self._bounds()
        self.rows = slice(start, start + limit if stop is None else min(stop, start + limit))

    def count(self) -> int:
        """How many rows there are, for which it is fetched and read where nothing shorter tells."""
        start, stop = self._bounds()
        try:
            with disk_errors(self.name):
                num_rows = self._opened().num_rows()
        except NoRowsError:
            if not self.is_part:
                raise
            num_rows = 0
        self.close()
        return max(0, (num_rows if stop is None else min(stop, num_rows)) - start)

    def num_rows(self) -> int:
        """How many rows there are, those outside of its slice among them."""
        with disk_errors(self.name):
            return self._opened().num_rows()

    def first_rows(self, num_rows: int) -> tuple[str | None, list[Row]]:
        """The folder that paths of media start from, and the first rows; [] where there are none."""
        with closing(self.all_rows()) as rows:
            found = list(islice(rows, num_rows))
        return (found[0][0] if found else None), [row for _, row in found]

    @property
    def has_rows(self) -> bool:
        return bool(self.first_rows(1)[1])

    def all_rows(self) -> Generator[tuple[str | None, Row]]:
        """Each row with the folder that its paths of media start from; the source is closed when they end."""
        try:
            for unit in self.units():
                yield from ((unit.folder, row) for row in unit.rows())
        except NoRowsError:
            return
        finally:
            self.close()

    def close(self) -> None:
        self._table = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _opened(self) -> Table:
        if self._table is None:
            with disk_errors(self.name):
                if self._fetch is not None and not self._fetch.path.exists():
                    self._fetch()
                self._table = self._open_table()
        return self._table

    def _bounds(self) -> tuple[int, int | None]:
        start, stop = self.rows.start or 0, self.rows.stop
        if start < 0 or (stop is not None and stop < 0):
            with disk_errors(self.name):
                start, stop, _ = self.rows.indices(self._opened().num_rows())
        return start, stop


_counted: dict[str, int] = {}  # rows of sources that this process has counted, by what tells their content apart


def limited(sources: Sequence[TableSource], limit: int) -> list[TableSource]:
    """The first `limit` rows of sources one behind another, without sources that have none of them.

    Rows of a source are counted only where others follow it, and once: a conversion looks at its sources several times,
    and those of a store are fetched to be counted.
    """
    taken: list[TableSource] = []
    for source, is_last in zip(sources, [False] * (len(sources) - 1) + [True], strict=True):
        num_rows = 0 if is_last else _count_once(source)
        source.take_first(limit)
        taken.append(source)
        limit -= num_rows
        if limit <= 0:
            break
    return taken


def _count_once(source: TableSource) -> int:
    """How many rows a source has; one whose content changed is counted anew."""
    about = json.dumps([source.name, source.rows.start, source.rows.stop, dict(source.identity)], sort_keys=True)
    if about not in _counted:
        _counted[about] = source.count()
    return _counted[about]
