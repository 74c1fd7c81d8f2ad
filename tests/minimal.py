"""An environment of the hard dependencies alone: links to what is installed, so that nothing is downloaded for it."""

from __future__ import annotations

import os
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from .arrows import ROOT


def make(folder: Path) -> Path:
    """Make it, and return its interpreter."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in needed("lmms-stream"):
        for name in _top_level(found):
            place = Path(str(found.locate_file(name)))
            if place.exists() and not (packages / name).exists():
                (packages / name).symlink_to(place)
    (packages / "lmms_stream.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def needed(project: str) -> Iterator[Distribution]:
    """The distributions that an installation of a project without extras brings."""
    seen, todo = {project}, [*_requires(distribution(project))]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        yield found
        todo += _requires(found)


def _requires(found: Distribution) -> Iterator[str]:
    for line in found.requires or ():
        required = Requirement(line)
        for extra in ("", *sorted(required.extras)):
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                yield required.name.lower().replace("_", "-")
                break


def _top_level(found: Distribution) -> set[str]:
    names = {path.parts[0] for path in found.files or ()}
    return {name for name in names if name not in ("..", "__pycache__", os.curdir)}
