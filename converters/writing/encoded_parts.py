"""Units that parts of a conversion have encoded, below its target, until they are made into its shards.

Each part says there what it was asked, and once all its units are there into how many units the sources are cut. A
unit has the same name whichever part of however many encodes it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...errors import ObjectMissingError, StorageError
from ...mds.stored_lengths import write_json
from ...processes.pool import Mark
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage
from .shares import Part
from .unit_files import about_path, samples_path
from .work import MAY_CHANGE

_FOLDER = "_lmms/encoded"
_RECORD = re.compile(r"part-(\d{5,})-of-(\d{5,})\.json")
_MOST_UNITS = 10**8  # of a source
_SHOWN = 8  # parts that an error names


def stored_number(source: int, index: int) -> int:
    """Of unit `index` of a source, among all units of all sources: the same for all parts, which cut only their own.

    >>> stored_number(3, 12)
    300000012
    """
    return source * _MOST_UNITS + index


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """What parts have left at a target for one conversion. storage: of the folder for what was asked."""

    storage: Storage
    asked: Mapping[str, Any]
    base: Storage

    @staticmethod
    def at(base: Storage, asked: Mapping[str, Any]) -> EncodedParts:
        """base: the target. asked: JSON values from which the output follows."""
        values = json.loads(json.dumps({name: asked[name] for name in asked if name not in MAY_CHANGE}))
        key = xxhash.xxh3_64(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return EncodedParts(open_storage(f"{base.url}/{_FOLDER}/{key}"), values, base)

    @staticmethod
    def found(base: Storage, asked: Mapping[str, Any]) -> EncodedParts | None:
        """As `at`, where any part has left something."""
        return EncodedParts.at(base, asked) if base.list_objects(f"{_FOLDER}/") else None

    def begin(self, part: Part, *, overwrite: bool) -> Mapping[str, Any] | None:
        """Say that the part is worked on; returns what it has said at its end, if it has come to that.

        Raises StorageError for parts of another number, and, unless overwrite, of another conversion.
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
        """What a worker must see, if the target is a folder."""
        if not isinstance(self.storage, LocalStorage):
            return []
        remedy = "convert to a folder that all nodes share, or to an object store"
        return [Mark(path=self.storage.folder.absolute() / _name(part), holds=b'"asked"', remedy=remedy)]

    def end(self, part: Part, num_units: Mapping[int, int]) -> None:
        """All units of the part are there. num_units: of the sources that the part has read."""
        self._say(part, {str(source): count for source, count in num_units.items()})

    def units(self) -> dict[str, int]:
        """Names of the files of units that are there, with their bytes."""
        return {each.key: each.num_bytes for each in self.storage.list_objects("") if not _RECORD.fullmatch(each.key)}

    def counts(self, num_sources: int, *, overwrite: bool) -> list[int] | None:
        """Into how many units each source is cut; None where no part has begun.

        Raises StorageError for parts that are not there, or not whole, for units that are gone, and, unless overwrite,
        for parts of another conversion.
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
                f"{missing[0]} and so on, or remove {self.storage.url} to convert all of it here"
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
        """StorageError where parts of a conversion that was asked something else are at the target."""
        ours = self.storage.url.removeprefix(f"{self.base.url}/")
        for key in self._keys():
            folder, _, name = key.rpartition("/")
            if folder != ours and _RECORD.fullmatch(name):
                theirs = _read(self.base, key)["asked"]
                changed = sorted(name for name in self.asked if theirs.get(name) != self.asked[name])
                raise StorageError(
                    f"{self.base.url} holds parts of a conversion with other {', '.join(changed)}: run the command "
                    "that made them, choose another target, or pass --overwrite"
                )

    def remove(self) -> None:
        """Remove all that parts have left at the target, of whatever conversion; records last."""
        for key in sorted(self._keys(), key=lambda key: _RECORD.fullmatch(key.rpartition("/")[2]) is not None):
            self.base.delete(key)
        if isinstance(self.base, LocalStorage):
            shutil.rmtree(self.base.folder / _FOLDER, ignore_errors=True)  # of folders alone

    def _keys(self) -> list[str]:
        return [each.key for each in self.base.list_objects(f"{_FOLDER}/")]

    def _records(self) -> list[Part]:
        found = (_RECORD.fullmatch(each.key) for each in self.storage.list_objects("part-"))
        return [Part(int(each[1]), int(each[2])) for each in found if each]

    def _missing(self, parts: Sequence[Part]) -> tuple[list[Part], dict[int, int]]:
        """Parts that are not whole; and of each source of which the others know it, its number of units."""
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
        write_json(self.storage, _name(part), {"asked": self.asked, "num_units": num_units})


def names(source: int, index: int) -> Iterator[str]:
    """Of the files of a unit, in the order in which they are written."""
    for path in (samples_path, about_path):
        yield path(Path(), stored_number(source, index)).name


def _name(part: Part) -> str:
    return f"part-{part.number:05}-of-{part.count:05}.json"


def _read(storage: Storage, name: str) -> dict[str, Any]:
    """What a part has said."""
    try:
        said = dict(json.loads(storage.read(name)))
        dict(said["asked"])
        return said | {"num_units": None if said["num_units"] is None else _counts(said["num_units"])}
    except (ValueError, TypeError, LookupError) as error:
        raise StorageError(f"{storage.url}/{name} is damaged ({error!r}): remove it, and run its part again") from error


def _counts(said: Mapping[str, Any]) -> dict[int, int]:
    return {int(source): int(count) for source, count in said.items()}
