"""The shards of a dataset in their order: entries by number, their figures as arrays. index entries -> arrays."""

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
    """The entries of a dataset's shards. Where there are many, each is read when it is asked for."""

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
        """Bytes of each shard's compressed file, int64[num_shards]; 0 where it has none."""

    @property
    @abstractmethod
    def index_bytes(self) -> int:
        """Bytes of the index that lists them, or about as many."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What the samples of these shards are known by; see Identity."""

    @property
    @abstractmethod
    def columns(self) -> set[Columns]:
        """The columns that shards have: one where they agree."""

    @property
    @abstractmethod
    def folders(self) -> set[str]:
        """The folders that the shards' names lead into, from the dataset's; "." is its own."""

    @abstractmethod
    def first(self, num_shards: int) -> ShardList:
        """The first shards of these."""


class Identity:
    """What samples are known by, 16 hex digits: it follows from the shards' numbers of samples, sizes and checksums."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, num_samples: int, size: int, checksum: str | None) -> None:
        """The next shard."""
        self._digest.update(f"{num_samples} {size} {checksum}\n".encode())

    def name(self) -> str:
        return self._digest.hexdigest()


def identity_of(infos: Iterable[ShardInfo]) -> str:
    """The name of these shards' samples."""
    identity = Identity()
    for info in infos:
        identity.add(info.num_samples, info.size, info.checksum)
    return identity.name()


class ListedShards(ShardList):
    """Shards whose entries are all in memory."""

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
    """The shards of several streams, laid end to end: where each comes from, and its index entry."""

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


# Read a dataset that has grown by parts in its state before some parts.


def first_parts(shards: ShardList, parts: Sequence[Mapping[str, Any]], num_parts: int | None, *, url: str) -> ShardList:
    """The shards that the dataset at a URL had when it had taken in so many parts; all of them for None.

    parts: those that it has taken in by now. Raises ConfigError where it never had so many.
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


# The numbers of shards by the names of their files. shard list -> [numbers] -> shards of names.

UNKNOWN = -1
_NUMBER = re.compile(r"\d+")


class ShardNumbers:
    """The number of the shard that a file is of: its data, its metadata, or either compressed.

    A name mostly says its number (shard.00012.mds), so that few entries are read. Where one does not, the names of all
    shards are hashed, in 16 bytes each. What was asked for last is kept.
    """

    def __init__(self, shards: ShardList):
        self._shards = shards
        self._known: dict[str, int] = {}
        self._hashes: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """The shard of each file, UNKNOWN where it is of none: int64[len(names)]."""
        known = self._known
        numbers = [known[name] if name in known else self._find(name) for name in names]
        found = dict(zip(names, numbers, strict=True))
        if len(found) > 1:
            self._known = found  # so that memory does not grow with all shards that come and go
        else:
            known.update(found)
        return np.array(numbers, np.int64)

    def __contains__(self, name: object) -> bool:
        """Whether a file is of a shard."""
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
        """Hashes of all names, ascending, and the shard of each."""
        if self._hashes is None:
            pairs = [(hash(name), number) for number, info in enumerate(self._shards) for name in _names(info)]
            found = np.array(pairs, np.int64).reshape(-1, 2)
            found = found[np.argsort(found[:, 0], kind="stable")]
            self._hashes = found[:, 0].copy(), found[:, 1].copy()
        return self._hashes


def _names(info: ShardInfo) -> list[str]:
    files = [info, *([] if info.meta is None else [info.meta])]
    return [name for each in files for name in (each.name, each.zip_name) if name is not None]
