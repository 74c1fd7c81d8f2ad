"""Record next to a file in the cache: the file's checked state, and whether we downloaded the file.

The modification time of a record is the last use of its file, in time since the machine was started: setting the clock
has no effect.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Protocol

_RECORD_BYTES = 1024
_READS = 3


@cache
def boot_id() -> str:
    """Id of the current boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Known facts of a file: the checked state, or (inode 0) a download about to begin. ours: we download the file."""

    identity: str = ""
    size: int = 0
    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    boot: str = ""
    ours: bool = False

    @staticmethod
    def of(path: Path, identity: str, *, ours: bool) -> Record:
        stat = path.stat()
        return Record(
            identity=identity,
            size=stat.st_size,
            inode=stat.st_ino,
            mtime_ns=stat.st_mtime_ns,
            ctime_ns=stat.st_ctime_ns,
            boot=boot_id(),
            ours=ours,
        )

    @staticmethod
    def reserved(num_bytes: int) -> Record:
        """Return the record of a file before our download: the size in the index, and no facts of a finished file."""
        return Record(size=num_bytes, boot=boot_id(), ours=True)

    @staticmethod
    def read(path: Path) -> Record:
        """Read a record; return an empty record if it is missing or damaged."""
        for _ in range(_READS):
            try:
                return Record(**json.loads(path.read_bytes()))
            except OSError:
                break
            except (ValueError, TypeError):  # empty, damaged, or half written at this moment
                pass
        return Record()

    def write(self, file: IO[bytes]) -> None:
        """Replace the content of the open record file in one write: concurrent readers hardly ever see half of it."""
        os.pwrite(file.fileno(), json.dumps(asdict(self)).encode().ljust(_RECORD_BYTES), 0)

    def vouches_for(self, path: Path, identity: str) -> bool:
        """Return whether the file was checked since the machine was started, and its status is unchanged since.

        The time of change of the status also differs after writes that keep the size and the modification time.
        """
        is_checked = self.identity == identity and self.boot == boot_id() and self.inode != 0
        return is_checked and self._facts(path) == (self.size, self.mtime_ns, self.inode, self.ctime_ns)

    def fits(self, path: Path) -> bool:
        """Return whether the file is unchanged since the check, by inode, size and time."""
        return self._facts(path)[:3] == (self.size, self.mtime_ns, self.inode) and self.inode != 0

    def fits_copy(self, path: Path) -> bool:
        """Return whether the file has the size and time of the checked file, as a copy by `cp -a` has."""
        return self._facts(path)[:2] == (self.size, self.mtime_ns) and self.inode != 0

    @staticmethod
    def _facts(path: Path) -> tuple[int, ...]:
        """Return size, times and inode of a file; an empty tuple for a missing file."""
        try:
            stat = path.stat()
        except OSError:
            return ()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns

    def owns(self, path: Path) -> bool:
        """Return whether we downloaded the file, and nobody has changed it since."""
        return self.ours and self.fits(path)

    def has_copy(self, path: Path) -> bool:
        """Return whether the file is our download, or a copy of our download by `cp -a`."""
        return self.ours and self.fits_copy(path)

    def was_ours(self, path: Path) -> bool:
        """Return whether somebody, or a fault of the disk, has changed a file that we downloaded."""
        try:
            return self.ours and path.stat().st_ino == self.inode and not self.fits(path)
        except OSError:
            return False


def touch(record_path: Path) -> None:
    """Stamp a record with the time since the machine was started."""
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with suppress(FileNotFoundError):  # deleted at this moment
        os.utime(record_path, ns=(now, now))


# Next uses of the files of a limited cache: the files needed last are evicted first.
#
# Each process with a plan knows the next uses; they are not stored. Without a plan, files are evicted by least
# recent use.

NEEDED_NOW = 0.0


class Outlook(Protocol):
    """Next uses of files, as seen by a single process.

    version: changes with the next uses. since_ns: time of the clock of records. A file used after since_ns is in use by
    another process (a rank that is behind, or another run), even if its next use is far.
    """

    @property
    def version(self) -> int: ...

    @property
    def since_ns(self) -> int: ...

    def next_uses(self, folder: Path, names: list[str]) -> list[float]:
        """Return next uses of files, by their records in a cache folder: NEEDED_NOW, larger if later, inf for never."""
        ...
