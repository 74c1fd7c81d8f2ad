"""Files needed next to the shards in a filled folder, for opening the folder as a dataset.

The store's index.json and the describing files are written when the dataset is opened: the index last, because the
index announces a dataset. Notes name the dataset, because copies of two datasets would replace each other. Notes also
list our files: a file of the same name that is not ours stays, and is an error. A dataset is identified by its URL, or
by its shards if all have checksums; then several paths or signed URLs may lead to the dataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ObjectMissingError, StorageError
from ..storage.failures import disk_error, disk_errors
from ..storage.local import FolderStorage, can_write
from ..storage.locks import give_name, locked
from ..storage.storage import Storage
from .index import DATASET_NAME, INDEX_NAME
from .shard_list import ListedShards, ShardList

_NOTES = "_lmms/filled.json"
_Note = list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Notes:
    """Notes about a filled folder. source: URL of the dataset, empty without notes.

    identity, num_shards: of the dataset's shards, see Identity; empty if only the URL is known. files: name -> digest,
    size and time of our last two files of this name.
    """

    source: str = ""
    identity: str = ""
    num_shards: int = 0
    files: dict[str, list[_Note]] = field(default_factory=dict)


class FilledFolder:
    """A folder filled from a store. timeout_s: maximum wait for another process that writes to the folder.

    No file is written to a read-only folder, which may contain the complete dataset.
    """

    def __init__(self, storage: Storage, folder: Path, *, timeout_s: float):
        self._storage = storage
        self._folder = folder
        self._timeout_s = timeout_s
        self._source = str(storage.folder.resolve()) if isinstance(storage, FolderStorage) else storage.url
        self._shards: ShardList = ListedShards([])

    @property
    def other_source(self) -> str:
        """URL of another dataset that fills the folder; empty for our dataset, or a folder without notes."""
        notes = self._notes()
        return "" if notes.source == self._source or self._begins_with(notes) else notes.source

    def _begins_with(self, notes: _Notes) -> bool:
        """Return whether the first shards are the shards of the notes, by checksums: the dataset may have grown."""
        if not notes.identity or notes.num_shards > len(self._shards):
            return False
        shards = self._shards.first(notes.num_shards)
        return shards.identity == notes.identity and all(info.checksum is not None for info in shards)

    def check_source(self) -> None:
        """Raise StorageError if the folder is filled with another dataset."""
        if source := self.other_source:
            raise StorageError(
                f"{self._folder} holds copies of the dataset at {source}, which copies of {self._source} would "
                f"replace: name another folder as local; or, for the same dataset, remove {self._folder / _NOTES} and "
                f"{INDEX_NAME} there"
            )

    def claim(self, shards: ShardList) -> None:
        """Note that the folder is filled with this dataset; StorageError if another dataset fills the folder."""
        self._shards = shards
        with disk_errors(str(self._folder / _NOTES)):
            self.check_source()
            notes = self._notes()
            is_noted = (notes.source, notes.identity) == (self._source, shards.identity)
            if not is_noted and self._can_write(self._folder):
                with self._locked():
                    self.check_source()
                    files = self._notes().files
                    self._write_notes(
                        _Notes(source=self._source, identity=shards.identity, num_shards=len(shards), files=files)
                    )

    def keep_index(self, digest: str, shards: ShardList) -> None:
        """Write the index.json with this digest to the folder, and the dataset.json of the store.

        StorageError if another dataset fills the folder. A read-only folder is neither changed nor checked.
        """
        if not self._can_write(self._folder):
            return
        self._shards = shards
        self.check_source()
        try:
            self.keep(DATASET_NAME, self._storage.read(DATASET_NAME))
        except ObjectMissingError:
            path = self._folder / DATASET_NAME
            if self._is_ours(path, DATASET_NAME):  # of a dataset that filled the folder before
                with disk_errors(str(path)):
                    path.unlink(missing_ok=True)
        self._keep(INDEX_NAME, digest, lambda: self._storage.read(INDEX_NAME))
        if self._notes().source:  # else the user's own folder, which already has this index
            self.claim(shards)  # another dataset without checksums can have the same index

    def change(self, name: str, data: bytes) -> None:
        """Replace a small file of the dataset. Our copy stays ours; the store writes any other file."""
        path = self._folder / name
        if not self._is_ours(path, name):
            self._storage.write(name, data)
            return
        with disk_errors(str(path)), self._locked():
            self._write(path, name, data, _digest(data))

    def keep(self, name: str, data: bytes) -> None:
        """Write a small file of the dataset to the folder."""
        self._keep(name, _digest(data), lambda: data)

    def _keep(self, name: str, digest: str, read: Callable[[], bytes]) -> None:
        path = self._folder / name
        with disk_errors(str(path)):
            if self._has(path, name, digest) or not self._can_write(path.parent):
                return
            self._check_ours(path, name)
            with self._locked():
                self.check_source()
                if not self._has(path, name, digest):
                    data = read()
                    self._check_ours(path, name)
                    if _digest(data) == digest:  # else the store has a newer file, for the next process
                        self._write(path, name, data, digest)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes that fill the folder."""
        notes = self._folder / _NOTES
        notes.parent.mkdir(parents=True, exist_ok=True)
        with locked(notes.with_name(".filled.lock"), timeout_s=self._timeout_s) as lock:
            if lock is None:
                raise StorageError(
                    f"{self._folder} was held by another process for {self._timeout_s:g} s: end that process and "
                    "try again"
                )
            yield

    def _can_write(self, folder: Path) -> bool:
        """Return whether files can be written to a folder of the dataset, next to the index, and next to the notes."""
        every = (each.absolute() for each in (self._folder, (self._folder / _NOTES).parent, folder))  # may be missing
        return all(can_write(next(each for each in (path, *path.parents) if each.exists())) for path in every)

    def _write(self, path: Path, name: str, data: bytes, digest: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _filling(path) as temporary:
            temporary.write_bytes(data)
            notes = self._notes()
            files = {**notes.files, name: [*notes.files.get(name, [])[-1:], [digest, *_facts(temporary)]]}
            self._write_notes(replace(notes, source=notes.source or self._source, files=files))
            if path.exists():
                temporary.replace(path)
                return
            try:
                give_name(temporary, path)
            except FileExistsError:
                if not self._has(path, name, digest):
                    self._check_ours(path, name)

    def _write_notes(self, notes: _Notes) -> None:
        path = self._folder / _NOTES
        with _filling(path) as temporary:
            temporary.write_text(json.dumps(asdict(notes), indent=1, sort_keys=True))
            temporary.replace(path)

    def _has(self, path: Path, name: str, digest: str) -> bool:
        """Return whether a file has this digest; our own file is not read."""
        if not path.is_file():
            return False
        return [digest, *_facts(path)] in self._notes().files.get(name, []) or _digest(path.read_bytes()) == digest

    def _is_ours(self, path: Path, name: str) -> bool:
        return path.is_file() and _facts(path) in [note[1:] for note in self._notes().files.get(name, [])]

    def _check_ours(self, path: Path, name: str) -> None:
        """Raise StorageError if a file exists and is not ours."""
        if path.exists() and not self._is_ours(path, name):
            raise StorageError(
                f"{path} differs from {self._storage.url}/{name}, and was not downloaded by lmms-stream, so it is not "
                "replaced: name another folder as local, or move it away"
            )

    def _notes(self) -> _Notes:
        return _read_notes(self._folder)


def filled_from(folder: Path) -> str | None:
    """Return the URL of the dataset that fills a folder; None for a folder without notes."""
    return _read_notes(folder).source or None


def _read_notes(folder: Path) -> _Notes:
    try:
        return _Notes(**json.loads((folder / _NOTES).read_bytes()))
    except FileNotFoundError:
        return _Notes()
    except OSError as error:
        raise disk_error(str(folder / _NOTES), error) from error
    except (ValueError, TypeError) as error:
        raise StorageError(f"{folder / _NOTES} is damaged ({error}): remove it, and {INDEX_NAME}") from error


@contextmanager
def _filling(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file. The caller holds the lock: a leftover of a killed process is not in use."""
    temporary = path.with_name(f".{path.name}.filling")  # not the name of a leftover in a cache
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()  # as in StoredIndex


def _facts(path: Path) -> _Note:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
