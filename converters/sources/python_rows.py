"""Sources of a program: iterables of rows, and datasets of the library `datasets`.

A dataset is recognized by its fingerprint. An iterable is read once, in its order. Another run cannot recognize its
rows: a killed conversion of an iterable is not resumed.
"""

from __future__ import annotations

import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError
from .arrow import check_columns
from .hub import HubTable
from .specs import Spec
from .table import MAX_CARRIED_BYTES, Location, TableSource, in_units
from .units import Row, Source, Unit

GivenSources = str | Path | Iterable[Any]
_DATASETS = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")  # classes of the library
_ONCE = "given once"  # key in the identity of a source that a later run cannot recognize


def given_sources(sources: GivenSources, *, scratch: Path, unit_bytes: int) -> list[str | Spec | Source]:
    """Return the sources given to `convert` in the form for open_sources: names in texts, others in sources.

    sources: a name, a dataset, an iterable of rows (dicts), or an iterable of these. scratch, unit_bytes: see
    open_sources. DataError for anything else.
    """
    if isinstance(sources, str | Path) or _is_dataset(sources):
        each: Sequence[Any] = [sources]
    elif isinstance(sources, Mapping) or not isinstance(sources, Iterable):
        raise _no_source(sources)
    else:
        items = iter(sources)
        first = list(islice(items, 1))
        whole = sources if isinstance(sources, Sequence) else chain(first, items)
        is_rows = bool(first) and isinstance(first[0], Mapping) and not _is_dataset(first[0])
        each = [RowsSource(whole, name=type(sources).__name__, unit_bytes=unit_bytes)] if is_rows else list(whole)
    if not each:
        raise DataError("no source is given: name a file, or give rows")
    return [
        _given(one, number, scratch=scratch, unit_bytes=unit_bytes, suffix=f" {number}" if len(each) > 1 else "")
        for number, one in enumerate(each, start=1)
    ]


def cannot_go_on(sources: Iterable[Source]) -> list[str]:
    """Names of the sources that a later run cannot recognize."""
    return [source.name for source in sources if _ONCE in source.identity]


def _given(given: Any, number: int, *, scratch: Path, unit_bytes: int, suffix: str) -> str | Spec | Source:
    if isinstance(given, str | Path):
        return str(given)
    if isinstance(given, Spec | RowsSource):
        return given
    name = type(given).__name__ + suffix
    if _is_dataset(given):
        return _of_dataset(given, name=name, scratch=scratch / f"dataset-{number:06d}", unit_bytes=unit_bytes)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise _no_source(given)
    return RowsSource(given, name=name, unit_bytes=unit_bytes)


def _no_source(given: Any) -> DataError:
    return DataError(
        f"{type(given).__name__} is no source: give the name of a file, an iterable of rows (dicts), a "
        "datasets.Dataset, or a list of such"
    )


def _is_dataset(value: Any) -> bool:
    """Return whether the value is a dataset of the library `datasets`, without importing the library."""
    if "datasets" not in sys.modules:
        return False
    kinds = [getattr(sys.modules.get("datasets"), name, None) for name in _DATASETS]
    return isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type)))


# Iterables


class RowsSource:
    """Rows of an iterable; units carry them. DataError for other values, and for errors of the iterable."""

    def __init__(self, rows: Iterable[Any], *, name: str, unit_bytes: int):
        self.name = name
        self.identity: Mapping[str, Any] = {_ONCE: uuid.uuid4().hex}
        self.num_bytes = 0
        self.rows = slice(None)
        self.first_row = 0
        self.fetch = None
        self.is_part = False
        self.settings: Mapping[str, Any] = {}
        self._rows = rows
        self._unit_bytes = min(unit_bytes, MAX_CARRIED_BYTES)

    def units(self) -> Iterator[Unit]:
        for rows in in_units(self._pickled(), len, unit_bytes=self._unit_bytes):
            yield PickledRows(tuple(rows))

    def _pickled(self) -> Iterator[bytes]:
        rows, number = iter(self._rows), 0
        while True:
            number += 1
            try:
                yield pickle.dumps(next(rows))
            except StopIteration:
                return
            except Exception as error:
                raise DataError(
                    f"{self.name}:{number}: the row cannot be read ({error!r}): correct the source"
                ) from error

    def close(self) -> None:
        self._rows = ()


@dataclass(frozen=True, slots=True)
class PickledRows:
    """Rows pickled by this process for its workers: the caller may change its rows afterwards."""

    pickled: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return 0  # the total is unknown

    @property
    def folder(self) -> str | None:
        return str(Path.cwd())

    def rows(self) -> Iterator[Row]:
        for number, data in enumerate(self.pickled):
            row = pickle.loads(data)
            if isinstance(row, Mapping):
                yield Row(number, dict(row))
            else:
                yield Row(number, None, f"expected a row (a dict), found {type(row).__name__}: correct what gives it")

    def count(self) -> int:
        return len(self.pickled)


# Formats of files with a reading function


class RowsTable:
    """A file whose rows a function yields, in one process: for formats of other packages.

    read: path -> rows (dicts) in a fixed order, equal in each call. Format(table=partial(RowsTable, read=read)) defines
    the format.
    """

    def __init__(self, location: Location, *, read: Callable[[Path], Iterable[Mapping[str, Any]]]) -> None:
        self._location = location
        self._read = read

    def num_rows(self) -> int:
        return sum(1 for _ in self._read(self._location.path))

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        rows = islice(self._read(self._location.path), start, stop)
        return RowsSource(rows, name=self._location.name, unit_bytes=self._location.unit_bytes).units()


# Datasets


def _of_dataset(dataset: Any, *, name: str, scratch: Path, unit_bytes: int) -> Source:
    if isinstance(dataset, Mapping):
        raise DataError(
            f"{name} holds {', '.join(dataset)}: pass one of them, for example dataset[{next(iter(dataset), '')!r}]"
        )
    fingerprint, num_bytes, chosen = None, 0, None
    if hasattr(dataset, "_fingerprint"):
        if dataset.format["type"] == "custom":
            raise ConfigError(
                f"{name} has a transform (with_transform), whose rows may differ at each read: apply it with the "
                "dataset's map method, or pass the function as map="
            )
        fingerprint, chosen = dataset._fingerprint, dataset.format["columns"]
        num_bytes = dataset.data.nbytes * len(dataset) // max(1, len(dataset.data))
    if dataset.column_names:
        check_columns(dataset.column_names, name)
    as_arrow = dataset.with_format("arrow") if fingerprint is None else dataset.with_format("arrow", columns=chosen)
    location = Location(
        path=Path(), name=name, folder=str(Path.cwd()), key=None, scratch=scratch, unit_bytes=unit_bytes
    )
    return TableSource(
        name,
        partial(HubTable, as_arrow, streamed_rows=slice(None) if fingerprint is None else None, location=location),
        identity={"fingerprint": fingerprint} if fingerprint else {_ONCE: uuid.uuid4().hex},
        num_bytes=num_bytes,
        rows=slice(None),
        settings={},
        scratch=scratch,
    )
