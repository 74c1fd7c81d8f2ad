"""Encoding of a part of a conversion; then the units of all parts -> shards.

A part encodes its units and stores each unit below the target at once. The last command reads the encoded units and
places the samples in the order of a conversion on one machine.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash

from ...errors import ObjectMissingError, StorageError
from ...mds.measuring import write_json
from ...processes.pool import Mark
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage
from ..rows.options import SchemaOptions
from ..sources.units import Row, Source
from .encoded_units import NONE_FITS, UnitEncoder, UnitTask
from .reading import FetchTask, Part, Reading
from .shards import ShardTask
from .unit_files import EncodedUnit, about_path, failed_path, samples_path, temporary_beside
from .work import MAY_CHANGE, RowError


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKeeper:
    """Encodes units and stores them; the description of a unit is stored last.

    encoder: writes to its folder if all workers see the store; else to temporary folders. first_rows: rows of each
    source before its slice.
    """

    encoder: UnitEncoder
    storage: Storage
    first_rows: Sequence[int]

    def encode(self, task: UnitTask, on_bytes: Callable[[int], None]) -> bool:
        """Encode and store a unit. RowError if a row ends the unit early; the unit is then not stored."""
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
        if reason.endswith(NONE_FITS):
            raise RowError(f"{task.source_name}:{where}: {reason}")
        raise RowError(
            f"{task.source_name}:{where}: {reason} (or pass --on-error skip to leave such rows out; the command that "
            "joins the parts then lists the rows by their numbers in the files)"
        )


class KeptUnits:
    """Placement of a part: the units are kept without placing samples. files: names of the earlier runs' units."""

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

    def place(self, task: UnitTask, reading: Reading, *, is_whole: bool) -> Iterator[ShardTask]:
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
    """Puts units encoded by parts into a work folder: links if local, else downloads."""

    folder: Path
    storage: Storage

    def encode(self, task: UnitTask, on_bytes: Callable[[int], None]) -> bool:
        ours = (samples_path(self.folder, task.number), about_path(self.folder, task.number))
        for name, path in zip(names(task.source, task.index), ours, strict=True):
            if isinstance(self.storage, LocalStorage):
                with suppress(FileExistsError):  # link of a killed run
                    path.symlink_to(self.storage.folder.absolute() / name)
            else:
                temporary = temporary_beside(path)
                self.storage.download(name, temporary)
                temporary.replace(path)
        on_bytes(task.unit.num_bytes)
        return True


class EncodedReading(Reading):
    """Reading of units that parts have cut and encoded. num_units: of each source."""

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
            unit = _DoneUnit(each.num_bytes // max(1, count))
            for index in range(count):
                yield UnitTask(number=number, unit=unit, mapper=None, source=source, source_name=each.name, index=index)
                number += 1

    def next_fetch(self) -> FetchTask | None:
        return None

    def has_read(self, task: UnitTask) -> None:
        """Sources are not open, but for what the first was looked at for, until all is done."""


@dataclass(frozen=True, slots=True)
class _DoneUnit:
    """An already encoded unit."""

    num_bytes: int
    folder: str | None = None

    def rows(self) -> Iterator[Row]:
        return iter(())

    def count(self) -> int:
        return 0


# Units encoded by parts of a conversion, stored below its target until the last command makes shards from them.
#
# Each part writes the identity of its conversion first. After its last unit it writes the number of units of each
# source. The name of a unit does not depend on the part or on the number of parts.

_FOLDER = "_lmms/encoded"
_RECORD = re.compile(r"part-(\d{5,})-of-(\d{5,})\.json")
_MOST_UNITS = 10**8  # of a source
_SHOWN = 8  # parts in an error message


def stored_number(source: int, index: int) -> int:
    """Return the number of unit `index` of a source among all sources; equal in all parts.

    >>> stored_number(3, 12)
    300000012
    """
    return source * _MOST_UNITS + index


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """Files of the parts of one conversion at a target. storage: of the folder of this identity."""

    storage: Storage
    identity: Mapping[str, Any]
    base: Storage

    @staticmethod
    def at(base: Storage, identity: Mapping[str, Any]) -> EncodedParts:
        """Return the parts of a conversion. base: the target. identity: JSON values that decide the output."""
        values = json.loads(json.dumps({name: identity[name] for name in identity if name not in MAY_CHANGE}))
        key = xxhash.xxh3_64(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return EncodedParts(open_storage(f"{base.url}/{_FOLDER}/{key}"), values, base)

    @staticmethod
    def found(base: Storage, identity: Mapping[str, Any]) -> EncodedParts | None:
        """Return `at` if any part has stored files at the target, else None."""
        return EncodedParts.at(base, identity) if base.list_objects(f"{_FOLDER}/") else None

    def begin(self, part: Part, *, overwrite: bool) -> Mapping[str, Any] | None:
        """Announce the start of a part; return the completion record of a finished part, else None.

        Raise StorageError for parts of another count, and, unless overwrite, for parts of another conversion.
        """
        if not overwrite:
            self.check_no_others()
        other = next((each for each in self._records() if each.count != part.count), None)
        if other is not None:
            raise StorageError(
                f"{self.base.url} holds part {other} of this conversion, and this is part {part}: use the same number "
                f"of parts, or remove {self.storage.url}"
            )
        said = self._said(part)
        if said is not None and said["num_units"] is not None and not overwrite:
            return said
        self._say(part, None)
        return None

    @property
    def has_begun(self) -> bool:
        """Whether any part of this conversion has."""
        return bool(self._records())

    def marks(self, part: Part) -> list[Mark]:
        """Files by which a worker checks its view of a target folder."""
        if not isinstance(self.storage, LocalStorage):
            return []
        remedy = "convert to a folder that all nodes share, or to an object store"
        return [Mark(path=self.storage.folder.absolute() / _name(part), holds=b'"asked"', remedy=remedy)]

    def end(self, part: Part, num_units: Mapping[int, int]) -> None:
        """Record the end of the part after its last unit. num_units: of the sources read by the part."""
        self._say(part, {str(source): count for source, count in num_units.items()})

    def units(self) -> dict[str, int]:
        """Return file name -> bytes of all stored units."""
        return {each.key: each.num_bytes for each in self.storage.list_objects("") if not _RECORD.fullmatch(each.key)}

    def counts(self, num_sources: int, *, overwrite: bool) -> list[int] | None:
        """Return the number of units of each source; None if no part has begun.

        Raise StorageError for missing or unfinished parts, for missing units, and, unless overwrite, for parts of
        another conversion.
        """
        if not overwrite:
            self.check_no_others()
        parts = self._records()
        if not parts:
            return None
        missing, found = self._missing(parts)
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else "")
            raise StorageError(
                f"{self.base.url} holds a conversion in {parts[0].count} parts, of which {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not whole: {shown}; run the same command with --part "
                f"{missing[0]} and so on, or remove {self.storage.url} to convert all parts here"
            )
        files = self.units()
        for source in range(num_sources):
            for name in (name for index in range(found[source]) for name in names(source, index)):
                if name not in files:
                    raise StorageError(
                        f"{self.storage.url}/{name}, which a part has written, is gone: remove {self.storage.url}, "
                        "and convert the parts again"
                    )
        return [found[source] for source in range(num_sources)]

    def check_no_others(self) -> None:
        """Raise StorageError if the target holds parts of a conversion with another identity."""
        ours = self.storage.url.removeprefix(f"{self.base.url}/")
        for key in self._keys():
            folder, _, name = key.rpartition("/")
            if folder != ours and _RECORD.fullmatch(name):
                theirs = _read(self.base, key)["asked"]
                changed = sorted(name for name in self.identity if theirs.get(name) != self.identity[name])
                raise StorageError(
                    f"{self.base.url} holds parts of a conversion with other {', '.join(changed)}: run the command "
                    "that made them, choose another target, or pass --overwrite"
                )

    def remove(self) -> None:
        """Remove all files of parts at the target, of any conversion; records last."""
        for key in sorted(self._keys(), key=lambda key: _RECORD.fullmatch(key.rpartition("/")[2]) is not None):
            self.base.delete(key)
        if isinstance(self.base, LocalStorage):
            shutil.rmtree(self.base.folder / _FOLDER, ignore_errors=True)  # folders without files

    def _keys(self) -> list[str]:
        return [each.key for each in self.base.list_objects(f"{_FOLDER}/")]

    def _records(self) -> list[Part]:
        found = (_RECORD.fullmatch(each.key) for each in self.storage.list_objects("part-"))
        return [Part(int(each[1]), int(each[2])) for each in found if each]

    def _missing(self, parts: Sequence[Part]) -> tuple[list[Part], dict[int, int]]:
        """Return unfinished parts, and the number of units of each source in finished parts."""
        missing: list[Part] = []
        found: dict[int, int] = {}
        for part in (Part(number, parts[0].count) for number in range(parts[0].count)):
            said = self._said(part) if part in parts else None
            if said is None or said["num_units"] is None:
                missing.append(part)
            else:
                found |= said["num_units"]
        return missing, found

    def _said(self, part: Part) -> dict[str, Any] | None:
        try:
            return _read(self.storage, _name(part))
        except ObjectMissingError:
            return None

    def _say(self, part: Part, num_units: Mapping[str, int] | None) -> None:
        write_json(self.storage, _name(part), {"asked": self.identity, "num_units": num_units})


def names(source: int, index: int) -> Iterator[str]:
    """Names of the files of a unit, in the order of writing."""
    for path in (samples_path, about_path):
        yield path(Path(), stored_number(source, index)).name


def _name(part: Part) -> str:
    return f"part-{part.number:05}-of-{part.count:05}.json"


def _read(storage: Storage, name: str) -> dict[str, Any]:
    """Read a part's record; StorageError if damaged."""
    try:
        said = dict(json.loads(storage.read(name)))
        dict(said["asked"])
        return said | {"num_units": None if said["num_units"] is None else _counts(said["num_units"])}
    except (ValueError, TypeError, LookupError) as error:
        raise StorageError(f"{storage.url}/{name} is damaged ({error!r}): remove it, and run its part again") from error


def _counts(said: Mapping[str, Any]) -> dict[int, int]:
    return {int(source): int(count) for source, count in said.items()}
