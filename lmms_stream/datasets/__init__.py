"""LMMS Engine's front door: a DatasetConfig of theirs -> datasets whose packs a DataLoader and our trainer take.

names           their names of types, formats and processors -> ours; the sources and the processor of a config
building        sources -> shards, once, whoever asks first
multimodal      MultiModalDataset: packs by number

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..mds.dataset_config import DatasetConfig as DatasetConfig
    from .multimodal import MultiModalDataset as MultiModalDataset

_HOME = {
    "DatasetConfig": "lmms_stream.mds.dataset_config",
    "MultiModalDataset": "lmms_stream.datasets.multimodal",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
