"""Import the public names of a package at first use: the import of the package stays quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions __getattr__ and __dir__ of a package. homes: name -> HOME in `from .HOME import name`."""

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)


class _Alias(Loader):
    """Load a module under another name: the same module object, imported once."""

    def __init__(self, name: str, spec: ModuleSpec) -> None:
        self._name = name
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        sys.modules[self._name] = module

    def get_code(self, name: str) -> Any:
        """Return the code of the module under its present name, for `python -m`."""
        return self._spec.loader.get_code(self._spec.name)  # type: ignore[union-attr]


class _Aliases(MetaPathFinder):
    """Find modules by their former names."""

    def __init__(self, package: str, names: Mapping[str, str]) -> None:
        """names: former name -> name, below the package."""
        self._package = f"{package}."
        self._names = {f"{package}.{name}": f"{package}.{now}" for name, now in names.items()}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        head = fullname if fullname.startswith(self._package) else ""
        while head and head not in self._names:
            head = head.rpartition(".")[0]
        if not head:
            return None
        spec = find_spec(self._names[head] + fullname[len(head) :])
        if spec is None:
            return None
        found = ModuleSpec(spec.name, _Alias(fullname, spec), origin=spec.origin)
        found.submodule_search_locations = spec.submodule_search_locations
        return found


def keep_names(package: str, names: Mapping[str, str]) -> None:
    """Allow imports of modules by former names. names: former name -> name, below the package."""
    sys.meta_path.insert(0, _Aliases(package, names))
