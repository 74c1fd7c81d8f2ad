"""Locks between processes, on files: the kernel frees the locks of a dying process.

filelock has no access to the locked file, no test of a lock without locking, and no lock of a mapping.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal, NamedTuple

from ..errors import StorageError

LONGEST_HOLD_S = 600.0  # a process that holds a lock of short work for longer is stuck
_POLLS_S = (0.001, 0.02)  # between attempts to take a lock: the first, and the longest
_SUFFIX = ".lock"
_PAUSES_S = (0.05, 2.0)  # between looks at what another process does: the first, and the longest


@contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[IO[bytes] | None]:
    """Open and lock the file at `path`, created if missing; None if another process holds the lock until the timeout.

    timeout_s: 0 does not wait. Threads exclude each other in the same way as processes.
    """
    deadline, pause = time.monotonic() + timeout_s, _POLLS_S[0]
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            if _take(file, fcntl.LOCK_EX):
                try:
                    if _is_at(file, path):
                        yield file
                        return
                finally:  # closing is not enough: a process that was forked meanwhile has the file open, too
                    fcntl.flock(file, fcntl.LOCK_UN)
                continue  # the last holder removed this file: lock the new one
        if time.monotonic() >= deadline:
            yield None
            return
        time.sleep(pause)
        pause = min(2 * pause, _POLLS_S[1])


@contextmanager
def locked_shortly(path: Path) -> Iterator[IO[bytes]]:
    """Hold a lock for short work, as every holder does; StorageError after LONGEST_HOLD_S."""
    with locked(path, timeout_s=LONGEST_HOLD_S) as file:
        if file is None:
            raise _held_too_long(path)
        yield file


def _held_too_long(path: Path) -> StorageError:
    return StorageError(
        f"{path} was held by another process for {LONGEST_HOLD_S:g} s: end that process (is it stopped?) and try again"
    )


def is_locked(path: Path) -> bool:
    """Return whether a process holds the exclusive lock at `path`; concurrent calls do not affect each other."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def map_in_use(path: Path) -> mmap.mmap:
    """Map a file for reading. The file counts as used, by a shared lock, while the mapping exists; see unused.

    FileNotFoundError for a removed file, ValueError for an empty file, StorageError after LONGEST_HOLD_S.
    """
    deadline = time.monotonic() + LONGEST_HOLD_S
    while True:
        with path.open("rb") as file:
            if _take(file, fcntl.LOCK_SH) and _is_at(file, path):
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # its own descriptor keeps the lock
        if time.monotonic() > deadline:
            raise _held_too_long(path)
        time.sleep(_POLLS_S[0])


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Yield whether no process has a file mapped by map_in_use; nobody can map the file inside the context."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            yield True
            return
        except BlockingIOError:
            yield False
            return
        stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield True


class Waited(NamedTuple):
    """Result of a wait. outcome: "done"; "ended" if the process released the lock before; "late" after limit_s."""

    outcome: Literal["done", "ended", "late"]
    limit_s: float


def wait_for_other(is_done: Callable[[], bool], *, lock: Path | None, begin_s: float, end_s: float) -> Waited:
    """Wait until another process, which holds a lock during its work, has finished.

    lock: None if the lock cannot be seen, for example on another node. begin_s: limit while no process has held the
    lock; end_s: limit after a process has held the lock. Both are seconds from the call on.
    """
    started, pause, has_begun = time.monotonic(), _PAUSES_S[0], False
    while True:
        works = lock is not None and is_locked(lock)  # read before is_done: the process may end in between
        limit_s = end_s if has_begun or works else begin_s
        if is_done():
            return Waited("done", limit_s)
        if has_begun and not works:
            return Waited("ended", limit_s)
        has_begun |= works
        if time.monotonic() - started > limit_s:
            return Waited("late", limit_s)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def lock_of(path: Path) -> Path:
    """Hidden file next to `path`, locked by processes that work on `path`; the cache stores a record in the file."""
    return path.with_name(f".{path.name}{_SUFFIX}")


def file_of(lock_path: Path) -> Path:
    """Inverse of lock_of: the file of a lock."""
    return lock_path.with_name(lock_path.name[1 : -len(_SUFFIX)])


def _take(file: IO[bytes], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


# Names of unfinished files, and leftovers of killed processes with temporary names.

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.\d+-\d+\.tmp")


def temporary_name(path: Path) -> Path:
    """Unique hidden name next to `path`, for the unfinished file.

    Processes of two nodes that share a folder may have the same number, because containers count from 1.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.randbits(64)}.tmp")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`: the file is renamed to `path` at the end, and removed after an error."""
    temporary = temporary_name(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def folder_beside(path: Path) -> Path:
    """Name of a folder on the same disk, for a download that becomes the temporary file `path`."""
    return path.with_name(
        re.sub(r"(\d+)\.tmp$", r"0\1.tmp", path.name) if path.suffix == ".tmp" else f"{path.name}.tmp"
    )


def give_name(temporary: Path, path: Path) -> None:
    """Rename a temporary file to `path`; FileExistsError if `path` exists (the existing file stays)."""
    try:
        os.link(temporary, path)
    except OSError as error:  # also for a file system without hard links, and for a broken link at `path`
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.replace(path)
    else:
        temporary.unlink()


def leftovers(folder: Path) -> dict[Path, list[Path]]:
    """Return temporary files and folders in a folder, by the file that each was to become."""
    found: dict[Path, list[Path]] = {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover:
            found.setdefault(folder / leftover["name"], []).append(Path(entry.path))
    return found


def remove_leftovers(path: Path) -> None:
    """Remove abandoned temporary files of downloads of `path`. The caller holds the lock of `path`."""
    for leftover in leftovers(path.parent).get(path, []):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
