"""Stores without a dataset. A module of its own, so that processes that use it start soon and at once."""

from __future__ import annotations

from pathlib import Path

from lmms_stream.storage.cache import LocalCache, Wanted
from lmms_stream.storage.eviction import CacheQuota
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.retry import Retry
from lmms_stream.types import StoredObject

OBJECT_BYTES = 1000


class CountingStorage(LocalStorage):
    """A local store that writes a line per download; a subclass of its own, so it is not read where it lies."""

    def download(self, key: str, path: Path) -> None:
        with (self.folder / "downloads").open("a") as log:
            log.write(f"{key}\n")
        super().download(key, path)


def object_wanted(name: str) -> Wanted:
    return Wanted(
        name=name, identity=name, num_bytes=OBJECT_BYTES, valid=lambda path: path.stat().st_size == OBJECT_BYTES
    )


class Remote:
    """A store of objects of OBJECT_BYTES bytes that are made as they are asked for."""

    url = "made://objects"

    def read(self, key: str) -> bytes:
        return key.encode().ljust(OBJECT_BYTES)

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        raise NotImplementedError

    def download(self, key: str, path: Path) -> None:
        path.write_bytes(self.read(key))

    def write(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def upload(self, path: Path, key: str) -> None:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError

    def list_objects(self, prefix: str) -> list[StoredObject]:
        raise NotImplementedError

    def stat(self, key: str) -> StoredObject:
        raise NotImplementedError


class LoggedRemote(Remote):
    """The same, of larger objects, which writes a line per download."""

    def __init__(self, log: Path, num_bytes: int = OBJECT_BYTES):
        self.log, self.num_bytes = log, num_bytes

    def read(self, key: str) -> bytes:
        return key.encode().ljust(self.num_bytes)

    def download(self, key: str, path: Path) -> None:
        with self.log.open("a") as log:
            log.write(f"{key}\n")
        super().download(key, path)

    @property
    def downloads(self) -> list[str]:
        """The keys that were downloaded, sorted."""
        return sorted(self.log.read_text().split()) if self.log.exists() else []

    def wanted(self, name: str) -> Wanted:
        expected = self.read(name)
        return Wanted(
            name=name, identity=name, num_bytes=self.num_bytes, valid=lambda path: path.read_bytes() == expected
        )


def limited_cache(folder: Path, *, objects: int, timeout_s: float = 5) -> LocalCache:
    quota = CacheQuota([folder], objects * OBJECT_BYTES)
    return LocalCache(Remote(), folder, quota=quota, retry=Retry(attempts=2, timeout_s=timeout_s))


def limited_caches(folder: Path, *, folders: int, objects: int, timeout_s: float = 5) -> list[LocalCache]:
    """Caches in folders below a folder that share the room of so many objects."""
    below = [folder / f"folder{number:03}" for number in range(folders)]
    for each in below:
        each.mkdir(exist_ok=True)
    quota = CacheQuota(below, objects * OBJECT_BYTES)
    retry = Retry(attempts=2, timeout_s=timeout_s)
    return [LocalCache(Remote(), each, quota=quota, retry=retry) for each in below]


def held(folder: Path) -> list[str]:
    names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(name for name in names if name not in ("index.json", "_lmms"))
