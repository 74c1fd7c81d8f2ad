"""Record next to a file in the cache: the file's checked state, and whether the file is a download of ours.

Times are the kernel's since the machine was started: setting the clock has no effect.
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
    """Known facts of a file: the checked state, or (inode 0) a download about to begin."""

    identity: str = ""
    size: int = 0
    inode: int = 0
    mtime_ns: int = 0
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
            boot=boot_id(),
            ours=ours,
        )

    @staticmethod
    def reserved(num_bytes: int) -> Record:
        """Record of our file before the download."""
        return Record(size=num_bytes, boot=boot_id(), ours=True)

    @staticmethod
    def read(path: Path) -> Record:
        """Read a record; an empty record if missing or damaged."""
        for _ in range(_READS):
            try:
                return Record(**json.loads(path.read_bytes()))
            except OSError:
                break
            except (ValueError, TypeError):  # empty, damaged, or half of it written just now
                pass
        return Record()

    def write(self, file: IO[bytes]) -> None:
        """Replace what the open record file says, in one write: who reads it meanwhile hardly ever sees half of it."""
        os.pwrite(file.fileno(), json.dumps(asdict(self)).encode().ljust(_RECORD_BYTES), 0)

    def vouches_for(self, path: Path, identity: str) -> bool:
        """Whether the file was checked since the machine was started, and has not been changed since."""
        return self.identity == identity and self.boot == boot_id() and self.fits(path)

    def fits(self, path: Path) -> bool:
        """Whether the file has not been changed since it was checked, as its inode, size and time tell."""
        return self._facts(path) == (self.size, self.mtime_ns, self.inode) and self.inode != 0

    def fits_copy(self, path: Path) -> bool:
        """Return whether the file has the size and time of the one that was checked, as a copy by `cp -a` has."""
        return self._facts(path)[:2] == (self.size, self.mtime_ns) and self.inode != 0

    @staticmethod
    def _facts(path: Path) -> tuple[int, ...]:
        """Size, time and inode of a file; an empty tuple if there is none."""
        try:
            stat = path.stat()
        except OSError:
            return ()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def owns(self, path: Path) -> bool:
        """Whether the file is one that we downloaded, and nobody has written into it since."""
        return self.ours and self.fits(path)

    def has_copy(self, path: Path) -> bool:
        """Return whether the file is one that we downloaded, or a copy of it by `cp -a`."""
        return self.ours and self.fits_copy(path)

    def was_ours(self, path: Path) -> bool:
        """Whether somebody, or a fault of the disk, has changed a file that we downloaded."""
        try:
            return self.ours and path.stat().st_ino == self.inode and not self.fits(path)
        except OSError:
            return False


def touch(record_path: Path) -> None:
    """Stamp a record with the time since the machine was started."""
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with suppress(FileNotFoundError):  # it was deleted just now
        os.utime(record_path, ns=(now, now))


# What is known of when the files of a limited cache are needed next, so that the files needed last give way first.
#
# Each process that follows a plan knows it for itself; nothing is written down. Without a plan, files give way by least
# recent use.

NEEDED_NOW = 0.0


class Outlook(Protocol):
    """When files are needed next, as one process sees it.

    version: changes with what is foretold. since_ns: of the clock of records; a file that was used later is in use
    by somebody, whatever is foretold (a rank that is behind, or another run).
    """

    @property
    def version(self) -> int: ...

    @property
    def since_ns(self) -> int: ...

    def next_uses(self, folder: Path, names: list[str]) -> list[float]:
        """Next uses of the files of these records in a folder of the cache: NEEDED_NOW, or larger the later; inf:
        never.
        """
        ...
