"""The shards of a dataset in order: entries by number, and arrays of figures. index entries -> arrays."""

from __future__ import annotations

import bisect
import hashlib
import re
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..storage.cache import LocalCache
from ..types import Columns
from .index import DATASET_NAME, ShardInfo


class ShardList(Sequence[ShardInfo]):
    """The entries of a dataset's shards. Entries of a long list are read on demand."""

    @property
    @abstractmethod
    def samples(self) -> NDArray[np.int64]:
        """Samples of each shard, int64[num_shards]."""

    @property
    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each shard's file, decompressed, int64[num_shards]."""

    @property
    @abstractmethod
    def zip_sizes(self) -> NDArray[np.int64]:
        """Bytes of each shard's compressed file, int64[num_shards]; 0 without a compressed file."""

    @property
    @abstractmethod
    def index_bytes(self) -> int:
        """Bytes of the index with these shards, at least approximately."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Identity of the samples of these shards; see Identity."""

    @property
    @abstractmethod
    def columns(self) -> set[Columns]:
        """The different columns of shards: a single element if all shards agree."""

    @property
    @abstractmethod
    def folders(self) -> set[str]:
        """Folders of the shards' files, relative to the dataset's folder; "." is the dataset's folder."""

    @abstractmethod
    def first(self, num_shards: int) -> ShardList:
        """Return only the first shards."""


class Identity:
    """Identity of samples, 16 hex digits, computed from the shards' numbers of samples, sizes and checksums."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, num_samples: int, size: int, checksum: str | None) -> None:
        """Add the next shard."""
        self._digest.update(f"{num_samples} {size} {checksum}\n".encode())

    def name(self) -> str:
        return self._digest.hexdigest()


def identity_of(infos: Iterable[ShardInfo]) -> str:
    """Return the identity of these shards' samples."""
    identity = Identity()
    for info in infos:
        identity.add(info.num_samples, info.size, info.checksum)
    return identity.name()


class ListedShards(ShardList):
    """Shards with all entries in memory."""

    def __init__(self, infos: Iterable[ShardInfo]):
        self._infos = list(infos)

    def __len__(self) -> int:
        return len(self._infos)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ShardInfo]: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | Sequence[ShardInfo]:
        return self._infos[index]

    @property
    def samples(self) -> NDArray[np.int64]:
        return np.array([info.num_samples for info in self._infos], np.int64)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([info.size for info in self._infos], np.int64)

    @property
    def zip_sizes(self) -> NDArray[np.int64]:
        return np.array([info.zip_size or 0 for info in self._infos], np.int64)

    @property
    def index_bytes(self) -> int:
        return sum(len(str(dict(info.entry))) for info in self._infos)

    @property
    def identity(self) -> str:
        return identity_of(self._infos)

    @property
    def columns(self) -> set[Columns]:
        return {info.columns for info in self._infos}

    @property
    def folders(self) -> set[str]:
        return {str(PurePosixPath(info.name).parent) for info in self._infos}

    def first(self, num_shards: int) -> ListedShards:
        return ListedShards(self._infos[:num_shards])


class SourcedShards(Sequence[tuple[LocalCache, ShardInfo]]):
    """The concatenated shards of several streams: cache and index entry of each shard."""

    def __init__(self, streams: Sequence[tuple[LocalCache, ShardList]]):
        self._streams = list(streams)
        ends = np.cumsum([len(shards) for _, shards in streams], dtype=np.int64)
        self._ends = array("q", ends.tobytes())

    @property
    def samples(self) -> NDArray[np.int64]:
        """Samples of each shard, int64[num_shards]."""
        return np.concatenate([np.empty(0, np.int64), *(shards.samples for _, shards in self._streams)])

    def __len__(self) -> int:
        return self._ends[-1] if self._streams else 0

    @overload
    def __getitem__(self, index: int) -> tuple[LocalCache, ShardInfo]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[LocalCache, ShardInfo]]: ...
    def __getitem__(self, index: int | slice) -> tuple[LocalCache, ShardInfo] | Sequence[tuple[LocalCache, ShardInfo]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"shard {index} of {len(self)}")
        stream = bisect.bisect_right(self._ends, index)
        cache, shards = self._streams[stream]
        return cache, shards[index - (self._ends[stream] - len(shards))]


# Read a grown dataset in an earlier state, before some appended parts.


def first_parts(shards: ShardList, parts: Sequence[Mapping[str, Any]], num_parts: int | None, *, url: str) -> ShardList:
    """Return the shards of a dataset up to the first num_parts appended parts; all shards for None.

    parts: all appended parts. Raises ConfigError for more parts than the dataset has.
    """
    if num_parts is None:
        return shards
    if not 0 <= num_parts <= len(parts):
        raise ConfigError(
            f"num_parts is {num_parts}, and {url} has {len(parts)} ({DATASET_NAME} lists them): choose from 0 to "
            f"{len(parts)}, or leave it out"
        )
    later = sum(int(part["num_samples"]) for part in parts[num_parts:])
    ends = np.cumsum(shards.samples)
    return shards.first(int(np.searchsorted(ends, int(ends[-1]) - later, side="right")))


# Numbers of shards by file name. shard list -> [numbers] -> shards of names.

UNKNOWN = -1
_NUMBER = re.compile(r"\d+")


class ShardNumbers:
    """Number of the shard of a file: data or metadata, plain or compressed.

    Most names contain the number (shard.00012.mds), and few entries are read. Otherwise the names of all shards are
    hashed, in 16 bytes per name. The last results are kept.
    """

    def __init__(self, shards: ShardList):
        self._shards = shards
        self._known: dict[str, int] = {}
        self._hashes: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the shard number of each file, UNKNOWN for other files: int64[len(names)]."""
        known = self._known
        numbers = [known[name] if name in known else self._find(name) for name in names]
        found = dict(zip(names, numbers, strict=True))
        if len(found) > 1:
            self._known = found  # only the last result: bounded memory
        else:
            known.update(found)
        return np.array(numbers, np.int64)

    def __contains__(self, name: object) -> bool:
        """Whether a file belongs to a shard."""
        return isinstance(name, str) and self._find(name) != UNKNOWN

    def _find(self, name: str) -> int:
        told = [int(digits) for digits in _NUMBER.findall(name.rpartition("/")[2])[:2]]
        for number in told:
            if number < len(self._shards) and name in _names(self._shards[number]):
                return number
        hashes, numbers = self._hashed()
        at = int(np.searchsorted(hashes, hash(name)))
        while at < len(hashes) and hashes[at] == hash(name):
            if name in _names(self._shards[int(numbers[at])]):
                return int(numbers[at])
            at += 1
        return UNKNOWN

    def _hashed(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hashes of all names, ascending, and the shard of each name."""
        if self._hashes is None:
            pairs = [(hash(name), number) for number, info in enumerate(self._shards) for name in _names(info)]
            found = np.array(pairs, np.int64).reshape(-1, 2)
            found = found[np.argsort(found[:, 0], kind="stable")]
            self._hashes = found[:, 0].copy(), found[:, 1].copy()
        return self._hashes


def _names(info: ShardInfo) -> list[str]:
    files = [info, *([] if info.meta is None else [info.meta])]
    return [name for each in files for name in (each.name, each.zip_name) if name is not None]
