"""Shards of a StreamingDataset by number, for MosaicML's interface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..checks import local_path
from ..types import Sample
from .core import PackedDataset
from .index import ShardInfo
from .mosaic_streams import Numbered, package
from .reader import ShardReader
from .streams import StoredDataset, StreamConfig


class Spanner:
    """Maps a sample to its shard, and a number in the shard. shard_sizes: int64[num_shards], samples of each shard."""

    def __init__(self, shard_sizes: NDArray[np.int64]):
        self.shard_sizes = shard_sizes
        self._stops = np.cumsum(shard_sizes)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._stops[-1]:
            raise IndexError(f"sample {index} does not exist: there are {self._stops[-1]} samples")
        shard = int(np.searchsorted(self._stops, index, side="right"))
        return shard, int(index - self._stops[shard] + self.shard_sizes[shard])


class NumberedShard(Numbered):
    """Samples of a shard, which is fetched on demand. info: the shard's entry of the index."""

    def __init__(self, reader: ShardReader, number: int, info: ShardInfo):
        self.info = info
        self._reader, self._number = reader, number

    @property
    def size(self) -> int:
        return self.info.num_samples

    @property
    def samples(self) -> int:
        return self.info.num_samples

    @property
    def compression(self) -> str | None:
        return self.info.compression

    def __len__(self) -> int:
        return self.info.num_samples

    def get_item(self, number: int) -> Any:
        if not 0 <= number < self.size:
            raise IndexError(f"sample {number} is not one of the {self.size} of {self.info.name}")
        return self._reader.shard(self._number)[number]


def readers(streams: Sequence[StoredDataset], reader: ShardReader) -> list[Any]:
    """Return a reader of each shard: MosaicML's, in the streams' folders, if the package is imported; else ours."""
    if package() is None:
        return [NumberedShard(reader, number, info) for number, (_, info) in enumerate(reader.shards)]
    from streaming.base.format import reader_from_json

    return [
        reader_from_json(str(stored.folder_of_files), None, dict(info.entry))
        for stored in streams
        for info in stored.shards
    ]


class StoredSamples(Numbered):
    """Samples and shards by number, for classes that set `core` and `num_samples`."""

    if TYPE_CHECKING:
        core: PackedDataset
        num_samples: int

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("shards", "spanner")}

    @property
    def size(self) -> int:
        """Number of samples of all streams."""
        return self.num_samples

    def get_item(self, sample_id: int, retry: int = 7) -> Sample:
        """Return sample `sample_id` (0 <= sample_id < size), after fetching a shard missing on this node."""
        return self.core.reader[sample_id]

    @cached_property
    def shards(self) -> list[Any]:
        """Readers of the shards, after prepare_shard; MosaicML's readers if the package is imported."""
        return readers(self.core.stored, self.core.reader)

    @cached_property
    def spanner(self) -> Spanner:
        return Spanner(self.core.samples_per_shard)


# MosaicML Streaming's LocalDataset: samples of a folder by number, for any DataLoader and sampler.


class LocalDataset(StoredSamples, Dataset[Any]):
    """Samples of the dataset in a folder, by number. split: a sub-folder.

    Raises StorageError and ShardError.
    """

    def __init__(self, local: str | Path, split: str | None = None):
        self.local, self.split = str(local_path("local", local)), split or ""
        self.core = PackedDataset([StreamConfig(remote=self.local, split=split or None)])
        self.num_samples = self.core.num_samples

    def __len__(self) -> int:
        return self.num_samples
