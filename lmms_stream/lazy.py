"""Public names of a package that are imported when they are first used, so that importing the package is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions __getattr__ and __dir__ of a package. homes: name -> HOME in `from .HOME import name`."""

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = sys.modules[package]
        value = getattr(importlib.import_module(f".{home}", package), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, names
