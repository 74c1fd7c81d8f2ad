"""A processor's folder -> its family. The files beside this one that have a FAMILY are asked; none is named here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from .family import FamilyMaker
from .files import ProcessorFiles

_HERE = __name__.rpartition(".")[0]


def family_of(files: ProcessorFiles) -> FamilyMaker:
    """The family whose processor's class, or whose model's type, the files say; any other is asked what it is."""
    known = list(_families())
    for family in known:
        if files.processor_class in family.processor_classes:
            return family
    for family in known:
        if not files.processor_class and files.model_type in family.model_types:
            return family
    from .asked import Described

    return Described()


def family_of_model(model_type: str) -> FamilyMaker | None:
    """The family of models whose configs say this type; None for one that has no file here."""
    return next((family for family in _families() if model_type in family.model_types), None)


def _families() -> Iterator[FamilyMaker]:
    for found in pkgutil.iter_modules(importlib.import_module(_HERE).__path__):
        family: FamilyMaker | None = getattr(importlib.import_module(f"{_HERE}.{found.name}"), "FAMILY", None)
        if family is not None:
            yield family
