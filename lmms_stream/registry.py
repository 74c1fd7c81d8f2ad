"""Parts by name: parts of this package, and parts added by other packages through entry points.

A part is imported at the first use. Another package adds a part in its pyproject.toml, for example

    [project.entry-points."lmms_stream.tasks"]
    my_task = "my_package.tasks:MyTask"

The groups are lmms_stream.families, .tasks, .formats, .rows, .stores, .engines and .commands: docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Part = TypeVar("Part")


class Registry(Mapping[str, Part]):
    """The parts of one group, by name. Ours come first, in the order of the table; others follow, sorted by name.

    A lookup of one of our parts does not read other packages' entry points. ConfigError for a part of another package
    if the import fails, if the object is not a part of this group, if the name is one of ours, or if two packages add
    the name.
    """

    def __init__(
        self,
        group: str,
        ours: Mapping[str, str | Part],
        *,
        accepts: Callable[[Any], bool] = callable,
        expected: str = "a function or a class",
    ) -> None:
        """group: the end of the entry points' group. ours: name -> part, or its "module:object" below lmms_stream.

        accepts: whether an object may be a part of the group. expected: such an object in words.
        """
        self.group = group
        self.ours = ours
        self._accepts, self._expected = accepts, expected

    def __getitem__(self, name: str) -> Part:
        if name not in self.ours:
            entry = self.others[name]
            found = _loaded(entry)
            if not self._accepts(found):
                raise ConfigError(
                    f"{entry.name!r} of {entry.group} is {entry.value} of {_package(entry)}, a {type(found).__name__}, "
                    f"and must be {self._expected}: correct that package, or uninstall it"
                )
            return cast(Part, found)
        part = self.ours[name]
        return cast(Part, imported(part)) if isinstance(part, str) else part

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self.others

    def __iter__(self) -> Iterator[str]:
        yield from self.ours
        yield from self.others  # looked for only by those who have seen all of ours

    def __len__(self) -> int:
        return len(self.ours) + len(self.others)

    @property
    def others(self) -> Mapping[str, EntryPoint]:
        """The entry points of other packages, by name."""
        found = _entry_points(f"lmms_stream.{self.group}")
        for name in found:
            if name in self.ours:
                raise ConfigError(
                    f"{_package(found[name])} adds {name!r} to {found[name].group}, but lmms_stream itself has this "
                    "name: rename it, or uninstall that package"
                )
        return found

    def check_names(self) -> None:
        """ConfigError if another package adds a part with the name of one of ours."""
        _ = self.others

    def origin(self, name: str) -> str | None:
        """Package and version of a part; None for one of our parts."""
        return None if name in self.ours else _package(self.others[name])


@cache
def _entry_points(group: str) -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes 30 ms

    found: dict[str, EntryPoint] = {}
    for each in sorted(entry_points(group=group), key=lambda each: each.name):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            raise ConfigError(
                f"{_package(other)} and {_package(each)} both add {each.name!r} to {group}: uninstall one of them"
            )
    return found


@cache
def imported(value: str) -> Any:
    """Import and return an object of this package by its "module:object" below lmms_stream."""
    module, _, name = value.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever the other package's code raises
        raise ConfigError(
            f"{entry.name!r} of {entry.group} is {entry.value} of {_package(entry)}, which cannot be imported "
            f"({type(error).__name__}: {error}): correct that package, or uninstall it"
        ) from error


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
