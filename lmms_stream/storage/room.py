"""Room for downloads under a limit: the files needed last give way, none that is not ours.

Which those are says the outlook of a process that follows a plan (see outlook.py); without one, the files used least
recently give way.

All processes of a node that share a cache folder share its limit, and the ledger of what is there (see ledger.py).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, StorageError
from .ledger import LEDGER_NAME, Entry, Ledger, find_download
from .locks import file_of, locked
from .outlook import NEEDED_NOW, Outlook
from .record import Record, touch

_POLL_S = 0.05


class CacheRoom:
    """The room that one or more cache folders share, for files of at most `limit_bytes` in all.

    outlook: what this process knows of when they are needed next; another process learns it for itself.
    """

    def __init__(self, folders: Sequence[Path], limit_bytes: int):
        self.folders = sorted(set(folders))
        self.limit_bytes = limit_bytes
        self.outlook: Outlook | None = None
        self._ledgers = [Ledger(folder) for folder in self.folders]
        self._numbers = {folder: number for number, folder in enumerate(self.folders)}

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheRoom, (self.folders, self.limit_bytes)

    def reserve(self, record_path: Path, num_bytes: int, *, timeout_s: float) -> None:
        """Take room for a download whose record the caller holds locked; files needed last are deleted.

        Raises ConfigError for more than the limit, StorageError when downloads of others hold the room too long.
        """
        if num_bytes > self.limit_bytes:
            raise ConfigError(
                f"cache_limit is {self.limit_bytes} bytes and {file_of(record_path).name} takes {num_bytes}: raise it"
            )
        deadline = time.monotonic() + timeout_s
        while True:
            with self._locked() as first:
                if self._make_room(first, record_path, num_bytes) and self._took(first, record_path, num_bytes):
                    return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{record_path.parent}: downloads under way hold all of cache_limit ({self.limit_bytes} bytes) "
                    f"for {timeout_s:g} s: raise it"
                )
            time.sleep(_POLL_S)

    def settle(self, record_path: Path, num_bytes: int) -> None:
        """Note that a download for which room was reserved has ended, and what it takes; 0 when it failed.

        The caller holds its record locked.
        """
        ledger = self._ledger_of(record_path)
        with self._locked() as first, self._opened(ledger, first, wanted=record_path) as file:
            if num_bytes:
                ledger.note(file, Entry(record_path.stat().st_mtime_ns, record_path.name, num_bytes))
            else:
                ledger.strike_out(file, record_path.name)

    def _ledger_of(self, record_path: Path) -> Ledger:
        return self._ledgers[self._numbers[record_path.parent]]

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """Lock the ledger file of the first folder. Who has it is the only one that changes what this room knows.

        Another ledger is locked after it, one at a time, so that nobody waits for a process that waits for this one.
        """
        folder = self.folders[0]
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LEDGER_NAME, timeout_s=math.inf) as file:
            assert file is not None
            yield file

    @contextmanager
    def _opened(self, ledger: Ledger, first: IO[bytes], *, wanted: Path) -> Iterator[IO[bytes]]:
        """Lock the file of a ledger, and know what it says. first: see _locked. wanted: the caller's record."""
        with ExitStack() as stack:
            file: IO[bytes] | None = first
            if ledger is not self._ledgers[0]:
                ledger.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(locked(ledger.folder / LEDGER_NAME, timeout_s=math.inf))
            assert file is not None
            ledger.catch_up(file, wanted=_name_in(ledger, wanted))
            yield file
            ledger.remember(file)

    def _make_room(self, first: IO[bytes], wanted: Path, num_bytes: int) -> bool:
        """Delete files until `num_bytes` more fit; False when what is left is being downloaded."""
        for ledger in self._ledgers:
            if not ledger.is_current():  # to lock and read all files takes a hundred times as long as a look at them
                with self._opened(ledger, first, wanted=wanted):
                    pass
        if self._evict(first, wanted, num_bytes):
            return True
        for ledger in self._ledgers:  # a download that died may hold what is left
            with self._opened(ledger, first, wanted=wanted) as file:
                ledger.look(file, wanted=_name_in(ledger, wanted))
        return self._evict(first, wanted, num_bytes)

    def _evict(self, first: IO[bytes], wanted: Path, num_bytes: int) -> bool:
        """Delete what is needed last until `num_bytes` more fit; False when that is not enough."""
        left_alone: list[tuple[Ledger, Entry]] = []  # what is being downloaded, or looked at
        total, most = self._total(), self._most_beside(wanted, num_bytes)
        queue = self._first_of_each() if total > most else []
        while total > most and queue:
            *_, number = heapq.heappop(queue)
            ledger = self._ledgers[number]
            total -= ledger.num_bytes
            with self._opened(ledger, first, wanted=wanted) as file:
                ledger.order_by(self.outlook)
                key = _first_of(ledger)
                if key is not None and (not queue or (*key, number) <= queue[0]):  # nobody changed it meanwhile
                    left_alone += self._let_go(ledger, file, wanted)
            total += ledger.num_bytes
            if (key := _first_of(ledger)) is not None:
                heapq.heappush(queue, (*key, number))
        for ledger, entry in left_alone:
            ledger.put_back(entry)
        return total <= most

    def _first_of_each(self) -> list[tuple[float, Entry, int]]:
        """A heap of the file that goes first of each folder, with the folder's number."""
        queue = []
        for number, ledger in enumerate(self._ledgers):
            ledger.order_by(self.outlook)
            if (key := _first_of(ledger)) is not None:
                queue.append((*key, number))
        heapq.heapify(queue)
        return queue

    def _let_go(self, ledger: Ledger, file: IO[bytes], wanted: Path) -> list[tuple[Ledger, Entry]]:
        """Delete the file of a ledger that goes first, unless it has to stay. Return an entry that was left alone."""
        outlook, first = self.outlook, ledger.first_to_go()
        assert first is not None
        next_use, entry = first
        ledger.take()
        record_path = ledger.folder / entry.name
        found = None if record_path == wanted else find_download(record_path)
        if record_path == wanted or (found is not None and found.is_reserved):
            return [(ledger, entry)]
        if found is not None and _is_in_use(found, next_use, outlook):
            ledger.put_back(found, is_in_use=True)
        elif found is not None and found.last_use > entry.last_use:
            ledger.put_back(found)  # it was used since
        elif found is None or _delete(record_path):
            ledger.strike_out(file, entry.name)
        else:
            return [(ledger, entry)]
        return []

    def _total(self) -> int:
        return sum(ledger.num_bytes for ledger in self._ledgers)

    def _most_beside(self, wanted: Path, num_bytes: int) -> int:
        """Bytes that may be counted before a file of `num_bytes` is."""
        return self.limit_bytes - num_bytes + self._ledger_of(wanted).bytes_of(wanted.name)

    def _took(self, first: IO[bytes], record_path: Path, num_bytes: int) -> bool:
        """Reserve room; False if a room with another first folder has filled the folder since it was made."""
        ledger = self._ledger_of(record_path)
        with self._opened(ledger, first, wanted=record_path) as file:
            if self._total() > self._most_beside(record_path, num_bytes):
                return False
            now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            ledger.note(file, Entry(now, record_path.name, num_bytes, is_reserved=True))
            with record_path.open("r+b") as record_file:
                Record.reserved(num_bytes).write(record_file)
            touch(record_path)
        return True


def _name_in(ledger: Ledger, record_path: Path) -> str:
    """The name of a record in the folder of a ledger; "" in another folder, which may have a file of the same name."""
    return record_path.name if record_path.parent == ledger.folder else ""


def _first_of(ledger: Ledger) -> tuple[float, Entry] | None:
    """The file of a ledger that goes first, behind what sorts it among the files of all folders."""
    first = ledger.first_to_go()
    return None if first is None else (-first[0], first[1])


def _is_in_use(found: Entry, next_use: float, outlook: Outlook | None) -> bool:
    """Whether somebody uses a file that is foretold to be needed later only."""
    return outlook is not None and next_use > NEEDED_NOW and found.last_use > outlook.since_ns


def _delete(record_path: Path) -> bool:
    """Delete a file of ours and its record, unless somebody is at it."""
    with locked(record_path, timeout_s=0) as lock:
        if lock is None:
            return False
        path = file_of(record_path)
        if Record.read(record_path).owns(path):
            path.unlink(missing_ok=True)
        record_path.unlink(missing_ok=True)
    return True


def least_room(sizes: NDArray[np.int64], samples: NDArray[np.int64], *, num_spans: int, span: int) -> int:
    """Bytes that let `num_spans` readers go through the shards in spans of `span` samples, each shard fetched once.

    sizes, samples: bytes and number of samples of each shard, int64[num_shards]. For any order of the shards: a span
    covers shards whole, at most those with the most bytes a sample, and one in part at either edge.
    """
    densest = np.argsort(-sizes / np.maximum(samples, 1), kind="stable")
    ends = np.cumsum(samples[densest])
    num_whole = int(np.searchsorted(ends, span, side="right"))
    covered = int(sizes[densest[:num_whole]].sum())
    if num_whole < len(sizes):
        left = span - int(ends[num_whole - 1] if num_whole else 0)
        covered += -(-int(sizes[densest[num_whole]]) * left // int(samples[densest[num_whole]]))
    return min(num_spans * (covered + 2 * int(sizes.max())), int(sizes.sum()))


def least_cache_limit(
    sizes: NDArray[np.int64],
    samples: NDArray[np.int64],
    *,
    zip_bytes: int,
    block: int,
    num_canonical_nodes: int,
    num_served: int,
    samples_ahead: int,
) -> int:
    """The least cache_limit under which a node fetches no shard twice in an epoch.

    sizes, samples: see least_room. zip_bytes: of the largest compressed file, which lies beside what is made of it.
    block: samples of a shuffle block. num_served: canonical nodes that a node serves. samples_ahead: how far loader
    workers of a node read ahead of one another.
    """
    span = 2 * min(block, -(-int(samples.sum()) // num_canonical_nodes)) + samples_ahead // num_canonical_nodes
    return least_room(sizes, samples, num_spans=num_served, span=span) + zip_bytes
