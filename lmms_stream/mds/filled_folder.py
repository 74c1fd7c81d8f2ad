"""What a folder that is filled with a dataset's shards needs besides them, to be opened by itself.

The index.json of the store, and what describes the dataset, are written there when the dataset is opened: the index
last, as it says that there is a dataset. A note says which files are ours; another file of that name stays, and is an
error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ObjectMissingError, StorageError
from ..storage.disk_errors import disk_errors
from ..storage.local import LocalStorage, can_write
from ..storage.locks import locked
from ..storage.storage import Storage
from .index import DATASET_NAME, INDEX_NAME

_NOTES = "_lmms/filled.json"  # name -> digest, size and time of the last two files of that name that are ours
_Note = list[Any]


class FilledFolder:
    """A folder that is filled from a store. timeout_s: how long another process may write to it.

    Nothing is written to a folder that cannot be written, which may hold all.
    """

    def __init__(self, storage: Storage, folder: Path, *, timeout_s: float):
        self._storage = storage
        self._folder = folder
        self._timeout_s = timeout_s

    def keep_index(self, digest: str) -> None:
        """Have the index.json with this digest there, and the dataset.json that belongs to it."""
        try:
            self.keep(DATASET_NAME, self._storage.read(DATASET_NAME))
        except ObjectMissingError:
            self._remove(DATASET_NAME)
        self._keep(INDEX_NAME, digest, lambda: self._storage.read(INDEX_NAME))

    def keep(self, name: str, data: bytes) -> None:
        """Have a small file of the dataset there."""
        self._keep(name, _digest(data), lambda: data)

    def _keep(self, name: str, digest: str, read: Callable[[], bytes]) -> None:
        path = self._folder / name
        with disk_errors(str(path)):
            if self._has(path, name, digest) or not _can_fill(path.parent):
                return
            self._check_ours(path, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            (self._folder / _NOTES).parent.mkdir(exist_ok=True)
            with locked((self._folder / _NOTES).with_name(".filled.lock"), timeout_s=self._timeout_s) as lock:
                if lock is None:
                    raise StorageError(
                        f"{self._folder} was held by another process for {self._timeout_s:g} s: end that process and "
                        "try again"
                    )
                if not self._has(path, name, digest):
                    self._check_ours(path, name)
                    data = read()
                    if _digest(data) == digest:  # else it was replaced meanwhile: whoever opens it next writes it
                        self._write(path, name, data, digest)

    def _write(self, path: Path, name: str, data: bytes, digest: str) -> None:
        temporary = path.with_name(f".{path.name}.filling")  # the lock is ours; a cache may not take it for left behind
        try:
            temporary.write_bytes(data)
            notes = self._notes()
            notes[name] = [*notes.get(name, [])[-1:], [digest, *_facts(temporary)]]
            LocalStorage(self._folder).write(_NOTES, json.dumps(notes, indent=1, sort_keys=True).encode())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _has(self, path: Path, name: str, digest: str) -> bool:
        """Whether a file has this digest; one of ours is not read for it."""
        if not path.is_file():
            return False
        return [digest, *_facts(path)] in self._notes().get(name, []) or _digest(path.read_bytes()) == digest

    def _check_ours(self, path: Path, name: str) -> None:
        """StorageError for another file than one of ours."""
        if path.exists() and _facts(path) not in [note[1:] for note in self._notes().get(name, [])]:
            raise StorageError(
                f"{path} is not what {self._storage.url}/{name} holds, and was not downloaded by lmms-stream, so it is "
                "left as it is: name another folder as local, or move it away"
            )

    def _remove(self, name: str) -> None:
        """Remove a file of ours, of a dataset that was there before."""
        path = self._folder / name
        if path.is_file() and _facts(path) in [note[1:] for note in self._notes().get(name, [])]:
            with disk_errors(str(path)):
                path.unlink(missing_ok=True)

    def _notes(self) -> dict[str, list[_Note]]:
        try:
            notes: dict[str, list[_Note]] = json.loads((self._folder / _NOTES).read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StorageError(f"{self._folder / _NOTES} is damaged ({error}): remove it, and {INDEX_NAME}") from error
        return notes


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()  # as of StoredIndex


def _facts(path: Path) -> _Note:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _can_fill(folder: Path) -> bool:
    """Whether files can be made in a folder, which may have to be made."""
    return can_write(next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()))
