"""MosaicML Streaming's LocalDataset: the samples of a folder by number, for any DataLoader and sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..checks import local_path
from .core import PackedDataset
from .mosaic_shards import StoredSamples
from .streams import StreamConfig


class LocalDataset(StoredSamples, Dataset[Any]):
    """The samples of the dataset in a folder, by number. split: a folder below it.

    Raises StorageError and ShardError.
    """

    def __init__(self, local: str | Path, split: str | None = None):
        self.local, self.split = str(local_path("local", local)), split or ""
        self.core = PackedDataset([StreamConfig(remote=self.local, split=split or None)])
        self.num_samples = self.core.num_samples

    def __len__(self) -> int:
        return self.num_samples
