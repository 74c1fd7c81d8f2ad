"""MosaicML Streaming's LocalDataset: the samples of a folder by number, for any DataLoader and sampler."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..checks import local_path
from ..types import Sample
from .core import PackedDataset
from .mosaic_bases import Numbered
from .mosaic_shards import Spanner, readers
from .streams import StreamConfig


class LocalDataset(Numbered, Dataset[Any]):
    """The samples of the dataset in a folder, by number. split: a folder below it.

    Raises StorageError and ShardError.
    """

    def __init__(self, local: str | Path, split: str | None = None):
        self.local, self.split = str(local_path("local", local)), split or ""
        self.core = PackedDataset([StreamConfig(remote=self.local, split=split or None)])
        self.num_samples = self.core.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("shards", "spanner")}

    @property
    def size(self) -> int:
        return self.num_samples

    def __len__(self) -> int:
        return self.num_samples

    def get_item(self, sample_id: int) -> Sample:
        """Sample `sample_id`, 0 <= sample_id < size."""
        return self.core.reader[sample_id]

    @cached_property
    def shards(self) -> list[Any]:
        return readers(self.core.stored, self.core.reader)

    @cached_property
    def spanner(self) -> Spanner:
        return Spanner(self.core.samples_per_shard)
