"""Figures by matplotlib, where it is installed, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..storage.failures import disk_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(*, width: float, height: float) -> Figure:
    """An empty figure of this size, in inches; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'lmms-stream[demo]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as the suffix of `path` says. ConfigError for another than SUFFIXES, StorageError by the disk."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path}: plots are files of {', '.join(SUFFIXES)}: name one of these")
    with disk_errors(str(path), room="free some, or name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=suffix[1:])
