"""The index of a stored dataset: in memory, or for a long index in a table on this node. storage -> shards."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import ObjectHiddenError, ObjectMissingError, ShardError, StorageError
from ..storage.failures import disk_errors, is_out_of_reach, is_throttled
from ..storage.local import can_write
from ..storage.locks import locked, unused
from ..storage.storage import Storage
from ..types import StoredObject
from .index import DATASET_NAME, INDEX_NAME, no_dataset, parse_index
from .shard_list import ListedShards, ShardList
from .shard_table import ABOUT_NAME, ENTRIES_NAME, ShardTable, write_table

LONG_INDEX_BYTES = 1 << 20  # about 3000 shards; a longer index is made into a table
_FORMAT = 1  # of tables
_TABLES = "_lmms/index"
_WRITING = ".writing-"  # prefix of unfinished tables
_TRIES = 3  # attempts to open a removed or damaged table before reading the index into memory
_Facts = tuple[StoredObject, StoredObject | None]  # of index.json, and of dataset.json if present


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredIndex:
    """Index of a dataset. dataset: content of dataset.json, if present; for a long index without the shards.

    digest: names the content of index.json. written_s: see StoredObject.
    """

    shards: ShardList
    dataset: dict[str, Any] | None
    digest: str
    written_s: float = 0.0

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Parts appended to the dataset after the conversion, described in dataset.json."""
        return [] if self.dataset is None else list(self.dataset.get("parts", []))


def read_index(storage: Storage, cache_folder: Path, *, validate_hash: str | None, timeout_s: float) -> StoredIndex:
    """Read the index of the dataset in a store. The table of a long index is kept below cache_folder.

    timeout_s: longest wait for another process that makes the table. Raises StorageError for a missing or unavailable
    dataset, ShardError for an unsafe index.
    """
    facts = _facts(storage)
    if facts is None:
        return _listed(storage, validate_hash)
    is_long = facts[0].num_bytes > LONG_INDEX_BYTES and all(each.tag for each in facts if each)
    found = _of_table(storage, facts, cache_folder, validate_hash, timeout_s) if is_long else None
    return replace(found or _listed(storage, validate_hash), written_s=facts[0].written_s)


def _of_table(
    storage: Storage, facts: _Facts, cache_folder: Path, validate_hash: str | None, timeout_s: float
) -> StoredIndex | None:
    """Return a long index in a table; None if no table can be made."""
    folder = _table_folder(storage.url, facts, cache_folder, validate_hash)
    for _ in range(_TRIES):
        if not (folder / ABOUT_NAME).exists() and not _make_once(storage, facts, folder, validate_hash, timeout_s):
            break
        table = _open_table(folder, storage)
        if table is not None:
            return StoredIndex(shards=table, dataset=table.about.dataset, digest=table.about.digest)
        _remove_damaged(folder, storage, timeout_s)
    return None


def _open_table(folder: Path, storage: Storage) -> ShardTable | None:
    """The table in a folder; None if the table is damaged, or was just removed by another process."""
    try:
        return ShardTable(folder, source=f"{storage.url}/{INDEX_NAME}")
    except (FileNotFoundError, ShardError):
        return None


def _remove_damaged(folder: Path, storage: Storage, timeout_s: float) -> None:
    """Remove a table that cannot be opened; the next reader makes a new table."""
    if not can_write(folder.parent):
        return
    with locked(folder.parent / ".lock", timeout_s=timeout_s) as lock:
        if lock is not None and _open_table(folder, storage) is None:
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    """Remove a table, unless a process has it open. The caller holds the lock of all tables."""
    with unused(folder / ENTRIES_NAME) as is_unused:
        if is_unused:
            shutil.rmtree(folder, ignore_errors=True)


def _table_folder(url: str, facts: _Facts, cache_folder: Path, validate_hash: str | None) -> Path:
    """Folder of the table for an index with these sizes and tags; the name begins with the kind of checksum."""
    key = json.dumps([_FORMAT, url, *((each.num_bytes, each.tag) if each else None for each in facts)])
    kind = hashlib.blake2b(str(validate_hash).encode(), digest_size=4).hexdigest()
    return cache_folder / _TABLES / f"{kind}-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"


def _make_once(storage: Storage, facts: _Facts, folder: Path, validate_hash: str | None, timeout_s: float) -> bool:
    """Make a missing table; return False if the folder is read-only, or if the index is replaced meanwhile."""
    tables = folder.parent
    if not can_write(tables, tables.parent, tables.parent.parent):
        return False
    with disk_errors(str(tables)):
        tables.mkdir(parents=True, exist_ok=True)
        with locked(tables / ".lock", timeout_s=timeout_s) as lock:
            if lock is None:
                raise StorageError(
                    f"{tables} was held by another process for {timeout_s:g} s: does it still read "
                    f"{storage.url}/{INDEX_NAME}? End that process and try again"
                )
            if (folder / ABOUT_NAME).exists():
                return True
            for left in (folder, *tables.glob(f"{_WRITING}*")):  # leftovers of killed processes
                shutil.rmtree(left, ignore_errors=True)
            _make_table(storage, folder, has_dataset=facts[1] is not None, validate_hash=validate_hash)
            if _facts(storage) != facts:
                _remove_unused(folder)
                return False
            kind = folder.name.partition("-")[0]
            for other in set(tables.glob(f"{kind}-*")) - {folder}:
                _remove_unused(other)  # table of the replaced index
            return True


def _facts(storage: Storage) -> _Facts | None:
    """Sizes and tags of index.json and dataset.json; None if the store fails (reading then raises the error).

    Raises StorageError for a store that throttles or is out of reach: reading would wait again.
    """
    try:
        index = storage.stat(INDEX_NAME)
        if index.num_bytes <= LONG_INDEX_BYTES:
            return index, None
        try:
            return index, storage.stat(DATASET_NAME)
        except ObjectMissingError:
            return index, None
    except StorageError as error:
        if is_throttled(error) or is_out_of_reach(error):
            raise
        return None


def _make_table(storage: Storage, folder: Path, *, has_dataset: bool, validate_hash: str | None) -> None:
    """Write a table atomically."""
    with TemporaryDirectory(prefix=_WRITING, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / "table"
        made.mkdir()
        storage.download(INDEX_NAME, made / ENTRIES_NAME)
        dataset = Path(temporary) / "dataset.json" if has_dataset else None
        if dataset is not None:
            storage.download(DATASET_NAME, dataset)
        write_table(made, dataset=dataset, validate_hash=validate_hash, source=f"{storage.url}/{INDEX_NAME}")
        made.rename(folder)


def _listed(storage: Storage, validate_hash: str | None) -> StoredIndex:
    """The index with all entries in memory."""
    try:
        index = storage.read(INDEX_NAME)
    except ObjectHiddenError:
        raise
    except ObjectMissingError as error:
        raise no_dataset(storage) from error
    try:
        return _parsed(storage, index, validate_hash)
    except ShardError:
        again = storage.read(INDEX_NAME)
        if again == index:
            raise
        return _parsed(storage, again, validate_hash)  # the index was replaced between both reads


def _parsed(storage: Storage, index: bytes, validate_hash: str | None) -> StoredIndex:
    try:
        dataset = storage.read(DATASET_NAME)
    except ObjectMissingError:
        dataset = None
    source = f"{storage.url}/{INDEX_NAME}"
    return StoredIndex(
        shards=ListedShards(parse_index(index, source=source, dataset=dataset, validate_hash=validate_hash)),
        dataset=None if dataset is None else json.loads(dataset),
        digest=hashlib.blake2b(index, digest_size=16).hexdigest(),
    )
