"""Files of a remote dataset on this node: each fetched once, however many processes ask.

A file in the cache is complete: it is downloaded under a temporary name and renamed. Who downloads holds a
lock on a file beside it, which the kernel releases when the process dies, so nobody waits for the dead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import StorageError
from .shards import ShardInfo, file_matches
from .storage import LocalStorage, Storage

LOCK_TIMEOUT_S = 600.0
_POLL_S = 0.02


def default_cache_folder(remote: str) -> Path:
    """A folder for a remote below one of this user's alone, in the system's temporary folder.

    StorageError when somebody else has made that one: they could change what is read.
    """
    mine = Path(tempfile.gettempdir()) / f"lmms_stream-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid():
        raise StorageError(f"{mine} belongs to somebody else: name a folder of yours as local")
    return mine / hashlib.blake2b(remote.encode(), digest_size=16).hexdigest()


class LocalCache:
    """Local copies of the objects of `storage` in `folder` (default: see default_cache_folder)."""

    def __init__(self, storage: Storage, folder: Path | None = None):
        self.storage = storage
        self.folder = folder or default_cache_folder(storage.url)

    def fetch(
        self,
        key: str,
        *,
        valid: Callable[[Path], bool],
        name: str | None = None,
        decode: Callable[[bytes], bytes] | None = None,
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Path:
        """The local path of an object, downloaded unless a copy that is `valid` is there.

        The copy is kept under `name` (default: the key); `decode` changes its bytes first (decompression). A local
        dataset's object that is valid as it is is read where it lies.
        Raises StorageError when it cannot be had, when another process holds its download for longer than
        `timeout_s`, and when what was downloaded is not valid.
        """
        if isinstance(self.storage, LocalStorage):
            original = self.storage.folder / (key if decode is None else name or key)
            if original.exists() and valid(original):
                return original
        path = self.folder / (name or key)
        if path.exists() and valid(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_name(f".{path.name}.lock"), timeout_s=timeout_s):
            if path.exists() and valid(path):
                return path
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                self.storage.download(key, temporary)
                if decode is not None:
                    temporary.write_bytes(decode(temporary.read_bytes()))
                if not valid(temporary):
                    raise StorageError(
                        f"{self.storage.url}/{key}: what was downloaded does not match the size or checksum in its "
                        "index: the object is damaged or was replaced; convert the dataset again"
                    )
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return path


def fetch_shard(cache: LocalCache, info: ShardInfo) -> Path:
    """The local path of a shard with the size and checksum of its index entry, decompressed."""

    def valid(path: Path) -> bool:
        return file_matches(path, size=info.size, checksum=info.checksum)

    def decode(data: bytes) -> bytes:
        from streaming.base.compression import decompress

        return bytes(decompress(info.compression, data))

    if info.zip_name is None:
        return cache.fetch(info.name, valid=valid)
    return cache.fetch(info.zip_name, name=info.name, valid=valid, decode=decode)


@contextmanager
def _exclusive(lock_path: Path, *, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with lock_path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{lock_path} was held by another process for {timeout_s:.0f} s: "
                        "is its download stuck? End that process and try again"
                    ) from None
                time.sleep(_POLL_S)
        yield


class CountsFolder(MutableMapping[str, NDArray[np.int64]]):
    """Pack counts of plans as files `<key>.npy` in a folder (see PackPlan's counts_cache)."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __getitem__(self, key: str) -> NDArray[np.int64]:
        try:
            counts = np.load(self._folder / f"{key}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # missing or cut short: counted again
            raise KeyError(key) from None
        return np.asarray(counts, dtype=np.int64)

    def __setitem__(self, key: str, counts: NDArray[np.int64]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{key}.{os.getpid()}.tmp.npy"
        np.save(temporary, counts)
        temporary.replace(self._folder / f"{key}.npy")

    def __delitem__(self, key: str) -> None:
        (self._folder / f"{key}.npy").unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._folder.glob("[!.]*.npy"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
