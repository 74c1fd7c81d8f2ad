"""Samples by number, from shards fetched on demand. shards + cache -> [reader] -> samples."""

from __future__ import annotations

import bisect
import errno
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import StorageError
from ..plan.order import shards_of
from ..storage.cache import LocalCache
from ..storage.fetch_config import FetchConfig
from ..storage.prefetch import Prefetcher
from ..types import Sample
from .index import ShardInfo
from .shard import AnyShard, open_shard, shard_at_hand, try_fetch_shard
from .shard_list import SourcedShards

MAX_OPEN_SHARDS = 4096  # memory-mapped at a time by a reader
MAX_MAPPINGS = 32_768  # of all readers of a process: Linux allows a process 65,530
CHUNK = 1 << 16  # samples located together
_TOUCH_S = 0.1  # seconds until the use of a shard is noted again, under a cache_limit

Located = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # sample ids, shards, indices in the shards


class OpenShards(dict[int, AnyShard]):
    """Open shards by number. addresses: memory address of each shard, 0 if not open: int64[num_shards]."""

    def __init__(self, num_shards: int):
        super().__init__()
        self.addresses = np.zeros(num_shards, np.int64)

    def close(self, shard_id: int) -> None:
        self.pop(shard_id, None)
        self.addresses[shard_id] = 0


class ShardReader:
    """Samples of concatenated shards: `reader[i]`, in bulk `samples(ids)`.

    shards: source and index entry of each shard. columns: columns to decode (default: all). Raises StorageError and
    ShardError.
    """

    def __init__(
        self,
        shards: SourcedShards,
        *,
        config: FetchConfig,
        columns: Sequence[str] | None = None,
    ):
        self.shards = shards
        self._config = config
        self._columns = columns
        self.samples_per_shard = shards.samples
        self.num_samples = int(self.samples_per_shard.sum())
        self._first_ids = np.cumsum(self.samples_per_shard) - self.samples_per_shard
        self._first_ids_array = array("q", self._first_ids.tobytes())  # faster to search by bisect
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around waits for a download
        self._forget()
        _READERS[id(self)] = self

    def _forget(self) -> None:
        """Reset everything that belongs to a single process."""
        self._pid = os.getpid()
        self._last_use = next(_USES)
        self._close()
        self._fetched = np.zeros(len(self.shards), bool)  # shards that have arrived and are not open yet
        self._noted, self._noted_at = -1, 0.0
        self._prefetcher: Prefetcher | None = None
        self._max_open, self._least_open = MAX_OPEN_SHARDS, 0

    def _close(self) -> None:
        """Close all shards. Shards in use elsewhere, for example in another thread, stay mapped during this use."""
        self._open = OpenShards(len(self.shards))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("shards", "_config", "_columns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["shards"], config=state["_config"], columns=state["_columns"])  # type: ignore[misc]

    def _own(self) -> None:
        """Reset a forked child: threads, locks and open files do not survive a fork."""
        if self._pid != os.getpid():
            self._forget()

    def __getitem__(self, sample_id: int) -> Sample:
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id} of a dataset of {self.num_samples}")
        shard_id = bisect.bisect_right(self._first_ids_array, sample_id) - 1
        return self.shard(shard_id)[sample_id - self._first_ids_array[shard_id]]

    def locate(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each sample, and the index in the shard: int64, of the same shape."""
        shard_ids = shards_of(sample_ids, self._first_ids)
        return shard_ids, sample_ids - self._first_ids[shard_ids]

    def samples(self, sample_ids: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield the samples with these ids, in this order; their shards are fetched ahead."""
        return self.read_all(sample_ids[start : start + CHUNK] for start in range(0, len(sample_ids), CHUNK))

    def read_all(self, chunks: Iterable[NDArray[np.int64]]) -> Iterator[Sample]:
        """Yield the samples of each array of ids in turn; the shards of the next array are fetched at the same time."""
        self._own()
        is_limited = self._config.cache_limit is not None
        for _, shard_ids, indices in self.ahead(chunks):
            for shard_id, index in zip(shard_ids.tolist(), indices.tolist(), strict=True):
                shard = None if is_limited else self._open.get(shard_id)
                yield (self.shard(shard_id) if shard is None else shard)[index]

    def ahead(self, chunks: Iterable[NDArray[np.int64]]) -> Iterator[Located]:
        """Yield each array of ids with its shards and indices, after requesting the shards of the next array."""
        self._own()
        following = iter(chunks)
        located: deque[Located] = deque()
        while True:
            while len(located) < 2 and (sample_ids := next(following, None)) is not None:
                located.append((sample_ids, *self.locate(sample_ids)))
                self.prefetch(located[-1][1])
            if not located:
                return
            self._last_use = next(_USES)
            yield located.popleft()

    def prefetch(self, shard_ids: NDArray[np.int64], *, later: bool = False) -> None:
        """Begin to fetch shards that are not open, in the background, in this order.

        later: only after all other requested shards have arrived.
        """
        self._own()
        needed = (self._open.addresses[shard_ids] == 0) & ~self._fetched[shard_ids]
        if needed.any():
            self._fetching().request(dict.fromkeys(shard_ids[needed].tolist()), later=later)

    def pass_over(self, shard_ids: NDArray[np.int64] | None = None) -> None:
        """Forget requests of these shards, or of all shards, because they are not needed any more."""
        if self._prefetcher is not None and self._pid == os.getpid():
            self._prefetcher.forget(None if shard_ids is None else shard_ids.tolist())

    def wait_for(self, shard_ids: NDArray[np.int64]) -> None:
        """Wait until these shards are on this node and checked, without opening them."""
        self._own()
        limited = self._config.cache_limit is not None  # under a limit, a shard may be deleted again
        needed = [shard_id for shard_id in dict.fromkeys(shard_ids.tolist()) if not self._fetched[shard_id]]
        with self._held():
            missing = [each for each in needed if self._path_at_hand(each, *self.shards[each]) is None]
        for shard_id in missing:
            self._take(shard_id)
        if not limited:
            self._fetched[needed] = True

    def addresses(self, shard_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], OpenShards]:
        """Fetch shards; return the addresses in memory (see Shard), int64, and the open shards.

        The addresses are valid until the next call, as long as the caller refers to the open shards.
        """
        self._own()
        self._last_use = next(_USES)
        opened = self._open
        addresses = opened.addresses[shard_ids]
        if self._config.cache_limit is not None or not addresses.all():
            needed = dict.fromkeys(shard_ids.tolist())
            self._least_open = max(self._least_open, 2 * len(needed))
            self._open_at_hand(shard_id for shard_id in needed if shard_id not in self._open)
            while not addresses.all():
                for shard_id in needed:
                    self.shard(shard_id)
                opened = self._open
                addresses = opened.addresses[shard_ids]
        return addresses, opened

    def _open_at_hand(self, shard_ids: Iterable[int]) -> None:
        """Open the shards that are already on this node."""
        with self._held():
            for shard_id in shard_ids:
                cache, info = self.shards[shard_id]
                path = self._path_at_hand(shard_id, cache, info)
                if path is not None:
                    self._open_shard(shard_id, info, path)

    def shard(self, shard_id: int) -> AnyShard:
        """Return an open shard, after fetching a shard missing on this node."""
        self._own()
        shard = self._open.get(shard_id)
        if shard is None:
            shard = self._open_shard(shard_id, self.shards[shard_id][1])
        if self._config.cache_limit is not None:  # for eviction of the least recently used
            now = time.monotonic()
            if shard_id != self._noted or now - self._noted_at >= _TOUCH_S:
                self._noted, self._noted_at = shard_id, now
                self.shards[shard_id][0].touch(shard.path)
        return shard

    def _open_shard(self, shard_id: int, info: ShardInfo, path: Path | None = None) -> AnyShard:
        """Open a shard, and fetch it if needed. path: of the shard's file, if known."""
        cache, _ = self.shards[shard_id]
        deadline = time.monotonic() + cache.retry.timeout_s
        while True:
            path = path or self._path_at_hand(shard_id, cache, info) or self._take(shard_id)
            try:
                shard = open_shard(path, info, columns=self._columns)
                break
            except FileNotFoundError as error:  # deleted after fetching, in favour of another shard
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{path} was deleted again and again before it could be read: raise cache_limit"
                    ) from error
                path = None
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise StorageError(
                    f"{path} cannot be mapped into memory: the process has too many mappings, or too little address "
                    "space is left: raise vm.max_map_count, or ulimit -v, or convert the dataset to larger shards"
                ) from error
        self._let_go()
        opened = self._open
        opened[shard_id] = shard
        opened.addresses[shard_id] = shard.address
        return shard

    def _path_at_hand(self, shard_id: int, cache: LocalCache, info: ShardInfo) -> Path | None:
        """Return the file of a shard on this node, else None; a check is faster than an exchange between threads."""
        if self._prefetcher is not None and self._prefetcher.is_begun(shard_id):
            return self._prefetcher.take(shard_id) if self._prefetcher.has(shard_id) else None
        path = shard_at_hand(cache, info)
        if path is None or self._prefetcher is None:
            return path
        if not self._prefetcher.leave(shard_id):
            return self._prefetcher.take(shard_id)
        if path.is_relative_to(cache.folder):
            cache.tally.add(hits=1)
        return path

    def _held(self) -> AbstractContextManager[None]:
        """Return a context for checking many present shards; see Prefetcher.held."""
        return nullcontext() if self._prefetcher is None else self._prefetcher.held()

    def _let_go(self) -> None:
        """Close surplus shards, and under a limit shards with deleted files, to free their space."""
        gone = []
        if self._config.cache_limit is not None:
            opened = list(self._open.items())  # another thread may open a shard meanwhile
            gone = [shard_id for shard_id, shard in opened if not shard.path.exists()]
        most = max(self._least_open, min(self._max_open, MAX_MAPPINGS))
        gone += islice(self._open, max(0, len(self._open) + 1 - most))
        for shard_id in gone:
            self._open.close(shard_id)
        self._last_use = next(_USES)
        _close_idle(self)

    def _take(self, shard_id: int) -> Path:
        with self.waiting():
            return self._fetching().take(shard_id, timeout_s=self.shards[shard_id][0].retry.timeout_s)

    def _fetching(self) -> Prefetcher:
        if self._prefetcher is None:  # its threads refer to the sources, and this reader can be freed
            fetch, name = partial(_fetch, self.shards), partial(_name, self.shards)
            self._prefetcher = Prefetcher(fetch, name=name, config=self._config)
        return self._prefetcher


_READERS: WeakValueDictionary[int, ShardReader] = WeakValueDictionary()  # of this process, by their ids
_USES = count()  # a later use has a larger number
_num_open = 0  # upper bound of open shards of all readers: closed shards count until the next count


def _close_idle(reader: ShardReader) -> None:
    """Close the least recently used readers, to allow another shard within MAX_MAPPINGS."""
    global _num_open
    _num_open += 1
    if _num_open <= MAX_MAPPINGS:
        return
    alive = [each for ref in _READERS.valuerefs() if (each := ref()) is not None]
    _num_open = 1 + sum(len(each._open) for each in alive)
    if _num_open <= MAX_MAPPINGS:
        return
    for each in sorted(alive, key=lambda each: each._last_use):
        if each is not reader and _num_open > MAX_MAPPINGS - MAX_MAPPINGS // 8:  # several, because counting takes time
            _num_open -= len(each._open)
            each._close()


def _fetch(shards: SourcedShards, shard_id: int) -> Path | None:
    return try_fetch_shard(*shards[shard_id])


def _name(shards: SourcedShards, shard_id: int) -> str:
    cache, info = shards[shard_id]
    return f"{cache.storage.url}/{info.zip_name or info.name}"
