"""The work of one part of a conversion, and of the command that makes the units of all parts into shards.

A part encodes its units and keeps them below the target, each as soon as it is encoded. The last command takes them
in place of encoding anything, and lays them as one machine would have laid its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...storage.disk_errors import disk_errors
from ...storage.local import LocalStorage
from ...storage.storage import Storage
from ..rows.options import SchemaOptions
from ..sources.units import Row, Source
from .encoded_parts import names, stored_number
from .encoded_units import UnitEncoder, UnitTask
from .reading import FetchTask, Reading
from .shards import ShardTask
from .unit_files import EncodedUnit, about_path, failed_path, samples_path, temporary_beside
from .work import RowError


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKeeper:
    """Encodes units, and keeps them at a store, what they are last.

    encoder: writes to the folder that it names, where the store is one that all workers see; else to temporary ones.
    first_rows: of each source, how many its slice passes over.
    """

    encoder: UnitEncoder
    storage: Storage
    first_rows: Sequence[int]

    def encode(self, task: UnitTask, on_bytes: Callable[[int], None]) -> bool:
        """RowError where a row ends the unit early, which is then not kept."""
        if isinstance(self.storage, LocalStorage):
            self._encode(self.encoder, task, on_bytes)
            return True
        with disk_errors("the folder for temporary files"), TemporaryDirectory(prefix="lmms_stream-unit-") as folder:
            self._encode(replace(self.encoder, folder=Path(folder), links=False), task, on_bytes)
            for name in names(task.source, task.index):
                self.storage.upload(Path(folder) / name, name)
        return True

    def _encode(self, encoder: UnitEncoder, task: UnitTask, on_bytes: Callable[[int], None]) -> None:
        number = stored_number(task.source, task.index)
        if encoder.encode(replace(task, number=number), on_bytes):
            return
        row, reason = EncodedUnit.load(failed_path(encoder.folder, number)).rejects[0]
        for path in (samples_path, failed_path):
            path(encoder.folder, number).unlink(missing_ok=True)
        where = f"row {row + 1} of unit {task.index}" if task.index else f"{self.first_rows[task.source] + row + 1}"
        raise RowError(
            f"{task.source_name}:{where}: {reason} (or pass --on-error skip to leave such rows out; the command that "
            "makes the dataset then lists them, by their numbers in their files)"
        )


class KeptUnits:
    """In place of laying: units of a part are kept as they are. files: names of those of earlier runs."""

    def __init__(self, files: set[str]):
        self.next_unit = 0
        self.num_samples = 0
        self.num_there = 0
        self.is_full = False
        self.is_finished = False
        self._files = files

    def is_encoded(self, task: UnitTask) -> bool:
        """Whether the unit was encoded by an earlier run of the part."""
        is_there = all(name in self._files for name in names(task.source, task.index))
        self.num_there += is_there
        return is_there

    def lay(self, task: UnitTask, reading: Reading, *, is_whole: bool) -> Iterator[ShardTask]:
        """No shard."""
        self.next_unit += 1
        return iter(())

    def finish(self) -> Iterator[ShardTask]:
        self.is_finished = True
        return iter(())

    def begin(self, task: ShardTask) -> None:
        raise AssertionError(f"a part makes no shards, and was given {task.name}")

    def keep(self, task: ShardTask, entry: dict[str, Any]) -> None:
        raise AssertionError(f"a part makes no shards, and was given {task.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCollector:
    """Has units that parts encoded lie in a work folder: by links to a folder of this machine, or downloaded."""

    folder: Path
    storage: Storage

    def encode(self, task: UnitTask, on_bytes: Callable[[int], None]) -> bool:
        ours = (samples_path(self.folder, task.number), about_path(self.folder, task.number))
        for name, path in zip(names(task.source, task.index), ours, strict=True):
            if isinstance(self.storage, LocalStorage):
                with suppress(FileExistsError):  # by a run that was killed
                    path.symlink_to(self.storage.folder.absolute() / name)
            else:
                temporary = temporary_beside(path)
                self.storage.download(name, temporary)
                temporary.replace(path)
        on_bytes(task.unit.num_bytes)
        return True


class EncodedReading(Reading):
    """Units that parts have cut and encoded. num_units: of each source."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: SchemaOptions,
        *,
        say: Callable[[str], None],
        num_units: Sequence[int],
    ):
        super().__init__(sources, options, say=say)
        self._counts = num_units

    def units(self) -> Iterator[UnitTask | None]:
        number = 0
        for source, (each, count) in enumerate(zip(self._sources, self._counts, strict=True)):
            unit = _Encoded(each.num_bytes // max(1, count))
            for index in range(count):
                yield UnitTask(number=number, unit=unit, mapper=None, source=source, source_name=each.name, index=index)
                number += 1

    def next_fetch(self) -> FetchTask | None:
        return None

    def has_read(self, task: UnitTask) -> None:
        """Sources are not open, but for what the first was looked at for, until all is done."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A unit that is encoded already."""

    num_bytes: int
    folder: str | None = None

    def rows(self) -> Iterator[Row]:
        return iter(())

    def count(self) -> int:
        return 0
