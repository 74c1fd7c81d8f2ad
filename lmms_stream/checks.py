"""Types of values that users give to constructors: what a number is, and what a path, in one place."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from .errors import ConfigError

_PLAIN = {"int", "float", "bool", "str", "None"}  # types of fields that are checked; others have checks of their own
_CALLED = {"int": "a whole number", "float": "a number", "bool": "True or False"}


def check_fields(config: Any, *, prefix: str = "") -> None:
    """Check the numbers and truth values of a dataclass by the types of its fields; NumPy's whole numbers become int.

    A field whose default is None may be None. prefix: stands before names in the ConfigError.
    """
    for each in dataclasses.fields(config):
        kinds = str(each.type).replace(" ", "").split("|")
        value = getattr(config, each.name)
        if not _PLAIN.issuperset(kinds) or not _CALLED.keys() & {*kinds} or (value is None and each.default is None):
            continue
        checked = _checked(f"{prefix}{each.name}", value, kinds)
        if checked is not value:
            object.__setattr__(config, each.name, checked)


def whole_number(name: str, value: Any, *, least: int) -> int:
    """The value as an int; ConfigError for another type, and for less than `least`."""
    number = int(_checked(name, value, ["int"]))
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, got {number}")
    return number


def local_path(name: str, path: str | Path) -> Path:
    """The path of this machine that a path or a file URL says; ConfigError for another URL.

    >>> [str(local_path("local", path)) for path in ("data", "file:///data/a%20b")]
    ['data', '/data/a b']
    """
    scheme, separator, rest = str(path).partition("://")
    if not separator:
        return Path(path)
    if scheme == "file" and rest.startswith("/"):
        return Path(unquote(rest))
    if scheme == "file":
        raise ConfigError(f"{name} {path} has a host or no whole path: write file:///…, or a path")
    raise ConfigError(f"{name} {path} is a URL, and a folder of this machine belongs there: write a path, or file:///…")


def _checked(name: str, value: Any, kinds: list[str]) -> Any:
    is_truth = type(value).__name__ in ("bool", "bool_")  # NumPy's, too
    if ("str" in kinds and not is_truth and not isinstance(value, Real)) or ("None" in kinds and value is None):
        return value
    if is_truth and "bool" in kinds:
        return value
    if not is_truth and "int" in kinds and hasattr(value, "__index__"):
        return value if type(value) is int else index(value)
    if not is_truth and "float" in kinds and isinstance(value, Real):
        return value
    called = " or ".join(_CALLED[kind] for kind in kinds if kind in _CALLED)
    raise ConfigError(f"{name} must be {called}, got {value!r}{_remedy(value, kinds)}")


def _remedy(value: Any, kinds: list[str]) -> str:
    """What to write instead of a number in another form."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return ""
    if type(value).__name__ in ("bool", "bool_") or not math.isfinite(number):
        return ""
    if number == int(number) and "bool" not in kinds:
        return f": write {int(number)}"
    return f": write {number}" if "float" in kinds else ""
