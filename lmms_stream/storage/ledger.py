"""What downloads of ours take in a cache folder, and when each was used last, kept from one look at it to the next.

Reading every record at each download takes longer the more files there are. So what a look at all of them finds is
written into the folder's `.room.lock`, and whatever changes is appended; a process reads what others appended since it
read last. After many changes the folder is looked at again, which finds what others than ours removed or added.

The file: a header of HEADER_BYTES that names the boot and the look, then a line for each file: `+` (its download is
about to begin), `=` (it is there) or `-` (it is gone), its bytes, its last use, and the name of its record. The later
line counts. A process that is killed while it writes leaves no header or half a line; then the folder is looked at
again. A file is noted before it takes room and struck out after it has gone, so that nobody counts too little.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import secrets
import time
from pathlib import Path
from typing import IO, NamedTuple

from .locks import file_of, locked
from .outlook import NEEDED_NOW, Outlook
from .record import Record, boot_id

LEDGER_NAME = ".room.lock"
HEADER_BYTES = 128
LOOKS_AFTER = 4  # a folder of n files is looked at again after n / 4 changes


class Entry(NamedTuple):
    """A file that we downloaded, or room that is reserved for a download; last_use: as of when it was noted."""

    last_use: int  # nanoseconds since the machine was started; 0: before
    name: str  # of its record
    num_bytes: int
    is_reserved: bool = False


class Ledger:
    """The ledger of one folder, as this process knows it.

    All methods that are given its file are called while that is locked, and all others while no other thread has it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._path = folder / LEDGER_NAME
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._look = ""  # the name of the look that the rest follows from
        self._end = HEADER_BYTES  # offset in the file up to which it was read
        self._num_changes = 0
        self._entries: dict[str, Entry] = {}
        self._queue: list[tuple[float, int, str]] = []  # a heap of what goes first, also of some files that are gone
        self._outlook: Outlook | None = None  # that the heap follows, and its version
        self._version = -1
        self._seen: tuple[int, int, int] | None = None  # of the file, when this process knew all of it
        self.num_bytes = 0

    def is_current(self) -> bool:
        """Tell whether nobody has written into the file since this process knew all of it. Takes no lock."""
        if self._pid != os.getpid() or self._seen is None:
            return False
        try:
            return self._seen == _version_of(self._path.stat())
        except OSError:
            return False

    def remember(self, file: IO[bytes]) -> None:
        """Take note, before the lock is released, that this process knows all of the file."""
        self._seen = _version_of(os.fstat(file.fileno()))

    @property
    def entries(self) -> list[Entry]:
        """All that is counted."""
        return list(self._entries.values())

    def bytes_of(self, name: str) -> int:
        """What the file of a record is counted with."""
        return self._entries[name].num_bytes if name in self._entries else 0

    def order_by(self, outlook: Outlook | None) -> None:
        """From here on files go in the order of what is foretold: what is needed last, then what was used longest ago.

        Without an outlook: what was used longest ago.
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
        """The file that goes first by what is noted, and when it is needed; `take` passes it over until put back."""
        while self._queue and self._queue[0][2] not in self._entries:
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        use, last_use, name = self._queue[0]
        return -use, self._entries[name]._replace(last_use=last_use)

    def take(self) -> None:
        heapq.heappop(self._queue)

    def put_back(self, entry: Entry, *, is_in_use: bool = False) -> None:
        """is_in_use: whatever is foretold."""
        use = NEEDED_NOW if is_in_use else self._next_uses([entry.name])[0]
        heapq.heappush(self._queue, (-use, entry.last_use, entry.name))

    def _next_uses(self, names: list[str]) -> list[float]:
        if self._outlook is None:
            return [NEEDED_NOW] * len(names)
        return self._outlook.next_uses(self.folder, names)

    def catch_up(self, file: IO[bytes], *, wanted: str) -> None:
        """Know what the file says; look at the folder where it says nothing of use, or where much has changed.

        wanted: the record that the caller holds locked, which a look passes over.
        """
        if self._pid != os.getpid():  # a fork may have copied what another thread was changing
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
        """Note what became of a reservation whose process may be dead."""
        found = find_download(self.folder / entry.name)
        if found is None:
            self.strike_out(file, entry.name)
        elif not found.is_reserved:
            self.note(file, found)

    def _take(self, line: bytes) -> None:
        """Know what a line says; ValueError for a damaged one."""
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
        """Count a file, or room that is reserved for it, instead of what was noted of it before."""
        self._append(file, _line(entry))

    def strike_out(self, file: IO[bytes], name: str) -> None:
        """Count a file no more."""
        if name in self._entries:
            self._append(file, _line(Entry(0, name, 0), is_gone=True))

    def _append(self, file: IO[bytes], line: bytes) -> None:
        if os.pwrite(file.fileno(), line, self._end) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / LEDGER_NAME))
        self._end += len(line)
        self._take(line.removesuffix(b"\n"))

    def look(self, file: IO[bytes], *, wanted: str) -> None:
        """Look at every record of the folder, and write down what is found."""
        self._forget()
        entries = [find_download(Path(each.path)) for each in os.scandir(self.folder) if _is_record(each.name, wanted)]
        lines = [_line(each) for each in entries if each is not None]
        body = b"".join(lines)
        os.ftruncate(file.fileno(), 0)  # without a header until all of it is there
        if os.pwrite(file.fileno(), body, HEADER_BYTES) == len(body):
            self._look = secrets.token_hex(8)
            header = json.dumps({"boot": boot_id(), "look": self._look, "files": len(lines)})
            os.pwrite(file.fileno(), header.encode().ljust(HEADER_BYTES - 1) + b"\n", 0)
        for line in lines:
            self._take(line.removesuffix(b"\n"))
        self._end += len(body)
        self._num_changes = 0


def find_download(record_path: Path) -> Entry | None:
    """What a record says takes room now: a download of ours, or one that is under way; None when nothing does."""
    record = Record.read(record_path)
    if record.ours and not record.owns(file_of(record_path)):  # it is about to come, has just come, or never will
        if _is_locked(record_path):
            return Entry(_last_use(record_path, record), record_path.name, record.size, is_reserved=True)
        record = Record.read(record_path)
    if not record.owns(file_of(record_path)):
        return None
    return Entry(_last_use(record_path, record), record_path.name, record.size)


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(file: IO[bytes]) -> tuple[str, int]:
    """The name of the look that a file holds, and how many files it found; no name where it holds none of this boot."""
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
    """When a file was used last, in nanoseconds since the machine was started; 0 if before, or not known."""
    try:
        stamp = record_path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
    known = record.boot == boot_id() and stamp <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return stamp if known else 0


def _is_locked(path: Path) -> bool:
    with locked(path, timeout_s=0) as lock:
        return lock is None
