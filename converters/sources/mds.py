"""Stored MDS datasets -> units: all or selected samples of a shard.

Without settings for their rows, samples are moved: their stored bytes are copied.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError
from ...mds.index import INDEX_NAME, ShardInfo, read_listing
from ...mds.shard import Shard, fetch_shard
from ...processors.media.facts import FACT_TYPES, SOUND_OF_VIDEO, MediaPart, media_part
from ...processors.media.types import INTERVAL_KEYS
from ...processors.stored_chat import read_chat, read_preference
from ...storage.cache import LocalCache
from ...storage.local import LocalStorage
from ...storage.storage import Storage, shared_storage
from .table import Location, TableSource
from .units import Row, Unit

_NOT_ASKED = "convert its files instead, or write them with MDSWriter"


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """A dataset, from its index and description.

    schema: name in the description; None for a dataset of another program. digest: of its index.json.
    """

    storage: Storage
    shards: tuple[ShardInfo, ...]
    schema: str | None
    digest: str

    @staticmethod
    def read(storage: Storage) -> DatasetFiles | None:
        """Return the dataset in a store; None without a dataset.

        Raise ShardError for an unsafe index, DataError for shards with different columns or of other formats than MDS.
        """
        listing = read_listing(storage)
        if listing is None or not _is_index(listing.index):
            return None
        shards = listing.shards()
        _check_shards(storage.url, shards)
        schema = None if listing.dataset is None else json.loads(listing.dataset).get("schema")
        digest = xxhash.xxh3_128(listing.index).hexdigest()
        return DatasetFiles(storage=storage, shards=shards, schema=schema, digest=digest)

    @property
    def num_samples(self) -> int:
        return sum(info.num_samples for info in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(info.size for info in self.shards)

    def identity(self, name: str) -> dict[str, Any]:
        """Values that change with the content: for shards without a checksum, size and time, or the store's tag."""
        digest = xxhash.xxh3_64(self.digest.encode())
        unchecked = [info.zip_name or info.name for info in self.shards if info.checksum is None]
        is_asked = unchecked and not isinstance(self.storage, LocalStorage)  # files of a folder are looked at at once
        listed = {file.key: file for file in self.storage.list_objects("")} if is_asked else {}
        for key in unchecked:
            found = listed.get(key)
            if found is None or not found.tag:  # some stores list only names
                found = self.storage.stat(key)
            digest.update(f"{found.key}\0{found.num_bytes}\0{found.tag}\0".encode())
        return {"name": name, "num_files": len(self.shards), "size": self.num_bytes, "tag": digest.hexdigest()}


def _is_index(data: bytes) -> bool:
    """Return whether an index.json belongs to a dataset: other programs also use this name."""
    try:
        index = json.loads(data)
    except ValueError:
        return False
    return isinstance(index, dict) and {"version", "shards"} <= index.keys()


def _check_shards(url: str, shards: Sequence[ShardInfo]) -> None:
    for info in shards:
        if info.meta is not None:
            raise DataError(f"{url}/{info.name} is a shard of {info.format}, which is not moved: {_NOT_ASKED}")
        if info.columns != shards[0].columns:
            raise DataError(
                f"{url}/{info.name} has the columns {info.shown_columns}, and {shards[0].name} has "
                f"{shards[0].shown_columns}: convert them as separate datasets"
            )
        if list(info.column_names) != sorted(info.column_names):
            raise DataError(
                f"{url}/{info.name} has its columns in the order {', '.join(info.column_names)}, but MDSWriter sorts "
                "columns by name: write the dataset again with MDSWriter"
            )


def datasets_below(keys: Sequence[str]) -> list[str]:
    """Return the folders with an index.json next to shards, without the top folder.

    >>> datasets_below(["train/index.json", "train/shard.00000.mds", "x/index.json"])
    ['train']
    """
    shards = {key.rpartition("/")[0] for key in keys if ".mds" in key.rpartition("/")[2]}
    return sorted(folder for key in keys if key.endswith(f"/{INDEX_NAME}") and (folder := key[:-11]) in shards)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardSamples:
    """Samples of a shard. numbers: int64[n], ascending, positions in the shard. num_rows: samples of the dataset from
    the end of the previous unit to the end of this unit. first: row number of the shard's first sample in this unit.

    is_moved: rows are the unchanged samples, with their bytes; else rows are made from the samples. scratch: folder for
    downloads, which are removed after reading the samples.
    """

    url: str
    info: ShardInfo
    schema: str | None
    numbers: NDArray[np.int64]
    first: int
    num_rows: int
    scratch: Path
    is_moved: bool = False
    folder: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.info.size * len(self.numbers) // max(1, self.info.num_samples)

    @property
    def columns(self) -> dict[str, str]:
        """Column -> MDS encoding."""
        return self.info.encodings

    def moved(self) -> ShardSamples:
        """Return the source of the same samples, stored again unchanged."""
        return replace(self, is_moved=True)

    @contextmanager
    def shard(self) -> Iterator[Shard]:
        """Open the shard with checks; a local file is read in place, a remote file is fetched and removed again."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"shard-{uuid.uuid4().hex}-", dir=self.scratch) as folder:
            yield Shard(fetch_shard(LocalCache(shared_storage(self.url), Path(folder)), self.info), self.info)

    @property
    def file(self) -> Path | None:
        """Path of a local, uncompressed shard; None for other shards."""
        storage = shared_storage(self.url)
        if not isinstance(storage, LocalStorage) or self.info.zip_name is not None:
            return None
        return (storage.folder / self.info.name).absolute()

    def rows(self) -> Iterator[Row]:
        if not len(self.numbers):
            return
        with self.shard() as shard:
            for number in self.numbers.tolist():
                sample = shard[number]
                if self.is_moved:
                    stored = bytes(shard.stored(number, number + 1))
                    yield Row(self.first + number, sample, stored=stored)
                else:
                    yield self._row(self.first + number, sample)

    def _row(self, number: int, sample: dict[str, Any]) -> Row:
        try:
            return Row(number, row_of(sample, self.schema))
        except DataError as error:
            return Row(number, None, str(error))

    def count(self) -> int:
        return self.num_rows


class StoredTable:
    """Samples of a dataset, or of some ids, in order. ids: int64[n], ascending."""

    def __init__(self, dataset: DatasetFiles, location: Location, ids: NDArray[np.int64] | None = None):
        self._dataset = dataset
        self._location = location
        self._ids = ids

    def num_rows(self) -> int:
        return self._dataset.num_samples

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        dataset = self._dataset
        stop = dataset.num_samples if stop is None else min(stop, dataset.num_samples)
        shard_start, done = 0, start  # id of the shard's first sample; number of the dataset's rows in earlier units
        for info in dataset.shards:
            end = shard_start + info.num_samples
            numbers = self._wanted(max(start, shard_start), min(stop, end)) - shard_start
            if len(numbers):
                covered = min(stop, end)
                yield ShardSamples(
                    url=dataset.storage.url,
                    info=info,
                    schema=dataset.schema,
                    numbers=numbers,
                    first=shard_start - done,
                    num_rows=covered - done,
                    scratch=self._location.scratch,
                )
                done = covered
            shard_start = end

    def _wanted(self, start: int, stop: int) -> NDArray[np.int64]:
        if self._ids is None:
            return np.arange(start, stop)
        return self._ids[np.searchsorted(self._ids, start) : np.searchsorted(self._ids, max(start, stop))]


class StoredSource(TableSource):
    """A stored dataset. location: of its table; `select` makes a new table."""

    dataset: DatasetFiles
    location: Location

    def select(self, ids: NDArray[np.int64]) -> None:
        """Keep only samples with these ids, ascending; DataError for an id outside of the dataset."""
        wrong = ids[(ids < 0) | (ids >= self.dataset.num_samples)]
        if len(wrong):
            raise DataError(
                f"{self.name} has no sample {wrong[0]}: the ids of its samples are 0 to {self.dataset.num_samples - 1}"
            )
        self._open_table = partial(StoredTable, self.dataset, self.location, ids)
        self.identity = {**self.identity, "ids": xxhash.xxh3_64(ids.tobytes()).hexdigest()}


def read_ids(path: Path) -> NDArray[np.int64]:
    """Return sample ids from a file: one per line, or a .npy array of integers; int64[n], ascending.

    DataError for an invalid id, and for a repeated id.
    """
    try:
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        else:
            ids = np.array([int(line) for line in path.read_text().split()], np.int64)
    except (ValueError, OverflowError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} holds no ids ({error}): write one number a line, or a .npy array of int64") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): name a file of ids, one a line, or .npy") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise DataError(f"{path} holds {ids.dtype}{list(ids.shape)}, expected ids: one number a line, or int64[n]")
    ids = np.sort(ids.astype(np.int64))
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise DataError(f"{path} holds the id {twice[0]} twice: a sample is taken once, in the order of its dataset")
    return ids


# A stored sample -> a row whose conversion gives the sample again. Pure.
#
# Chats become rows in OpenAI's format: `messages`, maybe `tools`, and media parts {"type": "image_url", "image_url":
# {"url": …}}. Keys keep their order: the stored text is equal byte for byte.

Refer = Callable[[MediaPart], Any]  # media -> their reference in the row: bytes, a path, a data URL


def _as_bytes(part: MediaPart) -> Any:
    return part.data


def row_of(sample: Mapping[str, Any], schema: str | None, *, refer: Refer = _as_bytes) -> dict[str, Any]:
    """Return the row of a sample: the source form for `messages`, `preference` and `image`, else the columns.

    DataError for an unreadable chat.
    """
    if schema == "messages":
        others = {name: value for name, value in sample.items() if name not in ("messages", "media")}
        return {**_chat_row(sample, refer), **others}
    if schema == "preference":
        others = {name: value for name, value in sample.items() if name not in ("messages", "media")}
        return {**_preference_row(sample, refer), **others}
    if schema == "image":
        part = MediaPart(kind="image", mime="", data=sample["image"])
        return {name: value for name, value in sample.items() if name != "facts"} | {"image": refer(part)}
    return dict(sample)


def _chat_row(sample: Mapping[str, Any], refer: Refer) -> dict[str, Any]:
    chat = read_chat(sample["messages"])
    media = sample["media"]
    return {"messages": _messages(chat.messages, media, refer)} | ({"tools": chat.tools} if chat.tools else {})


def _preference_row(sample: Mapping[str, Any], refer: Refer) -> dict[str, Any]:
    found = read_preference(sample["messages"])
    if isinstance(found.prompt, str):  # texts have no column for their common beginning
        return {name: f"{found.prompt}{text}" for name, text in found.answers.items()}
    lists = {"prompt": found.prompt, **found.answers}
    row: dict[str, Any] = {
        "completion" if name == "answer" else name: _messages(messages, sample["media"], refer)
        for name, messages in lists.items()
    }
    said = {} if found.label is None else {"label": found.label}
    return row | said | ({"tools": found.tools} if found.tools else {})


def _messages(messages: Any, media: bytes, refer: Refer) -> list[dict[str, Any]]:
    return [
        message | {"content": [_part(part, media, refer) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: dict[str, Any], media: bytes, refer: Refer) -> dict[str, Any]:
    """Return a part of a row. Keys of the row come before `mime` in a stored part; an interval after `mime` came with
    the URL.
    """
    if part["type"] == "text":
        return part
    found = media_part(part, media)
    names = list(part)
    behind = names[names.index("mime") :] if "mime" in names else []
    source = {"url": refer(found)} | {name: part[name] for name in INTERVAL_KEYS if name in behind}
    facts = FACT_TYPES[found.kind]._fields if found.kind in FACT_TYPES else ()
    ours = {"mime", "span", *facts, *SOUND_OF_VIDEO, *behind}
    said = {name: value for name, value in part.items() if name not in ours}
    key = f"{found.kind}_url"
    return said | {"type": key, key: source}
