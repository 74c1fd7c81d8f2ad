"""Streams of classes that fetch in their own way, as a store. MosaicML's Stream with overridden methods -> Storage.

Our cache asks for files; the stream's own methods put them where they put them, and the cache checks and keeps copies.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import LmmsStreamError, ObjectMissingError, StorageError
from ..types import StoredObject
from .index import INDEX_NAME


class HookedStream:
    """A Storage over a Stream whose class overrides the methods named in `hooks`; it is only read."""

    def __init__(self, stream: Any, hooks: Sequence[str]):
        self.url = f"{stream.remote or stream.local}/{stream.split}".rstrip("/")
        self._stream = stream
        self._hooks = frozenset(hooks)
        self._readers: dict[str, Any] = {}  # of shards, by the names of their files
        self._index: bytes | None = None

    @property
    def _folder(self) -> Path:
        return Path(self._stream.local, self._stream.split)

    def read(self, key: str) -> bytes:
        if key == INDEX_NAME:
            return self._read_index()
        path = self._folder / key
        if not path.exists():
            raise ObjectMissingError(f"{self.url}/{key} does not exist: the stream has fetched no such file")
        return path.read_bytes()

    def _read_index(self) -> bytes:
        """The index of the shards that the stream's get_shards gives."""
        if self._index is None:
            from streaming.base.world import World

            readers = self._stream.get_shards(World.detect(), False)
            self._readers = {
                info.basename: reader for reader in readers for pair in reader.file_pairs for info in pair if info
            }
            self._index = (self._folder / INDEX_NAME).read_bytes()
        return self._index

    def download(self, key: str, path: Path) -> None:
        """Let the stream fetch a file, and put it at `path`.

        A file that the stream puts under its own name beside `path` is moved: the cache gives it the name again, and
        counts it as its own. One that was there before is copied.
        """
        was_there = (self._folder / key).exists()
        try:
            if self._hooks - {"get_shards", "_download_file"} and key in self._readers:
                self._stream.prepare_shard(self._readers[key])
                found = self._folder / key
            else:
                found = Path(self._stream._download_file(key, path.name))
                found = found if found.is_absolute() else self._folder / found
            if found == self._folder / key and not was_there and found.parent.samefile(path.parent):
                found.replace(path)
            elif found != path:
                shutil.copyfile(found, path)
                if found.name == path.name:
                    found.unlink()
        except LmmsStreamError:
            raise
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{self.url}/{key} does not exist: {error}") from error
        except OSError as error:
            raise StorageError(
                f"{self.url}/{key}: {error}: look at what the stream's class does to fetch it"
            ) from error

    def stat(self, key: str) -> StoredObject:
        return StoredObject(key, 0, "")

    def list_objects(self, prefix: str) -> list[StoredObject]:
        return []

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        raise self._only_read(key)

    def write(self, key: str, data: bytes) -> None:
        raise self._only_read(key)

    def upload(self, path: Path, key: str) -> None:
        raise self._only_read(key)

    def delete(self, key: str) -> None:
        raise self._only_read(key)

    def _only_read(self, key: str) -> StorageError:
        return StorageError(f"{self.url}/{key}: streams with fetching of their own are only read")
