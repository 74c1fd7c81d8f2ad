"""Streams of classes with their own methods to fetch, as a store. MosaicML's Stream with overridden methods -> Storage.

Our cache asks for files. The stream's methods store files in the stream's folder, and the cache checks and keeps
copies.
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
    """A read-only Storage over a Stream of a class that overrides the methods in `hooks`."""

    def __init__(self, stream: Any, hooks: Sequence[str]):
        self.url = f"{stream.remote or stream.local}/{stream.split}".rstrip("/")
        self._stream = stream
        self._hooks = frozenset(hooks)
        self._readers: dict[str, tuple[Any, set[str]]] = {}  # by file name: shard, names of other forms
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
        """Return the index of the shards from the stream's get_shards."""
        if self._index is None:
            from streaming.base.world import World

            readers = self._stream.get_shards(World.detect(), False)
            for reader in readers:
                for names in ({info.basename for info in pair if info} for pair in reader.file_pairs):
                    self._readers |= {name: (reader, names - {name}) for name in names}
            self._index = (self._folder / INDEX_NAME).read_bytes()
        return self._index

    def download(self, key: str, path: Path) -> None:
        """Let the stream fetch a file, and put the file at `path`.

        A new file in the folder of `path` is moved: the cache renames the file back, and counts the file among our
        downloads. An older file is copied.
        """
        was_there = (self._folder / key).exists()
        try:
            if self.prepares_shards and key in self._readers:
                found = self._prepared(key)
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
            raise StorageError(f"{self.url}/{key}: {error}: check how the stream's class fetches it") from error

    @property
    def prepares_shards(self) -> bool:
        """Whether the stream's class delivers decompressed shards, possibly without compressed files."""
        return bool(self._hooks - {"get_shards", "_download_file"})

    def _prepared(self, key: str) -> Path:
        """Let the stream prepare the shard of a file; remove new files in other forms: nobody would own them."""
        reader, others = self._readers[key]
        new = [path for path in (self._folder / name for name in others) if not path.exists()]
        self._stream.prepare_shard(reader)
        for path in new:
            path.unlink(missing_ok=True)
        return self._folder / key

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
