"""Names of Relax's modules that are not here, each with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def refused_names(module: str, remedies: Mapping[str, str]) -> Callable[[str], Any]:
    """The function __getattr__ of a module: ImportError for these names, which says what to do."""

    def get(name: str) -> Any:
        if name in remedies:
            raise ImportError(f"{module} has no {name}: {remedies[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
