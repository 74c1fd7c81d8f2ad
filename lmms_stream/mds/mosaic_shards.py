"""The shards of a StreamingDataset by number, as MosaicML's class gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .index import ShardInfo
from .mosaic_bases import Numbered, package
from .reader import ShardReader
from .streams import StoredDataset


class Spanner:
    """The shard of a sample, and the number of the sample in it. shard_sizes: int64[num_shards], samples of each."""

    def __init__(self, shard_sizes: NDArray[np.int64]):
        self.shard_sizes = shard_sizes
        self._stops = np.cumsum(shard_sizes)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._stops[-1]:
            raise IndexError(f"sample {index} is not one of the {self._stops[-1]} that there are")
        shard = int(np.searchsorted(self._stops, index, side="right"))
        return shard, int(index - self._stops[shard] + self.shard_sizes[shard])


class NumberedShard(Numbered):
    """The samples of a shard, which is fetched first when it is not on this node. info: its entry of the index."""

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
    """A reader of each shard: MosaicML's, of what lies in the folders of the streams, where its package is imported."""
    if package() is None:
        return [NumberedShard(reader, number, info) for number, (_, info) in enumerate(reader.shards)]
    from streaming.base.format import reader_from_json

    return [
        reader_from_json(str(stored.folder_of_files), None, dict(info.entry))
        for stored in streams
        for info in stored.shards
    ]
