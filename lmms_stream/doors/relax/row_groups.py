"""Rows of a Parquet file by number, in memory that does not grow with the file.

A row group cannot be read from its middle. Each row group is therefore decoded once, batch by batch, into a
memory-mapped and already unlinked file of Arrow batches in the system's temporary folder (TMPDIR). The kernel drops its
pages if memory is short and removes the file when the process ends, even if it is killed.
"""

from __future__ import annotations

import resource
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow
import xxhash
from numpy.typing import NDArray

from ...converters.sources.arrow import (
    STEP_BYTES,
    arrow_errors,
    check_columns,
    open_parquet,
    python_values,
    row_group_batches,
)
from ...converters.sources.arrow_values import Convert, converters
from ...converters.sources.files import File, LocalFile, content_digest, sampled_digest_of
from ...errors import DataError, ObjectChangedError, if_lfs_pointer
from ...storage.failures import disk_errors
from .row_files import RowOrError, needed, scattered

MAX_OPEN_GROUPS = 4096  # each takes a file descriptor
FOOTER_BYTES = 8  # the length of the metadata, and PAR1


class _MappedGroup:
    """A row group as memory-mapped batches."""

    def __init__(self, reader: Any):
        self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])
        self._columns: dict[str, Convert] = converters(reader.schema)

    def rows(self, indices: NDArray[np.int64]) -> list[dict[str, Any] | str]:
        """Return rows of the group by ascending index; the reason as text for a row without a Python form."""
        found: list[dict[str, Any] | str] = []
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            batch = self._batches[number]
            inside = indices[numbers == number] - self._ends[number] + batch.num_rows
            found += python_values(_taken(batch, inside), self._columns)
        return found


def _taken(batch: Any, indices: NDArray[np.int64]) -> Any:
    first, num_rows = int(indices[0]), len(indices)
    if indices[-1] - first + 1 == num_rows and not np.any(np.diff(indices) != 1):
        return batch.slice(first, num_rows)
    try:
        return batch.take(pyarrow.array(indices))
    except pyarrow.ArrowNotImplementedError:  # some types do not support take
        slices = [batch.slice(index, 1) for index in indices.tolist()]
        return pyarrow.Table.from_batches(slices)


class ParquetRows:
    """A RowFile of Parquet. columns: columns to read; all if empty."""

    def __init__(self, file: File, *, name: str, folder: str | None, columns: Sequence[str] = ()):
        self.name = name
        self.folder = folder
        self._file = file
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _MappedGroup] = OrderedDict()
        self._max_open = max(8, min(MAX_OPEN_GROUPS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        with disk_errors(name), arrow_errors(name, "Parquet"), file.open_raw() as stream:
            self._key = file.key
            is_short = file.num_bytes < 1024  # pointer files are short; avoid a request for other files in stores
            if is_short and (problem := if_lfs_pointer(stream.read(64))):
                raise DataError(f"{name} {problem}")
            self.old_digest = _footer_digest(stream)
            self.digest = f"{self.old_digest}:{sampled_digest_of(stream, first_piece=2)}"
            with open_parquet(file) as parquet:
                check_columns(parquet.schema_arrow.names, name)
                self._columns = needed(columns, parquet.schema_arrow.names)
                groups = [parquet.metadata.row_group(group) for group in range(parquet.metadata.num_row_groups)]
                self._ends = np.cumsum([0, *(group.num_rows for group in groups)])
        self.num_rows = int(self._ends[-1])

    @cached_property
    def all_bytes(self) -> str | None:
        """Digest of the full content of a local file; None for a file in a store."""
        if not isinstance(self._file, LocalFile):
            return None
        with disk_errors(self.name):
            found = content_digest(self._file.path)
        if self._file.key != self._key:
            raise ObjectChangedError(self.name)
        return f"parquet:{found}"

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        order = np.argsort(numbers, kind="stable")
        return scattered(self._read_ascending(numbers[order]), order)

    def _read_ascending(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        groups = np.searchsorted(self._ends, numbers, side="right") - 1
        found: list[dict[str, Any] | str] = []
        with self._lock, disk_errors(self.name), arrow_errors(self.name, "Parquet"):
            for group in np.unique(groups).tolist():
                found += self._group(group).rows(numbers[groups == group] - self._ends[group])
        return [
            row if not isinstance(row, str) else DataError(f"{self.name}:{number + 1}: {row}")
            for row, number in zip(found, numbers.tolist(), strict=True)
        ]

    def _group(self, number: int) -> _MappedGroup:
        if number not in self._open:
            if len(self._open) >= self._max_open:
                self._open.popitem(last=False)
            self._open[number] = self._decoded(number)
        self._open.move_to_end(number)
        return self._open[number]

    def _decoded(self, number: int) -> _MappedGroup:
        if self._file.key != self._key:
            raise ObjectChangedError(self.name)
        with (
            tempfile.NamedTemporaryFile(prefix="lmms_stream-rows-") as spooled,
            closing(row_group_batches(self._file, [number], columns=self._columns)) as batches,
        ):
            writer = None
            for batch in _in_large_batches(map(_without_dictionaries, batches)):
                writer = writer or pyarrow.ipc.new_file(spooled, batch.schema)
                writer.write_batch(batch)
            assert writer is not None
            writer.close()
            spooled.flush()
            pyarrow.default_memory_pool().release_unused()  # memory of the decoder: a row group may be a whole file
            return _MappedGroup(pyarrow.ipc.open_file(pyarrow.memory_map(spooled.name)))


def _in_large_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the same rows in batches of about STEP_BYTES, because rows of large batches are taken faster."""
    together: list[Any] = []
    for batch in batches:
        together.append(batch)
        if sum(each.nbytes for each in together) >= STEP_BYTES:
            yield from pyarrow.Table.from_batches(together).combine_chunks().to_batches()
            together = []
    if together:
        yield from pyarrow.Table.from_batches(together).combine_chunks().to_batches()


def _footer_digest(file: Any) -> str:
    """Return a digest of the metadata at the end of a file: sizes, offsets and statistics of all columns."""
    num_bytes = file.seek(0, 2)
    file.seek(max(0, num_bytes - FOOTER_BYTES))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, num_bytes - FOOTER_BYTES - length))
    return f"parquet:{num_bytes}:{xxhash.xxh3_64_hexdigest(file.read(length))}"


def _without_dictionaries(batch: Any) -> Any:
    """Replace dictionary arrays with their values, because batches of a file do not share dictionaries."""
    arrays = [
        array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array for array in batch.columns
    ]
    fields = [field.with_type(array.type) for field, array in zip(batch.schema, arrays, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=pyarrow.schema(fields, metadata=batch.schema.metadata))
