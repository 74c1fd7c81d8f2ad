"""Rows by number: lines of JSON by their offsets, samples of shards; row groups of Parquet are in row_groups.py.

Each file format is a class with the members of RowFile. A file is scanned once when it is opened; its index takes a few
bytes per several rows.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...converters.sources.files import StoredFile, content_digest, identity, sampled_digest
from ...converters.sources.table import BOM, json_row
from ...errors import DataError, ObjectChangedError, if_lfs_pointer
from ...mds.core import PackedDataset
from ...mds.streams import StreamConfig
from ...processors.json_text import parsed_all
from ...processors.stored_chat import read_chat
from ...storage.failures import disk_errors
from ...storage.fetch_config import FetchConfig

STRIDE = 8
BLOCK_BYTES = 1 << 14
SCAN_BYTES = 1 << 22
_IS_WHITE = np.array([bytes([byte]).isspace() for byte in range(256)])
RowOrError = dict[str, Any] | DataError


class RowFile(Protocol):
    """Rows of a file by number. name: name in messages. folder: base of relative media paths in its rows.

    digest: identifies the content, from samples of a large file. old_digest: its digest in states of earlier releases,
    computed from less content. all_bytes: digest of the full content, which is read for it; None if it needs a
    download.
    """

    name: str
    num_rows: int
    folder: str | None

    @property
    def digest(self) -> str: ...

    @property
    def old_digest(self) -> str: ...

    @property
    def all_bytes(self) -> str | None: ...

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        """Return the rows with these numbers, in this order; safe to call from several threads. StorageError."""
        ...


class Lines:
    """A file of JSON lines; blank lines are not rows.

    Marks: the offsets of every STRIDE-th row and of the first row that begins in each BLOCK_BYTES of the file. To read
    a row, the file is read from the row's mark to the next mark.
    """

    def __init__(self, spans: Spans, *, name: str, folder: str | None):
        self.name = name
        self.folder = folder
        self._spans = spans
        with disk_errors(name), spans.open() as file:
            self._scan(file)

    def _scan(self, file: IO[bytes]) -> None:
        digest, marks = xxhash.xxh3_64(), [np.zeros((3, 0), np.int64)]
        self.num_rows = num_lines = position = 0
        starts = np.zeros(1, np.int64)  # offsets of lines not counted yet
        last_block = -1  # last block with the start of a row
        while chunk := file.read(SCAN_BYTES):
            digest.update(chunk)
            if not position and (problem := if_lfs_pointer(chunk)):
                raise DataError(f"{self.name} {problem}")
            if not position and chunk.startswith(BOM):
                chunk = chunk.replace(BOM, b" " * len(BOM), 1)  # a line with only a mark is blank
            data = np.frombuffer(chunk, np.uint8)
            starts = np.append(starts, position + 1 + np.flatnonzero(data == 10))
            here = starts[starts < position + len(chunk)]
            is_row = _tell_rows(chunk, data, np.maximum(here - position, 0))
            here = here[: len(is_row)]
            lines = np.flatnonzero(is_row)
            numbers, blocks = self.num_rows + np.arange(len(lines)), here[lines] // BLOCK_BYTES
            kept = np.flatnonzero((numbers % STRIDE == 0) | (np.diff(blocks, prepend=last_block) != 0))
            marks.append(np.stack([numbers[kept], here[lines[kept]], num_lines + lines[kept]]))
            self.num_rows += len(lines)
            num_lines += len(here)
            position += len(chunk)
            last_block = int(blocks[-1]) if len(blocks) else last_block
            starts = starts[len(here) :]
        self._rows = _small(np.concatenate([each[0] for each in marks]))
        self._offsets = _small(np.concatenate([*(each[1] for each in marks), [position]]))
        self._has_blank = num_lines != self.num_rows
        self._lines_before = np.concatenate([each[2] for each in marks]) if self._has_blank else self._rows
        self.digest = self.old_digest = self.all_bytes = f"jsonl:{position}:{digest.hexdigest()}"

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        if len(numbers) > 1 and np.any(np.diff(numbers) < 0):
            order = np.argsort(numbers, kind="stable")
            return scattered(self._read_ascending(numbers[order]), order)
        return self._read_ascending(numbers)

    def _read_ascending(self, ordered: NDArray[np.int64]) -> list[RowOrError]:
        marks = np.searchsorted(self._rows, ordered.astype(self._rows.dtype), side="right") - 1
        begins = self._begins(marks)
        ends = np.append(begins[1:], len(marks))
        starts, stops = self._offsets[marks[begins]], self._offsets[marks[ends - 1] + 1]
        indices = (ordered - np.repeat(self._rows[marks[begins]].astype(np.int64), ends - begins)).tolist()
        texts: list[bytes] = []
        read = self._spans.read([*zip(starts.tolist(), stops.tolist(), strict=True)])
        for data, begin, end in zip(read, begins.tolist(), ends.tolist(), strict=True):
            texts += self._texts(data, indices[begin:end])
        return self._parsed(texts, ordered, marks)

    def _begins(self, marks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices into `marks` (ascending) at which another span begins."""
        starts, stops = self._offsets[marks].astype(np.int64), self._offsets[marks + 1].astype(np.int64)
        far = starts[1:] - stops[:-1] > self._spans.gap
        large = np.diff(starts // self._spans.together) != 0
        return np.concatenate([[0], 1 + np.flatnonzero(far | large)]) if len(marks) else np.zeros(0, np.int64)

    def _texts(self, data: bytes, indices: list[int]) -> list[bytes]:
        """Return rows of the data just read, by ascending index within it."""
        if self._has_blank:
            lines = [line for line in data.split(b"\n") if line and not line.isspace()]
        else:
            lines = data.split(b"\n", indices[-1] + 1)
        return [lines[index] for index in indices]

    def _parsed(self, texts: list[bytes], numbers: NDArray[np.int64], marks: NDArray[np.int64]) -> list[RowOrError]:
        """Parse all rows together; if this fails, each row separately."""
        try:
            rows = parsed_all(texts)
        except ValueError:
            rows = []
        if {*map(type, rows)} == {dict}:
            return rows
        return [self._row(*each) for each in zip(texts, numbers.tolist(), marks.tolist(), strict=True)]

    def _row(self, text: bytes, number: int, mark: int) -> RowOrError:
        row = json_row(0, text.removeprefix(BOM) if number == 0 else text)
        if row.values is not None:
            return row.values
        return DataError(f"{self.name}:{self._line(number, mark)}: {row.error}")

    def _line(self, number: int, mark: int) -> int:
        """Return the line number of a row, from 1."""
        first = int(self._lines_before[mark])
        if not self._has_blank:
            return number + 1
        (data,) = self._spans.read([(int(self._offsets[mark]), int(self._offsets[mark + 1]))])
        rows = [index for index, line in enumerate(data.split(b"\n")) if line and not line.isspace()]
        return first + rows[number - int(self._rows[mark])] + 1


def _small(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Return ascending numbers as uint32 if they fit, which halves the memory."""
    return numbers.astype(np.uint32) if not len(numbers) or numbers[-1] < 1 << 32 else numbers


def _tell_rows(chunk: bytes, data: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each line is a row (not blank); omit the last line if the chunk ends before this is known."""
    is_row: NDArray[np.bool_] = ~_IS_WHITE[data[starts]]
    for index in np.flatnonzero(~is_row).tolist():
        end = chunk.find(b"\n", int(starts[index]))
        is_row[index] = bool(chunk[int(starts[index]) : end if end >= 0 else None].strip())
        if end < 0 and not is_row[index]:
            return is_row[:index]
    return is_row


class Shards:
    """An MDS dataset in a folder or a store; a shard is fetched when its rows are requested."""

    def __init__(self, url: str, fetch: FetchConfig | None = None):
        self._dataset = PackedDataset([StreamConfig(remote=url)], fetch=fetch)
        self._lock = threading.Lock()
        self.name = self._dataset.url
        self.folder: str | None = None
        self.num_rows = self._dataset.num_samples
        digest = xxhash.xxh3_64()
        for info in self._dataset.shard_infos:
            digest.update(f"{info.name}\0{info.size}\0{info.checksum}\0{info.num_samples}\0".encode())
        self.old_digest = f"mds:{digest.hexdigest()}"

    @cached_property
    def digest(self) -> str:
        """The old digest, followed by content samples of the first, middle and last shard without a checksum."""
        infos = self._dataset.shard_infos
        unnamed = [number for number, info in enumerate(infos) if info.checksum is None]
        if not unnamed:
            return self.old_digest
        chosen = dict.fromkeys([unnamed[0], unnamed[len(unnamed) // 2], unnamed[-1]])
        with self._lock, disk_errors(self.name):
            paths = [self._dataset.reader.shard(number).path for number in chosen]
            return ":".join([self.old_digest, *map(sampled_digest, paths)])

    @cached_property
    def all_bytes(self) -> str | None:
        """The old digest, followed by content digests of shards without checksums; None if they need a download."""
        infos, stored = self._dataset.shard_infos, self._dataset.one
        unnamed = [info for info in infos if info.checksum is None]
        if unnamed and stored.is_copied:
            return None
        with disk_errors(self.name):
            return ":".join(
                [self.old_digest, *(content_digest(stored.folder_of_files / each.name) for each in unnamed)]
            )

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        with self._lock:
            samples: list[Any] = self._dataset.read(numbers)
        if not any("messages" in sample for sample in samples):
            return samples
        return [self._row(sample, number) for sample, number in zip(samples, numbers.tolist(), strict=True)]

    def _row(self, row: dict[str, Any], number: int) -> RowOrError:
        """Return the row with messages and tools as values, for chats written by the converter."""
        if not isinstance(row.get("messages"), str):
            return row
        try:
            chat = read_chat(row["messages"])
        except DataError as error:
            return DataError(f"{self.name}: sample {number}: {error}")
        return row | {"messages": chat.messages} | ({"tools": chat.tools} if chat.tools else {})


class WithColumns:
    """A RowFile with additional columns of constant values; a row's own columns take precedence."""

    def __init__(self, file: RowFile, columns: Mapping[str, Any]):
        self.name, self.num_rows, self.folder = file.name, file.num_rows, file.folder
        self._file = file
        self._columns = columns

    @property
    def digest(self) -> str:
        return self._file.digest

    @property
    def old_digest(self) -> str:
        return self._file.old_digest

    @property
    def all_bytes(self) -> str | None:
        return self._file.all_bytes

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        return [row if isinstance(row, DataError) else {**self._columns, **row} for row in self._file.read(numbers)]


def scattered(rows: list[RowOrError], order: NDArray[np.int64]) -> list[RowOrError]:
    """Return rows placed at the indices in `order`."""
    found: list[RowOrError] = [{}] * len(rows)
    for index, row in zip(order.tolist(), rows, strict=True):
        found[index] = row
    return found


def needed(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the requested columns of a file, or all columns if `columns` is empty.

    If the first column, the prompt's, is missing, return all columns; the error then lists them.
    """
    if not columns or columns[0] not in names:
        return [*names]
    return [name for name in names if name in columns]


# Bytes of a file between offsets: of a file on this node, or of an object in a store with byte ranges. Each reader has
# the members of Spans and raises ObjectChangedError if the file's content changes.

Span = tuple[int, int]  # the first byte, and one past the last
LOCAL_BYTES, REQUEST_BYTES = 1 << 20, 1 << 23  # maximum bytes of spans read together
GAP_BYTES = 1 << 18  # unneeded bytes read to save a request
THREADS = 16  # simultaneous requests


class Spans(Protocol):
    """Reader of spans. together: maximum bytes of one read; gap: maximum bytes between two spans read together."""

    together: int
    gap: int

    def open(self) -> IO[bytes]:
        """Open the full content for one sequential read."""
        ...

    def read(self, spans: Sequence[Span]) -> list[bytes]: ...


class LocalSpans:
    together = LOCAL_BYTES
    gap = 0

    def __init__(self, path: Path, *, name: str):
        self._path = path
        self._name = name
        with disk_errors(name):
            self._identity = identity(path.stat())

    def open(self) -> IO[bytes]:
        return self._path.open("rb", buffering=0)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        with disk_errors(self._name):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if identity(os.fstat(file)) != self._identity:
                    raise ObjectChangedError(self._name)
                found = [os.pread(file, stop - start, start) for start, stop in spans]
            finally:
                os.close(file)
        if any(len(data) != stop - start for data, (start, stop) in zip(found, spans, strict=True)):
            raise ObjectChangedError(self._name)
        return found


class StoredSpans:
    together = REQUEST_BYTES
    gap = GAP_BYTES

    def __init__(self, file: StoredFile):
        self._file = file

    def open(self) -> IO[bytes]:
        return io.BufferedReader(self._file.open_raw(), REQUEST_BYTES)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        if len(spans) == 1:
            return [self._file.request(*spans[0])]
        with ThreadPoolExecutor(min(THREADS, len(spans)), thread_name_prefix="lmms_stream-rl-ranges") as pool:
            return [*pool.map(lambda span: self._file.request(*span), spans)]
