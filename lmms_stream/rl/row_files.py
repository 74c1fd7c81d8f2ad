"""Rows by number: lines of JSON by their offsets, samples of shards; row groups of Parquet are in row_groups.py.

Each file format is a class with the members of RowFile. A file is looked through once when it is opened, and what is
kept of it is a few bytes for many rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..converters.sources.table import BOM, json_row
from ..errors import DataError, ObjectChangedError
from ..mds.core import PackedDataset
from ..mds.streams import StreamConfig
from ..processors.stored_chat import read_chat
from ..storage.disk_errors import disk_errors

STRIDE = 16  # lines for each of which one offset is kept
SCAN_BYTES = 1 << 22
READ_BYTES = 1 << 14
_BLANK = np.frombuffer(b" \t\r\n", np.uint8)
RowOrError = dict[str, Any] | DataError


class RowFile(Protocol):
    """name: as messages call it. digest: names what it holds. folder: what paths of media in its rows start from."""

    name: str
    num_rows: int
    digest: str
    folder: str | None

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        """The rows of these numbers, in this order; threads may call it at once. StorageError."""
        ...


class Lines:
    """A file of JSON lines; blank ones are no rows."""

    def __init__(self, path: Path, *, name: str, folder: str | None):
        self.name = name
        self.folder = folder
        self._path = path
        with disk_errors(name), path.open("rb", buffering=0) as file:
            self._identity = _identity(file)
            self._scan(file)

    def _scan(self, file: IO[bytes]) -> None:
        """Find where each line begins; of every STRIDE-th row keep the offset and the number of its line."""
        digest, offsets, lines = xxhash.xxh3_64(), [], []
        self.num_rows = num_lines = position = 0
        starts = np.zeros(1, np.int64)  # of lines that begin in what is read next
        while chunk := file.read(SCAN_BYTES):
            digest.update(chunk)
            data = np.frombuffer(chunk, np.uint8)
            starts = np.append(starts, position + 1 + np.flatnonzero(data == 10))
            here = starts[starts < position + len(chunk)]
            is_row = np.ones(len(here), bool)
            for index in np.flatnonzero(np.isin(data[here - position], _BLANK)):
                is_row[index] = not _is_blank(file, int(here[index]))
            rows = np.flatnonzero(is_row)
            kept = rows[-self.num_rows % STRIDE :: STRIDE]
            offsets.append(here[kept])
            lines.append(num_lines + kept)
            self.num_rows += len(rows)
            num_lines += len(here)
            position += len(chunk)
            starts = starts[len(here) :]
        self._offsets = np.concatenate([np.zeros(0, np.int64), *offsets])
        self._lines = np.concatenate([np.zeros(0, np.int64), *lines])
        self.digest = f"jsonl:{position}:{digest.hexdigest()}"

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        found: list[RowOrError] = [{}] * len(numbers)
        with disk_errors(self.name), self._path.open("rb", buffering=READ_BYTES) as file:
            if _identity(file) != self._identity:
                raise ObjectChangedError(self.name)
            next_row, num_lines, text = -STRIDE, 0, b""  # the row that follows where the file stands; lines before that
            for at in np.argsort(numbers, kind="stable").tolist():
                number = int(numbers[at])
                if not next_row <= number < next_row + STRIDE:
                    mark = number // STRIDE
                    file.seek(int(self._offsets[mark]))
                    next_row, num_lines = mark * STRIDE, int(self._lines[mark])
                while next_row <= number:
                    text = file.readline()
                    num_lines += 1
                    next_row += not text.isspace()
                found[at] = self._row(text, num_lines)
        return found

    def _row(self, text: bytes, line: int) -> RowOrError:
        row = json_row(line, text.removeprefix(BOM) if line == 1 else text)
        return DataError(f"{self.name}:{line}: {row.error}") if row.values is None else row.values


def _identity(file: IO[bytes]) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_blank(file: IO[bytes], start: int) -> bool:
    """Whether the line that begins there holds white space alone."""
    while piece := os.pread(file.fileno(), READ_BYTES, start):
        line, end, _ = piece.partition(b"\n")
        if line.strip():
            return False
        if end:
            return True
        start += len(piece)
    return True


class Shards:
    """An MDS dataset in a folder or a store; its shards are fetched when rows of them are asked for."""

    def __init__(self, url: str):
        self._dataset = PackedDataset([StreamConfig(remote=url)])
        self._lock = threading.Lock()
        self.name = self._dataset.url
        self.folder: str | None = None
        self.num_rows = self._dataset.num_samples
        digest = xxhash.xxh3_64()
        for info in self._dataset.shard_infos:
            digest.update(f"{info.name}\0{info.size}\0{info.checksum}\0{info.num_samples}\0")
        self.digest = f"mds:{digest.hexdigest()}"

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        with self._lock:
            samples = self._dataset.read(numbers)
        return [self._row(sample, number) for sample, number in zip(samples, numbers.tolist(), strict=True)]

    def _row(self, sample: Any, number: int) -> RowOrError:
        """Of chats that the converter wrote, messages and tools as values."""
        row = dict(sample)
        if not isinstance(row.get("messages"), str):
            return row
        try:
            chat = read_chat(row["messages"])
        except DataError as error:
            return DataError(f"{self.name}: sample {number}: {error}")
        return row | {"messages": chat.messages} | ({"tools": chat.tools} if chat.tools else {})


def needed(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of a file's columns that are asked for; all where none are."""
    return [name for name in names if not columns or name in columns]
