"""Relax's utilities that its data needs; names of Relax's modules that are not here, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def refused_names(module: str, remedies: Mapping[str, str]) -> Callable[[str], Any]:
    """The function __getattr__ of a module: ImportError for these names, which says what to do."""

    shown = module.replace(".doors.", ".")  # the name that programs import

    def get(name: str) -> Any:
        if name in remedies:
            raise ImportError(f"{shown} has no {name}: {remedies[name]}")
        raise AttributeError(f"module {shown!r} has no attribute {name!r}")

    return get
