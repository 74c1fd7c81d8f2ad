"""Folders of data: files that are rows (texts, and images by class), and columns in the names of folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from ...errors import if_lfs_pointer
from ...storage.local import LocalStorage
from ...storage.storage import Storage, shared_storage
from ...types import StoredObject
from .files import StoredFile
from .listing import split_of
from .table import BOM, MAX_ROW_BYTES, Location, RowsByIndex, Table, by_index, in_units, wide_text
from .units import Row, Unit

# Arguments: files, their bytes, the folder of media.
MakeUnit = Callable[[Sequence[StoredObject], int, str | None], Unit]


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Names of files below a folder."""

    root: Path
    names: tuple[str, ...]
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        for number, name in enumerate(self.names):
            path = self.root / name
            if path.exists() and not path.is_file():
                yield Row(number, None, f"{name} is not a file: remove it")
                continue
            with path.open("rb") as file:
                data = file.read(MAX_ROW_BYTES + 1)
            yield _text_row(number, name, data)

    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class TextObjects:
    """Objects of a store, each a text."""

    url: str
    objects: tuple[StoredObject, ...]
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        store = shared_storage(self.url)
        for number, described in enumerate(self.objects):
            name = described.key
            if described.num_bytes > MAX_ROW_BYTES:
                yield _too_long(number, name)
            elif described.tag and described.num_bytes:
                yield _text_row(number, name, StoredFile(store, described).read(0, described.num_bytes))
            else:
                yield _text_row(number, name, store.read(name))

    def count(self) -> int:
        return len(self.objects)


def _too_long(number: int, name: str) -> Row:
    return Row(number, None, f"{name} is longer than {MAX_ROW_BYTES >> 20} MiB: break it into several files")


def _text_row(number: int, name: str, data: bytes) -> Row:
    if len(data) > MAX_ROW_BYTES:
        return _too_long(number, name)
    if problem := if_lfs_pointer(data):
        return Row(number, None, f"{name} {problem}")
    if problem := wide_text(data):
        return Row(number, None, f"{name} is {problem}")
    try:
        return Row(number, {"text": data.removeprefix(BOM).decode(), "name": name})
    except UnicodeDecodeError as error:
        return Row(
            number,
            None,
            f"{name} is not valid UTF-8 (byte {data[error.start]:#04x} at byte {error.start + 1}): write it as UTF-8",
        )


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Names of image files below a folder; the files are not read."""

    names: tuple[str, ...]
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        for number, name in enumerate(self.names):
            classes = [folder for folder in name.split("/")[:-1] if split_of(folder) is None]
            if classes:
                yield Row(number, {"image": name, "label": classes[0]})
            else:
                yield Row(number, None, f"{name} lies in no sub-folder, which names its class: move it into one")

    def count(self) -> int:
        return len(self.names)


class FolderTable:
    """Each file a row, sorted by name. make_unit: text_unit or image_unit."""

    def __init__(self, files: Sequence[StoredObject], *, make_unit: MakeUnit, location: Location):
        self._files = files
        self._make_unit = make_unit
        self._location = location

    def num_rows(self) -> int:
        return len(self._files)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        found, unit_bytes = islice(self._files, start, stop), self._location.unit_bytes
        for files in in_units(found, _num_bytes, unit_bytes=unit_bytes):
            yield self._make_unit(files, sum(map(_num_bytes, files)), self._location.folder)


def text_unit(
    files: Sequence[StoredObject], num_bytes: int, folder: str | None, *, store: Storage
) -> TextFiles | TextObjects:
    """Return rows {"text": content of a file, "name": its name below the folder}."""
    if isinstance(store, LocalStorage):
        return TextFiles(store.folder, _names(files), num_bytes, folder)
    return TextObjects(store.url, tuple(files), num_bytes, folder)


def image_unit(files: Sequence[StoredObject], num_bytes: int, folder: str | None) -> ImageFiles:
    """Return rows {"image": name below the folder, "label": its first sub-folder that is not a split}."""
    return ImageFiles(_names(files), num_bytes, folder)


def _names(files: Sequence[StoredObject]) -> tuple[str, ...]:
    return tuple(file.key for file in files)


def _num_bytes(file: StoredObject) -> int:
    return file.num_bytes


# Folders named COLUMN=VALUE (lang=en/part-0.parquet) -> columns of the rows below them, by the rule of pyarrow's hive
# partitioning: https://arrow.apache.org/docs/python/generated/pyarrow.dataset.HivePartitioning


_NULL = "__HIVE_DEFAULT_PARTITION__"
Columns = Mapping[str, str | None]


def columns_of(key: str) -> dict[str, str | None]:
    """Return the columns that the folders of a file name.

    >>> columns_of("lang=en/date=2024%2F01/part-0.parquet")
    {'lang': 'en', 'date': '2024/01'}
    """
    pairs = (folder.partition("=") for folder in key.split("/")[:-1])
    return {unquote(name): None if value == _NULL else unquote(value) for name, is_pair, value in pairs if is_pair}


@dataclass(frozen=True, slots=True)
class _Rows:
    rows_by_index: RowsByIndex
    columns: Columns

    def __len__(self) -> int:
        return len(self.rows_by_index)

    def rows(self, indices: Sequence[int]) -> Iterator[Row]:
        return _filled(self.rows_by_index.rows(indices), self.columns)


@dataclass(frozen=True, slots=True)
class _Unit:
    unit: Unit
    columns: Columns

    @property
    def num_bytes(self) -> int:
        return self.unit.num_bytes

    @property
    def folder(self) -> str | None:
        return self.unit.folder

    def rows(self) -> Iterator[Row]:
        return _filled(self.unit.rows(), self.columns)

    def by_index(self) -> RowsByIndex:
        return _Rows(by_index(self.unit), self.columns)

    def count(self) -> int:
        return self.unit.count()


class TableWithColumns:
    """A table whose rows have more columns, with the same values in all rows; columns of the rows themselves stay."""

    def __init__(self, open_table: Callable[[], Table], columns: Columns):
        self._table = open_table()
        self._columns = columns

    def num_rows(self) -> int:
        return self._table.num_rows()

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        return (_Unit(unit, self._columns) for unit in self._table.units(start, stop))


def _filled(rows: Iterator[Row], columns: Columns) -> Iterator[Row]:
    for row in rows:
        if row.values is not None:
            row.values.update({name: value for name, value in columns.items() if name not in row.values})
        yield row
