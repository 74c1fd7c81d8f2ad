"""The user's functions: filter decides which rows of a source are taken, map changes each row.

row -> [filter] -> row -> [map] -> rows, which are read by their kind. Processes load both functions by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from traceback import extract_tb
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError, WorkerError
from ...processes.own_code import name_of, own_code, source_hash
from .options import SchemaOptions

NamedOrFunction = str | Callable[[dict[str, Any]], Any]
_EXCERPT = 80  # characters of a wrong value
OF_OBJECTS: dict[str, tuple[Callable[..., Any], str]] = {}  # name -> method of an object of this process, and its code
_in_use: dict[UserFunction, tuple[Callable[..., Any], str]] = {}  # functions loaded by this process, and their code


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user. option: the option with its name. name: in the notation of own_code."""

    option: str
    name: str

    def __str__(self) -> str:
        return self.name if self.name in OF_OBJECTS else f"{self.option} {self.name}"

    def load(self) -> tuple[Callable[[dict[str, Any]], Any], str]:
        """Return the function, and the hash of its current code; ConfigError if this process has loaded older code."""
        if self.name in OF_OBJECTS:
            return OF_OBJECTS[self.name]
        module, function = own_code(self.name, setting=self.option, what="function")
        code = source_hash(module, function, asked=str(self))
        before = _in_use.setdefault(self, (function, code))
        if before[0] is function and before[1] != code:
            raise ConfigError(f"{self}: its file was changed after its import: restart Python")
        _in_use[self] = function, code
        return function, code


@dataclass(frozen=True, slots=True)
class RowFunctions:
    """The functions for the rows of a source, and the hash of the code of each; can be pickled."""

    filter: UserFunction | None
    map: UserFunction | None
    filter_code: str = ""
    map_code: str = ""

    def keeps(self, values: dict[str, Any]) -> bool:
        """Return whether the filter takes a row; DataError for its errors, and for results other than True or False."""
        if self.filter is None:
            return True
        said = _called(self.filter, _loaded(self.filter, self.filter_code), values)
        if not isinstance(said, bool | np.bool_):
            raise DataError(f"{self.filter} gave {_shown(said)}, expected True or False: correct it")
        return bool(said)

    def rows(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the map's rows for a row: one, several, or none; DataError for its errors and for other results.

        A generator gives several rows.
        """
        return [values] if self.map is None else rows_of(self.map, _loaded(self.map, self.map_code), values)


def rows_of(asked: UserFunction, function: Callable[..., Any], values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a function's rows for a row; DataError for errors of the function and for other results."""
    made = _called(asked, function, values)
    if type(made) is dict and all(type(name) is str for name in made):
        return [made]
    rows = [] if made is None else [made] if isinstance(made, Mapping) else made
    if not isinstance(rows, list):
        raise DataError(
            f"{asked} gave {_shown(made)}, expected a row (a dict), several of them (a list), or None: correct it"
        )
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(f"{asked} gave a list that holds {_shown(row)}, expected only rows (dicts): correct it")
        wrong = [name for name in row if not isinstance(name, str)]
        if wrong:
            raise DataError(f"{asked} gave a row with the column {wrong[0]!r}, whose name is not text: correct it")
    return [dict(row) for row in rows]


def with_functions(
    options: SchemaOptions, *, map: NamedOrFunction | None, filter: NamedOrFunction | None
) -> SchemaOptions:
    """Return the options with the names of the functions; ConfigError for a function without an importable name."""
    functions = {setting: each for setting, each in (("map", map), ("filter", filter)) if each is not None}
    names: dict[str, Any] = {
        setting: each if isinstance(each, str) else name_of(each, setting=setting)
        for setting, each in functions.items()
    }
    return replace(options, **names)


def row_functions(options: SchemaOptions) -> RowFunctions | None:
    """Load the functions in the options; None without functions. ConfigError for a failed import."""
    if options.filter is None and options.map is None:
        return None
    filter = None if options.filter is None else UserFunction("--filter", options.filter)
    map = None if options.map is None else UserFunction("--map", options.map)
    return RowFunctions(filter, map, filter.load()[1] if filter else "", map.load()[1] if map else "")


def code_of(options: Iterable[SchemaOptions]) -> dict[str, str]:
    """Return name -> hash of the code of each named function: a conversion resumes only with the same code."""
    settings = {(each.filter, each.map): each for each in options}.values()  # many sources may name the same
    functions = [each for each in map(row_functions, settings) if each is not None]
    codes = [pair for each in functions for pair in ((each.filter, each.filter_code), (each.map, each.map_code))]
    return {function.name: code for function, code in codes if function is not None}


@cache
def _loaded(function: UserFunction, code: str) -> Callable[[dict[str, Any]], Any]:
    """Load a function in a worker. WorkerError if the code changed after the conversion began."""
    found, code_now = function.load()
    if code_now != code:
        raise WorkerError(
            f"the code of {function} was changed during the conversion: restore it and run the same command to resume, "
            "or start over with --overwrite"
        )
    return found


def _called(asked: UserFunction, function: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> Any:
    try:
        made = function(values)
        if type(made) is dict or not isinstance(made, Iterable) or isinstance(made, Mapping | str | bytes):
            return made
        return list(made)
    except (Exception, SystemExit) as error:
        home = getattr(getattr(function, "__code__", None), "co_filename", None)
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == home]
        line = f" (line {lines[-1]})" if lines else ""
        raise DataError(f"{asked} raised {type(error).__name__}: {error}{line}: correct it") from error


def _shown(value: Any) -> str:
    return f"{repr(value)[:_EXCERPT]} ({type(value).__name__})"
