"""Files of a remote dataset on this node, fetched once for all processes.

A file in the cache is complete: downloaded under a temporary name, checked and renamed. The record `.NAME.lock` is
next to the file. The downloading process holds the kernel's lock on the record; the kernel releases the lock when the
process dies, and nobody waits for a dead process. The record vouches for a file checked since this machine was started,
and marks files that we may delete.

A local dataset's files are read in place. Records of checked local files are in a folder of this user.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

from ..errors import LmmsStreamError, StorageError
from .eviction import CacheQuota
from .failures import disk_error, disk_errors
from .fetch_config import FetchTally
from .local import LocalStorage, can_write
from .locks import give_name, leftovers, lock_of, locked, remove_leftovers, temporary_name
from .record import Record, touch
from .retry import DEFAULT_RETRY, Retry, counted
from .storage import Storage

_PEER_POLL_S = 0.05  # between checks for a peer's download
logger = logging.getLogger("lmms_stream")
_MD5 = re.compile(r"[0-9a-f]{32}")  # S3's tag of an object written by a single request, unless encrypted with a key


def default_cache_folder(remote: str) -> Path:
    """Return the folder for a remote, below a private folder of this user in the system's temporary folder.

    A relative path starts at the working directory. StorageError if another user owns the private folder: the other
    user could change the data.
    """
    mine = Path(tempfile.gettempdir()) / f"lmms_stream-{os.getuid()}"
    with disk_errors(str(mine)):
        mine.mkdir(mode=0o700, exist_ok=True)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid():
        raise StorageError(f"{mine} belongs to somebody else: name a folder of yours as local")
    name = remote if "://" in remote else str(Path(remote).absolute())
    return mine / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def home_folder(url: str) -> Path:
    """Return default_cache_folder of a dataset, after resolving links in a local path."""
    return default_cache_folder(url if "://" in url else str(Path(url).resolve()))


class PeerCaches(Protocol):
    """Caches of other nodes with files of a dataset: see plugins/peers/client.py."""

    def givers(self, name: str, *, longest_s: float) -> Iterator[int | None]:
        """Yield nodes to take a file from, the next node after a failure; None while a node downloads the file."""

    def take(self, giver: int, name: str, path: Path, *, identity: str, most: int) -> bool:
        """Return whether a node gave a file of this identity, of at most `most` bytes; the content is not checked."""

    def refuse(self, giver: int, name: str) -> bool:
        """Note that a node gave wrong content; return False."""

    def tell(self, name: str) -> None:
        """Announce a file of this node to other nodes."""


class LocalCache:
    """Local copies of the objects of `storage` in `folder` (default: see default_cache_folder).

    quota: limit of the copies, if any. retry: limits of attempts and time for an object. keep_zip: keep compressed
    files beside the decompressed files. tally: counts of existing and downloaded copies, without files read in place.
    peers: caches of other nodes, asked before the store. as_of_s: time of opening the dataset; an object without a
    known checksum that was written later is an error, because it may be of another version.
    """

    def __init__(
        self,
        storage: Storage,
        folder: Path | None = None,
        *,
        quota: CacheQuota | None = None,
        retry: Retry = DEFAULT_RETRY,
        keep_zip: bool = False,
    ):
        self.storage = storage
        self.keep_zip = keep_zip
        self.folder = (folder or default_cache_folder(storage.url)).absolute()  # the process may change directory
        self.retry = retry
        self.quota = quota
        self.tally = FetchTally()
        self.peers: PeerCaches | None = None
        self.as_of_s = math.inf
        self._checked_here: dict[Path, Record] = {}  # copies in read-only folders
        self._checked: Path | None = None  # the folder of records of a local dataset's own objects
        self._tags: dict[str, str] = {}  # of objects without a known checksum, requested once per process
        self._opaque: set[str] = set()  # keys in _tags whose tags are not digests

    def fetch(self, key: str, wanted: Wanted, *, wait: bool = True) -> Path | None:
        """Return the local path of an object, after downloading a missing copy; None instead of waiting.

        A valid file of a local dataset is read in place. `wait`: for another process, or a peer, that downloads the
        object. Raises StorageError if the object is not available in time, or the download is not valid.
        """
        with counted(self.tally.add):
            while (path := self._fetch(key, wanted, wait=wait)) is None and wait:
                time.sleep(_PEER_POLL_S)  # while a peer downloads, see _from_peers
        return path

    def _fetch(self, key: str, wanted: Wanted, *, wait: bool) -> Path | None:
        path = self.folder / wanted.name
        record_path = lock_of(path)
        try:
            original = self._original(key, wanted)
            if original is not None:
                self._check_version(key, wanted, original)
                is_valid = self._is_valid(original, wanted, wait=wait)
                if is_valid is None or is_valid:
                    return original if is_valid else None
            identity = self._identity(key, wanted)
            if self._vouched(path, identity):
                self.tally.add(hits=1)
                return path
            if path.is_file() and not can_write(path.parent):
                return self._copy_as_it_is(key, path, wanted)
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(record_path, timeout_s=self.retry.timeout_s if wait else 0) as lock:
                if lock is None:
                    if not wait:
                        return None
                    raise StorageError(
                        f"{record_path} was held by another process for {self.retry.timeout_s:g} s: "
                        "is its download stuck? End that process and try again"
                    )
                if Record.read(record_path).vouches_for(path, identity):
                    self.tally.add(hits=1)
                else:
                    try:
                        ours = self._have(key, path, wanted, record_path)
                    except FileExistsError:  # another program has created the file during the download: check the file
                        ours = self._have(key, path, wanted, record_path)
                    if ours is None:
                        return None
                    Record.of(path, identity, ours=ours).write(lock)
                    self.touch(path)
        except LmmsStreamError:
            raise
        except OSError as error:
            raise disk_error(str(path), error) from error
        return path

    def at_hand(self, key: str, wanted: Wanted) -> Path | None:
        """Return the local copy, if found valid since this machine was started.

        The check is fast, except for the first check of an object with only a known size: the store is asked for a tag.
        """
        original, checked = self._original(key, wanted), self._record_of_original(wanted)
        if original is not None and wanted.by_size and wanted.valid(original):
            self._check_version(key, wanted, original)
            return original  # the compressed file is not needed, and missing in a filled folder
        if original is not None and checked is not None and Record.read(checked).vouches_for(original, wanted.identity):
            return original
        path = self.folder / wanted.name
        return path if self._vouched(path, self._identity(key, wanted)) else None

    def _vouched(self, path: Path, identity: str) -> bool:
        """Return whether any process since the machine was started, or this cache object, found a copy valid."""
        checked = self._checked_here.get(path)
        if checked is not None and checked.vouches_for(path, identity):
            return True
        return Record.read(lock_of(path)).vouches_for(path, identity)

    def _copy_as_it_is(self, key: str, path: Path, wanted: Wanted) -> Path:
        """Check a copy in a read-only folder, without a record; return the path."""
        record = Record.read(lock_of(path))
        checked = Record.of(path, self._identity(key, wanted), ours=False)
        if not (wanted.valid(path) and self._is_current(key, path, wanted, record)):
            raise StorageError(
                f"{path} differs from {self.storage.url}/{key}, and its folder is not writable: name another folder as "
                "local, or make this folder writable"
            )
        self._checked_here[path] = checked
        self.tally.add(hits=1)
        return path

    def _original(self, key: str, wanted: Wanted) -> Path | None:
        """Return the path of a local dataset's own decoded object; None if decoded from an older compressed file."""
        if not isinstance(self.storage, LocalStorage):
            return None
        original = self.storage.folder / (key if wanted.decode is None else wanted.name)
        if not original.exists():
            return None
        if wanted.decode is not None and wanted.by_size and (self.storage.folder / key).exists():
            record = Record.read(lock_of(original))
            if record.has_copy(original) and record.identity != self._identity(key, wanted):
                return None
        return original

    def _record_of_original(self, wanted: Wanted) -> Path | None:
        """Return the path of the record for a local dataset's own valid object; None if no record can be kept."""
        if not wanted.remember or not isinstance(self.storage, LocalStorage):
            return None
        if self._checked is None:
            try:
                self._checked = home_folder(self.storage.url) / "checked"
                self._checked.mkdir(parents=True, exist_ok=True)
            except (OSError, StorageError):
                return None
        return self._checked / f"{wanted.name}.lock"

    def _identity(self, key: str, wanted: Wanted) -> str:
        """Return the identity in the record of a current copy: the content's name, then the store's tag if by_size."""
        if not wanted.by_size:
            return wanted.identity
        if key not in self._tags:
            found = self.storage.stat(key)
            self._check_time(key, found.written_s)
            self._tags[key] = found.tag
            if found.has_opaque_tag:
                self._opaque.add(key)
        return f"{wanted.identity} {self._tags[key]}".rstrip()  # stores without tags give an empty tag

    def _check_version(self, key: str, wanted: Wanted, original: Path) -> None:
        """Raise StorageError for a replaced object of a local dataset without a known checksum."""
        if wanted.by_size and wanted.decode is None:  # else we have decoded the file
            self._check_time(key, original.stat().st_mtime)

    def _check_time(self, key: str, written_s: float) -> None:
        if written_s > self.as_of_s:
            raise self._replaced(key)

    def _replaced(self, key: str) -> StorageError:
        return StorageError(
            f"{self.storage.url}/{key} was written after the dataset was opened, and index.json has no checksum of it: "
            "samples of two versions could be mixed: start again once nobody writes to the dataset, and write it with "
            "checksums (hashes=['xxh3_64'] of MDSWriter)"
        )

    def _is_valid(self, original: Path, wanted: Wanted, *, wait: bool) -> bool | None:
        """Return whether a local dataset's own object is valid; None while another process checks the object.

        Each version of a file, by inode, size and times, is read completely by a single process of a node.
        """
        record_path = self._record_of_original(wanted)
        if record_path is None:
            return wanted.valid(original)
        if Record.read(record_path).vouches_for(original, wanted.identity):
            return True
        try:
            record_path.parent.mkdir(parents=True, exist_ok=True)
            with locked(record_path, timeout_s=self.retry.timeout_s if wait else 0) as lock:
                if lock is None and not wait:
                    return None
                if Record.read(record_path).vouches_for(original, wanted.identity):
                    return True
                found = Record.of(original, wanted.identity, ours=False)
                valid = wanted.valid(original)
                if valid and lock is not None and found.fits(original):
                    found.write(lock)
                return valid
        except OSError:  # for example no space for a record: each process then reads the whole file
            return wanted.valid(original)

    def of_kept(self) -> LocalCache:
        """Return a cache of the same copies, made from files in the folder instead of the store."""
        return LocalCache(LocalStorage(self.folder), self.folder, quota=self.quota, retry=self.retry)

    def last_use(self, name: str) -> int:
        """Return the last use of our copy of an object, in nanoseconds since the machine was started; else 0."""
        path = self.folder / name
        record_path = lock_of(path)
        return record_path.stat().st_mtime_ns if Record.read(record_path).owns(path) else 0

    def evict(self, name: str) -> None:
        """Delete our copy of an object, unless a process holds the record; other files stay."""
        path = self.folder / name
        record_path = lock_of(path)
        if not Record.read(record_path).owns(path):
            return
        with disk_errors(str(path)), locked(record_path, timeout_s=0) as lock:
            if lock is not None and Record.read(record_path).owns(path):
                path.unlink(missing_ok=True)
                if self.quota is not None and path.parent in self.quota.folders:
                    self.quota.settle(record_path, 0)
                record_path.unlink(missing_ok=True)

    def folders(self, names: Sequence[str]) -> list[Path]:
        """Return folders for copies of these objects: the cache folder, and folders below in the names."""
        return sorted({self.folder, *((self.folder / name).parent for name in names)})

    def touch(self, path: Path) -> None:
        """Mark a file as in use; a cache with a limit keeps it longer."""
        if self.quota is not None:
            touch(lock_of(path))

    def _have(self, key: str, path: Path, wanted: Wanted, record_path: Path) -> bool | None:
        """Ensure a valid copy at `path`; return whether the file is our download, None while a peer downloads."""
        if path.is_dir():
            raise StorageError(f"{path} is a folder, but the dataset has a file of this name: move the folder away")
        record = Record.read(record_path)
        if path.exists():
            if wanted.valid(path) and self._is_current(key, path, wanted, record):
                self.tally.add(hits=1)
                return record.owns(path)
            if record.has_copy(path):
                path.unlink()  # the next download has a new record, which does not vouch for this file
            elif record.was_ours(path):
                _set_aside(path)
            elif not (isinstance(self.storage, LocalStorage) and path == self.storage.folder / key):
                raise StorageError(
                    f"{path} differs from {self.storage.url}/{key}, and was not downloaded by lmms-stream, so it is "
                    "not replaced: name another folder as local, or move it away"
                )
        if self.peers is not None and (came := self._from_peers(self.peers, key, path, wanted)) is not False:
            return came
        for attempt in range(1, self.retry.attempts + 1):
            if self._make(key, path, wanted, partial(self._download, key, wanted)):
                self.tally.add(misses=1)
                if self.peers is not None:
                    self.peers.tell(wanted.name)
                return True
            if attempt < self.retry.attempts:
                time.sleep(min(0.05 * 2**attempt, 2.0))
        raise StorageError(
            f"{self.storage.url}/{key}: what was downloaded does not match the size or checksum in its "
            f"index ({self.retry.attempts} attempts): the object is damaged or was replaced; convert the dataset again"
        )

    def _is_current(self, key: str, path: Path, wanted: Wanted, record: Record) -> bool:
        """Return whether a valid file is a copy of the store's current object, by the store's tag if available.

        A file created by the user, without a checksum or a comparable tag, is accepted.
        """
        tag = self._tags[key] if wanted.by_size else ""
        if not tag or (record.identity == self._identity(key, wanted) and record.fits_copy(path)):
            return True
        if wanted.decode is None and key not in self._opaque and _MD5.fullmatch(tag):
            with path.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == tag
        return not record.owns(path) and record.identity in ("", wanted.identity)

    def _from_peers(self, peers: PeerCaches, key: str, path: Path, wanted: Wanted) -> bool | None:
        """Take a copy from a peer to `path`; return whether a copy came, None while a peer downloads."""
        name, identity = wanted.name, self._identity(key, wanted)

        def take(giver: int, temporary: Path) -> bool:  # the copy is already decoded
            came = peers.take(giver, name, temporary, identity=identity, most=wanted.num_bytes)
            return came and (wanted.valid(temporary) or peers.refuse(giver, name))

        for giver in peers.givers(name, longest_s=self.retry.timeout_s / 4):
            if giver is None:
                return None
            if self._make(key, path, wanted, partial(take, giver)):
                self.tally.add(from_peers=1)
                peers.tell(name)
                return True
        return False

    def _download(self, key: str, wanted: Wanted, temporary: Path) -> bool:
        self.storage.download(key, temporary)
        if wanted.by_size and self.storage.stat(key).tag != self._tags[key]:
            raise self._replaced(key)
        self.tally.add(num_bytes=temporary.stat().st_size)
        return self._decoded(temporary, wanted)

    def _make(self, key: str, path: Path, wanted: Wanted, bring: Callable[[Path], bool]) -> bool:
        """Let `bring` write a temporary file, and rename the file; False if `bring` returns False (not valid).

        FileExistsError if another program has created the file.
        """
        record_path = lock_of(path)
        if Record.read(record_path) != Record():  # of a dead process, or a failed attempt
            remove_leftovers(path)
        quota = self.quota if self.quota is not None and path.parent in self.quota.folders else None
        if quota is not None:  # for shards; the lengths index is always kept
            quota.reserve(record_path, wanted.num_bytes, timeout_s=self.retry.timeout_s)
        else:
            with record_path.open("r+b") as file:
                Record.reserved(wanted.num_bytes).write(file)
        temporary = temporary_name(path)
        size = 0
        try:
            if bring(temporary):
                made = Record.of(temporary, self._identity(key, wanted), ours=True)
                with record_path.open("r+b") as file:  # before it has its name: who is killed between leaves no file
                    made.write(file)  # that is nobody's
                give_name(temporary, path)
                size = made.size
            return size > 0
        finally:
            temporary.unlink(missing_ok=True)
            if quota is not None:
                quota.settle(record_path, size)

    @staticmethod
    def _decoded(temporary: Path, wanted: Wanted) -> bool:
        """Decode the download; return whether its content matches."""
        if wanted.decode is not None:
            try:
                temporary.write_bytes(wanted.decode(temporary.read_bytes()))
            except ValueError:
                return False
        return wanted.valid(temporary)

    def clean(self, folders: Sequence[Path]) -> None:
        """Remove temporary files of killed processes from folders of this cache."""
        for path in [path for folder in folders if can_write(folder) for path in leftovers(folder)]:
            with locked(lock_of(path), timeout_s=0) as lock:
                if lock is not None:
                    remove_leftovers(path)


def _set_aside(path: Path) -> None:
    """Rename a changed copy of ours, possibly a user's file; another copy replaces the file."""
    other = next(each for number in count(1) if not (each := path.with_name(f"{path.name}.changed-{number}")).exists())
    path.rename(other)
    logger.warning("%s was changed after its download: it is kept as %s and downloaded again", path, other.name)


# The expected content of a file in the cache.


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Requirements of a local copy. identity: names the content; valid: checks the content of a file (reads the file).

    name: of the copy, in the cache folder. num_bytes: disk space of the copy, also during the download.
    by_size: `valid` checks only the size; the store's tag of the object decides whether a copy is current.
    decode: converts the downloaded bytes (decompression; ValueError for damaged bytes).
    remember: keep a record also for a local dataset's own valid object: the object is read completely once per node.
    """

    name: str
    identity: str
    num_bytes: int
    valid: Callable[[Path], bool]
    by_size: bool = False
    decode: Callable[[bytes], bytes] | None = None
    remember: bool = False
