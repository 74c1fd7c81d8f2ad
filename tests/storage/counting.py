"""Stores without a dataset. A module of its own, so that processes that use it start soon and at once."""

from __future__ import annotations

from pathlib import Path

from lmms_stream.storage.cache import LocalCache, Wanted
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.retry import Retry
from lmms_stream.storage.room import CacheRoom
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


def limited_cache(folder: Path, *, objects: int, timeout_s: float = 5) -> LocalCache:
    room = CacheRoom([folder], objects * OBJECT_BYTES)
    return LocalCache(Remote(), folder, room=room, retry=Retry(attempts=2, timeout_s=timeout_s))


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
