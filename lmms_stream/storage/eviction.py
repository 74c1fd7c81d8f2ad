"""Limit of a cache folder: a download evicts the files needed last, only files downloaded by us.

The outlook of a process with a plan orders the files (see record.py); without an outlook, the least recently used
files are evicted.

All processes of a node with the same cache folder share the limit, and the journal of files (see below).
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, StorageError
from .locks import file_of, locked, locked_shortly
from .record import NEEDED_NOW, Outlook, Record, boot_id, touch
from .retry import count_here

_POLL_S = 0.05


class CacheQuota:
    """Quota of several cache folders together: files of at most `limit_bytes` in all.

    outlook: next uses of files known to this process; each process has a separate outlook.
    """

    def __init__(self, folders: Sequence[Path], limit_bytes: int):
        self.folders = sorted(set(folders))
        self.limit_bytes = limit_bytes
        self.outlook: Outlook | None = None
        self._ledgers = [CacheJournal(folder) for folder in self.folders]
        self._numbers = {folder: number for number, folder in enumerate(self.folders)}

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheQuota, (self.folders, self.limit_bytes)

    def reserve(self, record_path: Path, num_bytes: int, *, timeout_s: float) -> None:
        """Reserve disk space for a download, and delete the files needed last. The caller holds the record locked.

        Raises ConfigError for more than the limit, StorageError if other downloads hold the disk space too long.
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
        """Note the end of a download with reserved disk space. num_bytes: size of the file, or 0 after a failure.

        The caller holds the record locked.
        """
        ledger = self._ledger_of(record_path)
        with self._locked() as first, self._opened(ledger, first, wanted=record_path) as file:
            if num_bytes:
                ledger.note(file, Entry(record_path.stat().st_mtime_ns, record_path.name, num_bytes))
            else:
                ledger.strike_out(file, record_path.name)

    def _ledger_of(self, record_path: Path) -> CacheJournal:
        return self._ledgers[self._numbers[record_path.parent]]

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """Lock the ledger file of the first folder. Only the holder of this lock changes ledgers.

        The holder may lock one more ledger at a time, always after this ledger: processes cannot wait in a circle.
        """
        folder = self.folders[0]
        folder.mkdir(parents=True, exist_ok=True)
        with locked_shortly(folder / LEDGER_NAME) as file:
            yield file

    @contextmanager
    def _opened(self, ledger: CacheJournal, first: IO[bytes], *, wanted: Path) -> Iterator[IO[bytes]]:
        """Lock and read the file of a ledger. first: see _locked. wanted: the caller's record."""
        with ExitStack() as stack:
            file = first
            if ledger is not self._ledgers[0]:
                ledger.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(locked_shortly(ledger.folder / LEDGER_NAME))
            ledger.catch_up(file, wanted=_name_in(ledger, wanted))
            yield file
            ledger.remember(file)

    def _make_room(self, first: IO[bytes], wanted: Path, num_bytes: int) -> bool:
        """Delete files until `num_bytes` more fit; False if only current downloads are left."""
        for ledger in self._ledgers:
            if not ledger.is_current():  # locking and reading all files takes a hundred times as long as their status
                with self._opened(ledger, first, wanted=wanted):
                    pass
        if self._evict(first, wanted, num_bytes):
            return True
        for ledger in self._ledgers:  # a dead download may hold the rest
            with self._opened(ledger, first, wanted=wanted) as file:
                ledger.look(file, wanted=_name_in(ledger, wanted))
        return self._evict(first, wanted, num_bytes)

    def _evict(self, first: IO[bytes], wanted: Path, num_bytes: int) -> bool:
        """Delete the files needed last until `num_bytes` more fit; False if deleting is not enough."""
        left_alone: list[tuple[CacheJournal, Entry]] = []  # current downloads, and locked files
        total, most = self._total(), self._most_beside(wanted, num_bytes)
        queue = self._first_of_each() if total > most else []
        while total > most and queue:
            *_, number = heapq.heappop(queue)
            ledger = self._ledgers[number]
            total -= ledger.num_bytes
            with self._opened(ledger, first, wanted=wanted) as file:
                ledger.order_by(self.outlook)
                key = _first_of(ledger)
                if key is not None and (not queue or (*key, number) <= queue[0]):  # the ledger is unchanged
                    left_alone += self._let_go(ledger, file, wanted)
            total += ledger.num_bytes
            if (key := _first_of(ledger)) is not None:
                heapq.heappush(queue, (*key, number))
        for ledger, entry in left_alone:
            ledger.put_back(entry)
        return total <= most

    def _first_of_each(self) -> list[tuple[float, Entry, int]]:
        """Return a heap of the next file to evict of each folder, with the folder's number."""
        queue = []
        for number, ledger in enumerate(self._ledgers):
            ledger.order_by(self.outlook)
            if (key := _first_of(ledger)) is not None:
                queue.append((*key, number))
        heapq.heapify(queue)
        return queue

    def _let_go(self, ledger: CacheJournal, file: IO[bytes], wanted: Path) -> list[tuple[CacheJournal, Entry]]:
        """Delete the next file to evict of a ledger, unless the file must stay. Return the entry of a locked file."""
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
            ledger.put_back(found)  # the file was used since
        elif found is None or _delete(record_path):
            count_here(num_evicted=int(found is not None))
            ledger.strike_out(file, entry.name)
        else:
            return [(ledger, entry)]
        return []

    def _total(self) -> int:
        return sum(ledger.num_bytes for ledger in self._ledgers)

    def _most_beside(self, wanted: Path, num_bytes: int) -> int:
        """Return the largest total of counted bytes that leaves space for a file of `num_bytes`."""
        return self.limit_bytes - num_bytes + self._ledger_of(wanted).bytes_of(wanted.name)

    def _took(self, first: IO[bytes], record_path: Path, num_bytes: int) -> bool:
        """Reserve disk space; False if a quota with another first folder has filled the space since _make_room."""
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


def _name_in(ledger: CacheJournal, record_path: Path) -> str:
    """Return the name of a record in the folder of a ledger; "" for a record of another folder."""
    return record_path.name if record_path.parent == ledger.folder else ""


def _first_of(ledger: CacheJournal) -> tuple[float, Entry] | None:
    """Return sort key and entry of the next file to evict of a ledger, comparable between folders."""
    first = ledger.first_to_go()
    return None if first is None else (-first[0], first[1])


def _is_in_use(found: Entry, next_use: float, outlook: Outlook | None) -> bool:
    """Return whether another process uses a file that the plan of this process needs only later."""
    return outlook is not None and next_use > NEEDED_NOW and found.last_use > outlook.since_ns


def _delete(record_path: Path) -> bool:
    """Delete a file of ours and the record; return False if a process holds the record."""
    with locked(record_path, timeout_s=0) as lock:
        if lock is None:
            return False
        path = file_of(record_path)
        if Record.read(record_path).owns(path):
            path.unlink(missing_ok=True)
        record_path.unlink(missing_ok=True)
    return True


def least_quota(sizes: NDArray[np.int64], samples: NDArray[np.int64], *, num_spans: int, span: int) -> int:
    """Return the bytes for `num_spans` readers of the shards in spans of `span` samples, with each shard fetched once.

    sizes, samples: bytes and number of samples of each shard, int64[num_shards]. The bytes suffice for any order: a
    span covers at most the shards with the most bytes per sample, and a part of a shard at either edge.
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
    """Return the least cache_limit for a node to fetch no shard twice in an epoch.

    sizes, samples: see least_quota. zip_bytes: of the largest compressed file, which is stored beside the decompressed
    file. block: samples of a shuffle block. num_served: canonical nodes served by a node. samples_ahead: distance
    between loader workers of a node, in samples.
    """
    span = 2 * min(block, -(-int(samples.sum()) // num_canonical_nodes)) + samples_ahead // num_canonical_nodes
    return least_quota(sizes, samples, num_spans=num_served, span=span) + zip_bytes


# Size and last use of our downloads in a cache folder, kept between scans of the folder.
#
# Reading every record at each download would take longer with more files. Therefore a scan of all records is written
# into the folder's `.room.lock`, and changes are appended; a process reads lines appended since the last read. After
# many changes the folder is scanned again, to find files removed or added by other programs.
#
# The file: a header of HEADER_BYTES with the boot and the scan, then a line for each file: `+` (its download
# begins), `=` (present) or `-` (removed), its bytes, the time of its last use, and the name of its record. The later
# line counts. A process killed during a write leaves no header or half a line; then the folder is scanned
# again. A file is noted before its space is taken, and struck out after its removal: no process counts too little.

LEDGER_NAME = ".room.lock"
HEADER_BYTES = 128
LOOKS_AFTER = 4  # a folder of n files is scanned again after n / 4 changes


class Entry(NamedTuple):
    """A file downloaded by us, or disk space reserved for a download; last_use: at the time of the note."""

    last_use: int  # nanoseconds since the machine was started; 0: before
    name: str  # of its record
    num_bytes: int
    is_reserved: bool = False


class CacheJournal:
    """The ledger of a folder, in the state known to this process.

    Methods with a file argument are called while the file is locked, other methods while no other thread uses the
    ledger.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._path = folder / LEDGER_NAME
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._look = ""  # name of the scan before the changes
        self._end = HEADER_BYTES  # offset of the end of the read part of the file
        self._num_changes = 0
        self._entries: dict[str, Entry] = {}
        self._queue: list[tuple[float, int, str]] = []  # a heap of files to evict, with some removed files
        self._outlook: Outlook | None = None  # outlook of the heap, and its version
        self._version = -1
        self._seen: tuple[int, int, int] | None = None  # of the file, when this process had read the whole file
        self.num_bytes = 0

    def is_current(self) -> bool:
        """Return whether the file is unchanged since this process read the whole file. Takes no lock."""
        if self._pid != os.getpid() or self._seen is None:
            return False
        try:
            return self._seen == _version_of(self._path.stat())
        except OSError:
            return False

    def remember(self, file: IO[bytes]) -> None:
        """Note, before the lock is released, that this process has read the whole file."""
        self._seen = _version_of(os.fstat(file.fileno()))

    @property
    def entries(self) -> list[Entry]:
        """All counted files and reservations."""
        return list(self._entries.values())

    def bytes_of(self, name: str) -> int:
        """Return the counted bytes of a record's file."""
        return self._entries[name].num_bytes if name in self._entries else 0

    def order_by(self, outlook: Outlook | None) -> None:
        """Evict from now on in the order of an outlook: files needed last, then least recently used files.

        Without an outlook: least recently used files.
        """
        version = -1 if outlook is None else outlook.version
        if outlook is self._outlook and version == self._version:
            return
        self._outlook, self._version = outlook, version
        uses = self._next_uses(list(self._entries))
        entries = zip(uses, self._entries.values(), strict=True)
        self._queue = [(-use, entry.last_use, entry.name) for use, entry in entries]
        heapq.heapify(self._queue)

    def first_to_go(self) -> tuple[float, Entry] | None:
        """Return the next file to evict, and its next use; `take` removes the file from the queue until put_back."""
        while self._queue and self._queue[0][2] not in self._entries:
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        use, last_use, name = self._queue[0]
        return -use, self._entries[name]._replace(last_use=last_use)

    def take(self) -> None:
        heapq.heappop(self._queue)

    def put_back(self, entry: Entry, *, is_in_use: bool = False) -> None:
        """Put an entry into the queue again. is_in_use: needed now, regardless of the outlook."""
        use = NEEDED_NOW if is_in_use else self._next_uses([entry.name])[0]
        heapq.heappush(self._queue, (-use, entry.last_use, entry.name))

    def _next_uses(self, names: list[str]) -> list[float]:
        if self._outlook is None:
            return [NEEDED_NOW] * len(names)
        return self._outlook.next_uses(self.folder, names)

    def catch_up(self, file: IO[bytes], *, wanted: str) -> None:
        """Read the file; scan the folder if the file is unusable, or after many changes.

        wanted: the caller's locked record, ignored by a scan.
        """
        if self._pid != os.getpid():  # a fork may have copied half a change by another thread
            self._forget()
        look, num_files = _read_header(file)
        is_new = look != self._look
        if is_new:
            self._forget()
            self._look, self._num_changes = look, -num_files
        num_bytes = os.fstat(file.fileno()).st_size - self._end
        lines = os.pread(file.fileno(), max(0, num_bytes), self._end)
        try:
            if not look or num_bytes < 0 or (lines and not lines.endswith(b"\n")):
                raise ValueError("cut short")
            for line in lines.split(b"\n")[:-1]:
                self._take(line)
        except ValueError:
            self.look(file, wanted=wanted)
            return
        self._end += len(lines)
        if is_new:
            for entry in [each for each in self.entries if each.is_reserved and each.name != wanted]:
                self._settle(file, entry)
        if self._num_changes > len(self._entries) // LOOKS_AFTER:
            self.look(file, wanted=wanted)

    def _settle(self, file: IO[bytes], entry: Entry) -> None:
        """Note the result of a reservation of a possibly dead process."""
        found = find_download(self.folder / entry.name)
        if found is None:
            self.strike_out(file, entry.name)
        elif not found.is_reserved:
            self.note(file, found)

    def _take(self, line: bytes) -> None:
        """Apply a line of the file; ValueError for a damaged line."""
        kind, num_bytes, last_use, raw_name = line.split(b" ", 3)
        name = os.fsdecode(raw_name)
        self.num_bytes -= self.bytes_of(name)
        is_queued = self._entries.pop(name, None) is not None
        self._num_changes += 1
        if kind != b"-":
            entry = Entry(int(last_use), name, int(num_bytes), kind == b"+")
            self._entries[name] = entry
            self.num_bytes += entry.num_bytes
            if not is_queued:
                self.put_back(entry)

    def note(self, file: IO[bytes], entry: Entry) -> None:
        """Count a file, or disk space reserved for a file, instead of an earlier note."""
        self._append(file, _line(entry))

    def strike_out(self, file: IO[bytes], name: str) -> None:
        """Stop counting a file."""
        if name in self._entries:
            self._append(file, _line(Entry(0, name, 0), is_gone=True))

    def _append(self, file: IO[bytes], line: bytes) -> None:
        if os.pwrite(file.fileno(), line, self._end) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / LEDGER_NAME))
        self._end += len(line)
        self._take(line.removesuffix(b"\n"))

    def look(self, file: IO[bytes], *, wanted: str) -> None:
        """Scan every record of the folder, and write the result."""
        self._forget()
        entries = [find_download(Path(each.path)) for each in os.scandir(self.folder) if _is_record(each.name, wanted)]
        lines = [_line(each) for each in entries if each is not None]
        body = b"".join(lines)
        os.ftruncate(file.fileno(), 0)  # no header until the body is complete
        if os.pwrite(file.fileno(), body, HEADER_BYTES) == len(body):
            self._look = secrets.token_hex(8)
            header = json.dumps({"boot": boot_id(), "look": self._look, "files": len(lines)})
            os.pwrite(file.fileno(), header.encode().ljust(HEADER_BYTES - 1) + b"\n", 0)
        for line in lines:
            self._take(line.removesuffix(b"\n"))
        self._end += len(body)
        self._num_changes = 0


def find_download(record_path: Path) -> Entry | None:
    """Return the entry of a record's file: a finished or current download of ours; None without a download."""
    record = Record.read(record_path)
    if record.ours and not record.owns(file_of(record_path)):  # the file is in download, just finished, or abandoned
        if _is_locked(record_path):
            return Entry(_last_use(record_path, record), record_path.name, record.size, is_reserved=True)
        record = Record.read(record_path)
    if not record.owns(file_of(record_path)):
        return None
    return Entry(_last_use(record_path, record), record_path.name, record.size)


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(file: IO[bytes]) -> tuple[str, int]:
    """Return the name of the scan in a file, and the number of files found; ("", 0) without a scan of this boot."""
    try:
        header = json.loads(os.pread(file.fileno(), HEADER_BYTES, 0))
        return (str(header["look"]), int(header["files"])) if header["boot"] == boot_id() else ("", 0)
    except (ValueError, KeyError, TypeError):
        return "", 0


def _line(entry: Entry, *, is_gone: bool = False) -> bytes:
    kind = b"-" if is_gone else b"+" if entry.is_reserved else b"="
    return b"%s %d %d %s\n" % (kind, entry.num_bytes, entry.last_use, os.fsencode(entry.name))


def _is_record(name: str, wanted: str) -> bool:
    return name.startswith(".") and name.endswith(".lock") and name not in (wanted, LEDGER_NAME) and "\n" not in name


def _last_use(record_path: Path, record: Record) -> int:
    """Return the time of a file's last use, in nanoseconds since the machine was started; 0 if earlier, or unknown."""
    try:
        stamp = record_path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
    known = record.boot == boot_id() and stamp <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return stamp if known else 0


def _is_locked(path: Path) -> bool:
    with locked(path, timeout_s=0) as lock:
        return lock is None
