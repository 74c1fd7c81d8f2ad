"""A stored dataset: index, lengths index, and folder on this node. URL -> stored dataset."""

from __future__ import annotations

import copy
import json
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from ..checks import check_fields, local_path
from ..errors import ConfigError, LengthsError, ObjectMissingError, ShardError, StorageError
from ..processors.base import Processor, processor_fingerprint
from ..storage.cache import LocalCache, Wanted, default_cache_folder
from ..storage.eviction import CacheQuota
from ..storage.failures import causes, is_out_of_reach, is_throttled
from ..storage.fetch_config import FetchConfig
from ..storage.local import CopiedFolder, FolderStorage, LocalStorage, can_write
from ..storage.retry import Retry
from ..storage.storage import Storage, open_storage
from .filled_folder import FilledFolder
from .index import DATASET_NAME, INDEX_NAME, is_safe_name
from .lengths import (
    LENGTHS_FOLDER,
    LengthIndex,
    array_matches,
    how_to_index,
    is_description,
    lengths_names,
    parse_description,
    patches_name,
)
from .measuring import kept_lengths, node_folder
from .shard_list import first_parts
from .stored_index import StoredIndex, read_index

logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """Location of a dataset, and settings for copying shards to this node.

    remote: a folder or a URL; local: folder for shards on this node (at least one of both is needed). A remote folder
    is read in place, unless local names another folder. split: a folder below both. retry: replaces the FetchConfig's.
    validate_hash: kind of checksum for checking shards (default: the fastest in the index). keep_zip: keep compressed
    shards next to the plain shards. source: storage to read instead of the URL. num_parts: number of appended parts to
    read of a dataset that has grown (lmms-stream convert --append), 0: no part, None: all parts.
    """

    remote: str | Path | None = None
    local: str | Path | None = None
    split: str | None = None
    retry: Retry | None = None
    validate_hash: str | None = None
    keep_zip: bool = False
    source: Storage | None = None
    num_parts: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, paths=("remote", "local"))

    @property
    def url(self) -> str:
        where = self.remote if self.remote is not None else self.local
        if where is None:
            raise ConfigError("a dataset needs remote (a folder or a URL), or local (a folder that holds all of it)")
        return f"{str(where).rstrip('/')}/{self.split}" if self.split else str(where)

    @property
    def cache_folder(self) -> Path | None:
        if self.local is None:
            return None
        folder = local_path("local", self.local)
        return folder / self.split if self.split else folder


class StoredDataset:
    """The shards listed in the index of a stream, and the lengths of the samples.

    Raises StorageError for a missing or unavailable dataset, ShardError for an unsafe index.
    """

    def __init__(self, stream: StreamConfig, *, config: FetchConfig):
        retry = stream.retry or config.retry
        self.storage: Storage = stream.source or _opened(stream, retry)
        self.url = self.storage.url
        self.cache = LocalCache(self.storage, self._cache_folder(stream), retry=retry, keep_zip=stream.keep_zip)
        self._filled: FilledFolder | None = None
        filled = FilledFolder(self.storage, self.cache.folder, timeout_s=config.timeout_s)
        if stream.source is None and stream.local is not None and self._is_elsewhere:
            self._filled = filled
        opened_s = time.time()
        index = self._index = self._read_index(stream, timeout_s=config.timeout_s)
        self.cache.as_of_s = max(opened_s, index.written_s)
        self._read_parts(stream.num_parts)
        self.node_folder = node_folder(self.cache.folder, index.digest)
        self._descriptions: dict[str, bytes | None] = {}  # of lengths indexes, read by has_lengths
        if self.num_samples == 0:
            raise ShardError(f"{self.url}/{INDEX_NAME} lists no samples: convert the dataset again")
        if stream.source is not None and stream.local is not None:
            filled.claim(index.shards)  # the source writes the index
        self.cache.clean([*self.shard_folders, self.cache.folder / LENGTHS_FOLDER])
        if self._filled is not None:
            self._filled.keep_index(index.digest, index.shards)

    def _read_index(self, stream: StreamConfig, *, timeout_s: float) -> StoredIndex:
        """Read the index; without access to the store, the index of a local folder with the complete dataset."""
        folder = self.cache.folder
        read = partial(read_index, cache_folder=folder, validate_hash=stream.validate_hash, timeout_s=timeout_s)
        try:
            return read(self.storage)
        except StorageError as error:
            cannot_be_asked = any(is_out_of_reach(each) or is_throttled(each) for each in causes(error))
            is_gone = isinstance(error.__cause__, ObjectMissingError)
            if self._filled is None or not (folder / INDEX_NAME).exists() or not (cannot_be_asked or is_gone):
                raise
            if is_gone and self._filled.other_source:
                raise
            self._filled.check_source()
            local = LocalStorage(folder)
            index = read(local)
            read_ones = [info for info in index.shards if info.num_samples]
            if not all((folder / each.name).exists() for info in read_ones for each in (info, info.meta) if each):
                raise
            if is_gone:
                raise StorageError(
                    f"{error}; or, because {folder} holds a whole dataset, leave remote out and name this folder as "
                    "local"
                ) from error
            logger.warning("reading the dataset in %s, which holds all of it: %s", folder, error)
            self.storage, self._filled = local, None
            self.cache = LocalCache(local, folder, retry=self.cache.retry, keep_zip=stream.keep_zip)
            return index

    def _read_parts(self, num_parts: int | None) -> None:
        self.shards = first_parts(self._index.shards, self._index.parts, num_parts, url=self.url)
        self.num_parts = len(self._index.parts) if num_parts is None else num_parts  # number of parts to read
        self._is_cut = len(self.shards) < len(self._index.shards)
        self.num_samples = int(self.shards.samples.sum())

    def as_of(self, num_parts: int) -> StoredDataset:
        """Return the dataset with its first `num_parts` parts only, without opening it again; see StreamConfig."""
        found = copy.copy(self)
        found._read_parts(num_parts)
        return found

    def _cache_folder(self, stream: StreamConfig) -> Path:
        """Folder for copies and pack counts: the folder of the dataset itself only if the folder is writable."""
        folder = stream.cache_folder
        if folder is None or (
            isinstance(self.storage, LocalStorage)
            and folder.absolute() == self.storage.folder.absolute()
            and not _is_writable(folder)
        ):
            return default_cache_folder(self.url)
        return folder

    @property
    def identity(self) -> str:
        """Identity of this dataset's samples, 16 hex digits, computed from the shards' sizes and checksums.

        Copying or renaming shards keeps the identity; writing other shards changes the identity.
        """
        return self.shards.identity

    @property
    def index_digest(self) -> str:
        """Digest of the content of index.json."""
        return self._index.digest

    @property
    def shard_folders(self) -> list[Path]:
        """Folders for copies of the shards on this node."""
        return sorted({self.cache.folder, *(self.cache.folder / folder for folder in self.shards.folders)})

    @property
    def state_folder(self) -> Path:
        """Folder for results computed from this dataset, for example pack counts: the folder of copies if writable."""
        return self.cache.folder if _is_writable(self.cache.folder) else default_cache_folder(self.url)

    @property
    def folder_of_files(self) -> Path:
        """Folder of the shards' files on this node, after fetching."""
        return (
            self.storage.folder if isinstance(self.storage, LocalStorage) and not self.is_copied else self.cache.folder
        )

    @property
    def cache_usage(self) -> int:
        """Bytes of the shards' existing files on this node."""
        names = [name for info in self.shards for name in (info.name, info.zip_name) if name is not None]
        paths = [self.folder_of_files / name for name in names]
        return sum(path.stat().st_size for path in paths if path.exists())

    def limit(self, quota: CacheQuota) -> None:
        """Limit the copies of this dataset by a quota."""
        self.cache.quota = quota

    @property
    def is_copied(self) -> bool:
        """Whether reading the dataset makes copies on this node."""
        return self._is_elsewhere or bool(self.shards.zip_sizes.any())

    @property
    def _is_elsewhere(self) -> bool:
        """Whether no file of the dataset is read in place."""
        return not isinstance(self.storage, LocalStorage)

    def has_lengths(self, processor: Processor) -> bool:
        """Whether a lengths index of this processor exists: next to the shards, or on this node."""
        fingerprint = processor_fingerprint(processor)
        name = lengths_names(fingerprint)[1]
        self._descriptions[name] = self._read(name)
        return self._descriptions[name] is not None or kept_lengths(self.node_folder, fingerprint) is not None

    def length_index(self, processor: Processor | None) -> LengthIndex:
        """The lengths index of a processor, memory-mapped; LengthsError without an index.

        Without a processor: the index written last.
        """
        return self.lengths_of(processor_fingerprint(processor) if processor is not None else self._last_fingerprint())

    def lengths_of(self, fingerprint: str) -> LengthIndex:
        """The lengths index of a fingerprint, memory-mapped; LengthsError without an index."""
        array_name, description_name = lengths_names(fingerprint)
        description = self._descriptions.pop(description_name, None) or self._read(description_name)
        if description is None:
            kept = kept_lengths(self.node_folder, fingerprint)
            if kept is not None:
                return kept
            raise LengthsError(
                f"{self.url} has no lengths index for this processor ({fingerprint}): {self.how_to_index}"
            )
        described = parse_description(description, fingerprint=fingerprint)
        patches_path = None
        if described.patches_hash is not None:
            patches_path = self._fetch_array(patches_name(fingerprint), described.patches_hash, what="its patches")
        array_path = self._fetch_array(array_name, described.content_hash, what="the index")
        if self._filled is not None:
            self._filled.keep(description_name, description)  # last: the description announces the arrays
        found = LengthIndex.open(array_path, description, fingerprint=fingerprint, patches_path=patches_path)
        return found.first(self.num_samples) if self._is_cut else found

    def _fetch_array(self, name: str, content_hash: str, *, what: str) -> Path:
        """Fetch an array of a lengths index to this node. what: kind of array, for the error if the array is missing.

        The name of the copy follows from the content: a rewritten index is not mistaken for the old index. In a filled
        folder (a dataset by itself) the copy has the stored name.
        """
        wanted = Wanted(
            name=name if self._filled is not None else f"{LENGTHS_FOLDER}/{content_hash}.npy",
            identity=content_hash,
            num_bytes=4 * self.num_samples,
            valid=lambda path: array_matches(path, content_hash=content_hash),
            remember=True,
        )
        try:
            path = self.cache.fetch(name, wanted)
        except ObjectMissingError as error:
            raise LengthsError(
                f"{self.url} has the description of a lengths index without {what} ({name}): {self.how_to_index}"
            ) from error
        assert path is not None
        return path

    def _last_fingerprint(self) -> str:
        described = self._read(DATASET_NAME)
        if described is None:
            return self._found_fingerprint()
        try:
            fingerprint = json.loads(described)["lengths"][-1]
        except (LookupError, ValueError) as error:
            raise self._no_lengths() from error
        if not is_safe_name(fingerprint) or "/" in fingerprint:
            raise LengthsError(
                f"{self.url}/{DATASET_NAME} lists {str(fingerprint)[:80]!r}, which is not the plain name of a lengths "
                "index: refused; convert the dataset again"
            )
        return str(fingerprint)

    def _found_fingerprint(self) -> str:
        """Fingerprint of the index next to a plain MDS dataset, which lists no index; in a folder the newest index."""
        found = [each for each in self.storage.list_objects(f"{LENGTHS_FOLDER}/") if is_description(each.key)]
        if not found:
            raise self._no_lengths()
        if isinstance(self.storage, FolderStorage):  # tags of folders are times
            found = [max(found, key=lambda each: int(each.tag))]
        fingerprints = [PurePosixPath(each.key).stem for each in found]
        if len(fingerprints) > 1:
            raise LengthsError(
                f"{self.url} has several lengths indexes ({', '.join(fingerprints)}): pass the processor of the wanted "
                "index (on the command line --tokenizer)"
            )
        return fingerprints[0]

    def _no_lengths(self) -> LengthsError:
        return LengthsError(f"{self.url} lists no lengths index: {self.how_to_index}")

    @property
    def how_to_index(self) -> str:
        """The command that writes a lengths index, for an error."""
        return how_to_index(self.url, self.shards[0].column_names if len(self.shards) else ())

    def _read(self, name: str) -> bytes | None:
        try:
            return self.storage.read(name)
        except ObjectMissingError:
            return None


def _opened(stream: StreamConfig, retry: Retry) -> Storage:
    """Open the store of a stream; a folder is copied if `local` names another folder."""
    storage = open_storage(stream.url, retry=retry)
    if not isinstance(storage, LocalStorage):
        return storage
    folder = stream.cache_folder
    is_elsewhere = stream.remote is not None and folder is not None and folder.resolve() != storage.folder.resolve()
    found: FolderStorage = CopiedFolder(storage.folder) if is_elsewhere else storage
    found.folder = found.folder.absolute()  # the process may change its folder
    return found


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder and in our folders below; missing folders must be creatable."""
    ours = (folder, *(folder / name for name in ("_lmms", "_lmms/counts", "_lmms/orders", LENGTHS_FOLDER)))
    return can_write(*ours)
