"""Relax's data utilities; missing names of Relax's modules, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def refused_names(module: str, remedies: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's __getattr__; it raises ImportError with the remedy for these names."""

    shown = module.replace(".doors.", ".")  # the name used in imports

    def get(name: str) -> Any:
        if name in remedies:
            raise ImportError(f"{shown} has no {name}: {remedies[name]}")
        raise AttributeError(f"module {shown!r} has no attribute {name!r}")

    return get
