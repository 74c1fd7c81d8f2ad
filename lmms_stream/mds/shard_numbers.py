"""The numbers of shards by the names of their files. shard list -> [numbers] -> shards of names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .index import ShardInfo
from .shard_list import ShardList

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
