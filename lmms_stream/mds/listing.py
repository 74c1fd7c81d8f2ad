"""The small files that say what a stored dataset is: index.json, and dataset.json where a conversion wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ObjectMissingError
from ..storage.local import LocalStorage
from ..storage.storage import Storage
from .index import DATASET_NAME, INDEX_NAME, ShardInfo, parse_index

_MAX_NAMED = 3  # folders in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """index, dataset: the files as they lie there; dataset is None for one that another program wrote."""

    storage: Storage
    index: bytes
    dataset: bytes | None

    def shards(self, *, refused: dict[str, str] | None = None) -> tuple[ShardInfo, ...]:
        """ShardError for an index that is not safe to follow. refused: see parse_index."""
        source = f"{self.storage.url}/{INDEX_NAME}"
        return tuple(parse_index(self.index, source=source, dataset=self.dataset, refused=refused))


def read_listing(storage: Storage) -> Listing | None:
    """What the dataset in a store says of itself; None where there is no index.json."""
    index = read_if_there(storage, INDEX_NAME)
    if index is None:
        return None
    return Listing(storage=storage, index=index, dataset=read_if_there(storage, DATASET_NAME))


def no_dataset(storage: Storage) -> ObjectMissingError:
    """The error of a store without an index.json; of a local folder it names the datasets in the folders below."""
    missing = f"{storage.url} holds no dataset ({INDEX_NAME} is missing)"
    local = storage.folder.glob(f"*/{INDEX_NAME}") if isinstance(storage, LocalStorage) else ()
    below = sorted(path.parent.name for path in local)
    if not below:
        return ObjectMissingError(f"{missing}: check the path or URL, or write it with lmms-stream convert")
    named = ", ".join(below[:_MAX_NAMED]) + (", …" if len(below) > _MAX_NAMED else "")
    return ObjectMissingError(
        f"{missing}, but folders in it do ({named}): name one of these, or make one dataset of all with lmms-stream "
        "merge"
    )


def read_if_there(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name)
    except ObjectMissingError:
        return None
