"""The small files that say what a stored dataset is: index.json, and dataset.json where a conversion wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ObjectMissingError
from ..storage.storage import Storage
from .index import DATASET_NAME, INDEX_NAME, ShardInfo, parse_index


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """index, dataset: the files as they lie there; dataset is None for one that another program wrote."""

    storage: Storage
    index: bytes
    dataset: bytes | None

    def shards(self) -> tuple[ShardInfo, ...]:
        """ShardError for an index that is not safe to follow."""
        return tuple(parse_index(self.index, source=f"{self.storage.url}/{INDEX_NAME}", dataset=self.dataset))


def read_listing(storage: Storage) -> Listing | None:
    """What the dataset in a store says of itself; None where there is no index.json."""
    index = read_if_there(storage, INDEX_NAME)
    if index is None:
        return None
    return Listing(storage=storage, index=index, dataset=read_if_there(storage, DATASET_NAME))


def read_if_there(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name)
    except ObjectMissingError:
        return None
