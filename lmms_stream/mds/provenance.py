"""Provenance of samples: source and row of each sample; lists that name samples or rows.

Two files beside the shards: `_lmms/provenance.npy`, uint64[num_samples] in shard order, as plain NumPy for memory maps
(the number of the source in the upper 24 bits, the number of the row, from 0, in the lower 40); and
`_lmms/provenance.json` with the names of the sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError, ObjectMissingError, ShardError
from ..plan.lengths import HASH_BYTES
from ..storage.cache import LocalCache, Wanted
from ..storage.local import LocalStorage
from ..storage.storage import Storage
from ..types import StoredObject
from .index import DATASET_NAME
from .lengths import array_matches

PROVENANCE_NAME = "_lmms/provenance.npy"
SOURCES_NAME = "_lmms/provenance.json"
ROW_BITS = 40
MAX_SOURCES = 1 << 23  # a packed number is never a negative int64
_CHUNK = 1 << 20  # samples to search together
_ALIKE = 5  # sources named in an error


class SourceRow(NamedTuple):
    """A row of a source, counted from 1, as in messages of `convert`."""

    source: str
    row: int

    def __str__(self) -> str:
        return f"{self.source}:{self.row}"


def packed_rows(source: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows of a source as values of the array. rows: int64[n], from 0."""
    if source >= MAX_SOURCES:
        raise DataError(f"a conversion takes at most {MAX_SOURCES} sources: convert to several targets and merge them")
    return (source << ROW_BITS) | rows


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Sources of a dataset by number, and the array, which is fetched only on demand.

    num_samples, content_hash: of the array; the hash as hex digits.
    """

    cache: LocalCache
    sources: tuple[str, ...]
    num_samples: int
    content_hash: str

    @staticmethod
    def of(storage: Storage, folder: Path | None = None) -> Provenance | None:
        """Return the provenance of the dataset in a store; None without provenance. folder: for copies (default: the
        dataset's cache).

        Raises ShardError for a damaged description, StorageError.
        """
        try:
            data = storage.read(SOURCES_NAME)
        except ObjectMissingError:
            return None
        try:
            said = json.loads(data)
            return Provenance(
                cache=LocalCache(storage, folder),
                sources=tuple(str(source["name"]) for source in said["sources"]),
                num_samples=int(said["num_samples"]),
                content_hash=bytes.fromhex(said["content_hash"]).hex(),  # for the name of a file on this node
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{storage.url}/{SOURCES_NAME} is damaged ({error!r}): {_REMEDY}") from error

    @cached_property
    def rows(self) -> NDArray[np.uint64]:
        """uint64[num_samples], memory-mapped; a remote array is copied to the cache first. ShardError if damaged."""
        storage = self.cache.storage
        if isinstance(storage, LocalStorage):
            return self._mapped(storage.folder / PROVENANCE_NAME)
        wanted = Wanted(
            name=f"_lmms/provenance-{self.content_hash}.npy",
            identity=self.content_hash,
            num_bytes=8 * self.num_samples,
            valid=lambda path: array_matches(path, content_hash=self.content_hash),
        )
        path = self.cache.fetch(PROVENANCE_NAME, wanted)
        assert path is not None
        return self._mapped(path)

    def source_of(self, sample_id: int) -> SourceRow:
        """Return the source row of a sample; negative ids count from the end. IndexError for an unknown id.

        For a remote dataset only 8 bytes are read, unless the whole array is on this node.
        """
        if not -self.num_samples <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id} of a dataset of {self.num_samples}")
        source, row = divmod(self._row_of(sample_id % self.num_samples), 1 << ROW_BITS)
        if source >= len(self.sources):
            raise ShardError(f"{self._where} names source {source} of {len(self.sources)}: {_REMEDY}")
        return SourceRow(self.sources[source], row + 1)

    def sample_of(self, source: str, row: int) -> NDArray[np.int64]:
        """Ids of the samples made from a row, in order: possibly several, or empty for a row left out.

        source: see `named`; row: counted from 1. Reads the whole array.
        """
        name = self.named(source)
        numbers = [number for number, each in enumerate(self.sources) if each == name]
        wanted = [each for number in numbers if (each := _packed(number, row)) is not None]
        found = [start + np.flatnonzero(np.isin(chunk, np.array(wanted, np.uint64))) for start, chunk in self.chunks()]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def samples_of(self, rows: Sequence[SourceRow]) -> list[list[int]]:
        """Ids of the samples made from each row, in order. Reads the whole array once.

        Sources of rows have the names in `sources`; rows of other sources have no samples.
        """
        numbers: dict[str, int] = {}  # the first number of a source with several entries, for example per slice
        first = np.array([numbers.setdefault(name, n) for n, name in enumerate(self.sources)], np.uint64)
        asked = [_packed(numbers.get(each.source), each.row) for each in rows]
        wanted = np.array([each for each in asked if each is not None], np.uint64)
        ids: dict[int, list[int]] = {}
        for start, chunk in self.chunks():
            named = chunk if len(numbers) == len(self.sources) else renumbered(chunk, first)
            here: NDArray[np.int64] = np.flatnonzero(np.isin(named, wanted))
            for index in here.tolist():
                ids.setdefault(int(named[index]), []).append(start + index)
        return [[] if each is None else ids.get(each, []) for each in asked]

    def named(self, text: str) -> str:
        """Return the source named by a user; see named_source."""
        return named_source(text, self.sources, whole="the dataset")

    def chunks(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield the array piece by piece, each with the id of its first sample."""
        for start in range(0, self.num_samples, _CHUNK):
            yield start, np.asarray(self.rows[start : start + _CHUNK])

    @property
    def _where(self) -> str:
        return f"{self.cache.storage.url}/{PROVENANCE_NAME}"

    def _row_of(self, sample_id: int) -> int:
        storage = self.cache.storage
        if "rows" not in self.__dict__ and not isinstance(storage, LocalStorage):
            stored = self._stored
            if stored.tag:
                at = stored.num_bytes - 8 * (self.num_samples - sample_id)
                data = storage.read_range(PROVENANCE_NAME, start=at, stop=at + 8, tag=stored.tag)
                return int.from_bytes(data, "little")
        return int(self.rows[sample_id])

    @cached_property
    def _stored(self) -> StoredObject:
        """The array in the store, requested once: reading a changed array by its tag is an error."""
        return self.cache.storage.stat(PROVENANCE_NAME)

    def _mapped(self, path: Path) -> NDArray[np.uint64]:
        try:
            array: NDArray[np.uint64] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise ShardError(f"{self._where} cannot be read ({error}): {_REMEDY}") from error
        if array.dtype != np.uint64 or array.shape != (self.num_samples,):
            raise ShardError(
                f"{self._where} should be uint64[{self.num_samples}], found {array.dtype}{list(array.shape)}: {_REMEDY}"
            )
        return array

    def check(self) -> None:
        """Read the whole array; ShardError for a changed file, or a number without a source."""
        path = Path(str(getattr(self.rows, "filename", "")))
        if not array_matches(path, content_hash=self.content_hash):
            raise ShardError(f"{self._where} differs from its checksum in {SOURCES_NAME}: {_REMEDY}")
        for start, chunk in self.chunks():
            wrong = np.flatnonzero(chunk >> np.uint64(ROW_BITS) >= len(self.sources))
            if len(wrong):
                self.source_of(start + int(wrong[0]))


def named_source(text: str, sources: Sequence[str], *, whole: str) -> str:
    """Find the source named by a user: by the name given to `convert`, the path, or the end of the path.

    whole: name of the result of the sources, for errors. ConfigError for no source, or several sources.
    """
    if text in sources:
        return text
    asked, known = str(Path(text).absolute()), dict.fromkeys(sources)
    ends = [name for name in known if "://" not in name and str(Path(name).absolute()) == asked]
    ends = ends or [name for name in known if name.endswith(f"/{text}")]
    if len(ends) == 1:
        return ends[0]
    what = f"{len(ends)} sources end in" if ends else f"{whole} was made of no source"
    listed = ", ".join((ends or list(known))[:_ALIKE]) + (", …" if len(ends or known) > _ALIKE else "")
    raise ConfigError(f"{what} {text!r}: name one of {listed}")


def _packed(source: int | None, row: int) -> int | None:
    """Pack a row of a source, counted from 1, into a value of the array; None for an impossible row."""
    return None if source is None or not 1 <= row <= 1 << ROW_BITS else (source << ROW_BITS) + row - 1


_REMEDY = f"convert the dataset again, or remove both files and their names from {DATASET_NAME}"


def write_provenance(
    folder: Path, rows: Iterable[NDArray[np.integer[Any]]], sources: Sequence[str], *, num_samples: int
) -> tuple[str, str]:
    """Write both files below a folder; return the relative names. rows: arrays with num_samples values in all."""
    (folder / PROVENANCE_NAME).parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    with (folder / PROVENANCE_NAME).open("wb") as file:
        header = {"descr": "<u8", "fortran_order": False, "shape": (num_samples,)}
        np.lib.format.write_array_header_1_0(file, header)
        for array in rows:
            for start in range(0, len(array), _CHUNK):
                data = array[start : start + _CHUNK].astype("<u8").tobytes()
                digest.update(data)
                file.write(data)
    described = {
        "version": 1,
        "num_samples": num_samples,
        "content_hash": digest.hexdigest(),
        "sources": [{"name": name} for name in sources],
    }
    (folder / SOURCES_NAME).write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")
    return PROVENANCE_NAME, SOURCES_NAME


def join_provenance(folder: Path, parts: Sequence[Provenance]) -> tuple[str, str]:
    """Write the provenance of the samples of all parts, in order, below a folder; see write_provenance.

    A source of several parts is listed once.
    """
    sources = tuple(dict.fromkeys(name for part in parts for name in part.sources))
    numbers = {name: number for number, name in enumerate(sources)}
    rows = (
        renumbered(chunk, np.array([numbers[name] for name in part.sources], np.uint64))
        for part in parts
        for _, chunk in part.chunks()
    )
    return write_provenance(folder, rows, sources, num_samples=sum(part.num_samples for part in parts))


def renumbered(rows: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Renumber the sources of rows: the i-th source becomes numbers[i]."""
    bits = np.uint64(ROW_BITS)
    sources: NDArray[np.uint64] = numbers[rows >> bits] << bits
    return sources | (rows & np.uint64((1 << ROW_BITS) - 1))


# Lines of a list of samples, such as a drop list -> names of samples or rows.


DATASET = "dataset"  # key of a line: the identity of the dataset; a run writes it


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedSample:
    """Line of a list. name: of a source or a file; "" for a line without a name. number: of a sample, or of a row.

    is_id: the line is JSON with source and sample_id, written by a run, not a row of a file. where: place of the line,
    for errors. dataset: identity of the dataset with the sample, if present in the line.
    """

    name: str
    number: int
    is_id: bool
    where: str
    dataset: str | None = None


def listed_samples(file: str | Path) -> Iterator[ListedSample]:
    """Yield the lines of a drop list: `SOURCE:ID`, `ID`, `FILE:ROW`, or JSON with source and sample_id.

    Empty lines and lines that begin with # are ignored. ConfigError for an unreadable file, and for a line without a
    sample.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the drop list {file} cannot be read ({error}): name a text file") from error
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            yield _listed(line, where=f"{file}, line {number}")


def _listed(line: str, *, where: str) -> ListedSample:
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            source, sample_id, dataset = str(entry["source"]), int(entry["sample_id"]), entry.get(DATASET)
            return ListedSample(name=source, number=sample_id, is_id=True, where=where, dataset=dataset)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{where}: {line} is no JSON with source and sample_id ({error!r})") from error
    name, _, number = line.rpartition(":")
    if not number.isdecimal():
        raise ConfigError(f"{where}: {line!r} names no sample: write SOURCE:ID, or FILE:ROW")
    return ListedSample(name=name, number=int(number), is_id=False, where=where)


# The small files that describe a stored dataset: index.json, and dataset.json if written by a conversion.
