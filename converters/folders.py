"""Folders whose files are the rows -> units: texts, and images by class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..types import StoredObject
from .places import BOM, MAX_ROW_BYTES, Place
from .units import Row, Unit

MAX_FILES = 1 << 12  # of a unit

Fetch = Callable[[Sequence[StoredObject]], Path]  # makes files local, and says below which folder


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


def _text_row(number: int, name: str, data: bytes) -> Row:
    if len(data) > MAX_ROW_BYTES:
        return Row(number, None, f"{name} is longer than {MAX_ROW_BYTES >> 20} MiB: break it into several files")
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
    """Names of files below a folder, which are not read."""

    names: tuple[str, ...]
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        for number, name in enumerate(self.names):
            label, separator, _ = name.partition("/")
            if separator:
                yield Row(number, {"image": name, "label": label})
            else:
                yield Row(number, None, f"{name} lies in no sub-folder, which names its class: move it into one")

    def count(self) -> int:
        return len(self.names)


class TextFolderTable:
    """Each file a row {"text": all of it, "name": its name below the folder}, sorted by name."""

    def __init__(self, files: Sequence[StoredObject], *, fetch: Fetch, place: Place):
        self._files = files
        self._fetch = fetch
        self._place = place

    def num_rows(self) -> int:
        return len(self._files)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        for files in _groups(islice(self._files, start, stop), self._place.unit_bytes):
            names = tuple(file.key for file in files)
            yield TextFiles(self._fetch(files), names, sum(file.num_bytes for file in files), self._place.folder)


class ImageFolderTable:
    """Each file a row {"image": its name below the folder, "label": its first sub-folder's name}, sorted by name."""

    def __init__(self, files: Sequence[StoredObject], *, place: Place):
        self._files = files
        self._place = place

    def num_rows(self) -> int:
        return len(self._files)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        for files in _groups(islice(self._files, start, stop), self._place.unit_bytes):
            names = tuple(file.key for file in files)
            yield ImageFiles(names, sum(file.num_bytes for file in files), self._place.folder)


def _groups(files: Iterator[StoredObject], unit_bytes: int) -> Iterator[list[StoredObject]]:
    group: list[StoredObject] = []
    num_bytes = 0
    for file in files:
        group.append(file)
        num_bytes += file.num_bytes
        if num_bytes >= unit_bytes or len(group) == MAX_FILES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
