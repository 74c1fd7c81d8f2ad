"""Relax's lazy dataset, its readers, buffer and cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .....errors import ConfigError, DataError
from ...base import Samples
from ...cursor import IndexManager
from ...rows import open_rows
from ...streaming import SampleBuffer, StreamingDataset
from .. import refused_names

StreamingDatasetSamplesProxy = Samples

__all__ = [
    "CompositeStreamingReader",
    "IndexManager",
    "SampleBuffer",
    "StreamingDataset",
    "StreamingDatasetSamplesProxy",
    "StreamingReader",
]


class CompositeStreamingReader:
    """Rows by number of all files named by paths, or of a slice of these rows.

    IndexError for a number out of range or negative, DataError for an unreadable row.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], row_slice: slice | None = None):
        if row_slice is not None and row_slice.step not in (None, 1):
            raise ConfigError(f"row_slice has step {row_slice.step}, only step 1 is supported: drop rows after reading")
        rows = open_rows(paths)
        self._rows = rows if row_slice is None else rows.sliced(row_slice)

    def __len__(self) -> int:
        return self._rows.num_rows

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return next(self.iter_batch([idx]))[1]

    def iter_batch(self, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield numbers and rows in the order of the numbers; all rows are read together."""
        for idx in indices:
            if not 0 <= idx < len(self):
                raise IndexError(f"row {idx} of {len(self)} rows: count from 0")
        for idx, row in zip(indices, self._rows.read(np.array(indices, np.int64)).rows, strict=True):
            if isinstance(row, DataError):
                raise row
            yield idx, row


class StreamingReader(CompositeStreamingReader):
    """Rows by number of a .jsonl or .parquet file, or of FILE@[START:STOP]."""

    def __init__(self, path: str | Path):
        super().__init__(path)


__getattr__ = refused_names(
    __name__,
    {"PrefetchBuffer": "StreamingDataset makes chunks ahead itself; set prefetch_chunk_size and prefetch_max_cached"},
)
