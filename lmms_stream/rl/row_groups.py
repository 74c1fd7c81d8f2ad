"""Rows of a Parquet file by number, in memory that does not grow with the file.

A row group cannot be read from its middle. So each is decoded once, batch by batch, into a file of Arrow batches that
is mapped into memory and has no name any more: the kernel drops its pages when memory is short, and it is gone when
the process ends, however that ends. It lies in the system's temporary folder (TMPDIR).
"""

from __future__ import annotations

import bisect
import resource
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import xxhash
from numpy.typing import NDArray

from ..converters.sources.arrow import STEP_BYTES, STEP_ROWS, arrow_errors, check_columns, python_rows
from ..converters.sources.arrow_values import Convert, converters
from ..errors import DataError
from ..storage.disk_errors import disk_errors
from .row_files import RowOrError, needed

MAX_OPEN_GROUPS = 4096  # each takes a file descriptor
FOOTER_BYTES = 8  # the length of the metadata, and PAR1


class _OpenGroup:
    """A row group as mapped batches. ends: how many rows there are up to the end of each batch."""

    def __init__(self, reader: Any, ends: list[int]):
        self.ends = ends
        self._reader = reader
        self._columns: dict[str, Convert] = converters(reader.schema)

    def row(self, index: int) -> dict[str, Any] | str:
        """A row of the group, or why it has no form in Python."""
        number = bisect.bisect_right(self.ends, index)
        first = self.ends[number - 1] if number else 0
        (row,) = python_rows(self._reader.get_batch(number).slice(index - first, 1), 0, self._columns)
        return row.error if row.values is None else row.values


class RowGroups:
    """A RowFile of Parquet. columns: those that are read; all where none are named."""

    def __init__(self, path: Path, *, name: str, folder: str | None, columns: Sequence[str] = ()):
        self.name = name
        self.folder = folder
        self._path = path
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenGroup] = OrderedDict()
        self._max_open = max(8, min(MAX_OPEN_GROUPS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        with disk_errors(name), arrow_errors(name, "Parquet"), path.open("rb") as file:
            self.digest = _digest(file)
            file.seek(0)
            with pyarrow.parquet.ParquetFile(file) as parquet:
                check_columns(parquet.schema_arrow.names, name)
                self._columns = needed(columns, parquet.schema_arrow.names)
                groups = [parquet.metadata.row_group(group) for group in range(parquet.metadata.num_row_groups)]
                self._ends = list(accumulate(group.num_rows for group in groups))
        self.num_rows = self._ends[-1] if self._ends else 0

    def read(self, numbers: NDArray[np.int64]) -> list[RowOrError]:
        found: list[RowOrError] = [{}] * len(numbers)
        with self._lock, disk_errors(self.name), arrow_errors(self.name, "Parquet"):
            for at in np.argsort(numbers, kind="stable").tolist():
                number = int(numbers[at])
                group = bisect.bisect_right(self._ends, number)
                row = self._group(group).row(number - (self._ends[group - 1] if group else 0))
                found[at] = DataError(f"{self.name}:{number + 1}: {row}") if isinstance(row, str) else row
        return found

    def _group(self, number: int) -> _OpenGroup:
        if number not in self._open:
            if len(self._open) >= self._max_open:
                self._open.popitem(last=False)
            self._open[number] = self._decoded(number)
        self._open.move_to_end(number)
        return self._open[number]

    def _decoded(self, number: int) -> _OpenGroup:
        ends: list[int] = []
        with (
            tempfile.NamedTemporaryFile(prefix="lmms_stream-rows-") as spooled,
            pyarrow.parquet.ParquetFile(str(self._path), pre_buffer=False, buffer_size=1 << 20) as parquet,
        ):
            group = parquet.metadata.row_group(number)
            row_bytes = group.total_byte_size // max(1, group.num_rows)
            batch_rows = max(1, min(STEP_ROWS, STEP_BYTES // max(1, row_bytes)))
            writer = None
            for batch in parquet.iter_batches(
                batch_rows, row_groups=[number], columns=self._columns, use_threads=False
            ):
                plain = _without_dictionaries(batch)
                writer = writer or pyarrow.ipc.new_file(spooled, plain.schema)
                writer.write_batch(plain)
                ends.append(batch.num_rows + (ends[-1] if ends else 0))
            assert writer is not None
            writer.close()
            spooled.flush()
            return _OpenGroup(pyarrow.ipc.open_file(pyarrow.memory_map(spooled.name)), ends)


def _digest(file: Any) -> str:
    """Of the metadata at the end of a file, which hold the sizes, offsets and statistics of all columns."""
    num_bytes = file.seek(0, 2)
    file.seek(max(0, num_bytes - FOOTER_BYTES))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, num_bytes - FOOTER_BYTES - length))
    return f"parquet:{num_bytes}:{xxhash.xxh3_64_hexdigest(file.read(length))}"


def _without_dictionaries(batch: Any) -> Any:
    """Batches of a file share no dictionaries, so values take their place."""
    arrays = [
        array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array for array in batch.columns
    ]
    fields = [field.with_type(array.type) for field, array in zip(batch.schema, arrays, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=pyarrow.schema(fields, metadata=batch.schema.metadata))
