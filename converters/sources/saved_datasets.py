"""Folders saved by `datasets` (save_to_disk) -> units: Arrow files in the order of their state.json."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow

from ...errors import DataError
from .arrow import ArrowTable, arrow_errors, python_rows
from .arrow_values import converters
from .table import Location
from .units import Row, Unit

STATE, SPLITS = "state.json", "dataset_dict.json"
MAX_SELECTED = 1 << 14  # rows of a unit: more than elsewhere, because each unit lists all batches of all files
INDICES_KEYS = ("_indices_files", "_indices_data_files")  # written only by datasets 1


def saved_kind(folder: Path) -> str | None:
    """Return "dataset", "splits" (several datasets by name), or None for another folder."""
    if (folder / STATE).is_file():
        return "dataset"
    return "splits" if (folder / SPLITS).is_file() else None


def only_split(folder: Path) -> Path:
    """Return the folder of the only split of a saved DatasetDict; DataError for several splits."""
    splits = _read_json(folder / SPLITS).get("splits", [])
    if len(splits) != 1 or not isinstance(splits[0], str):
        choices = " or ".join(str(folder / str(split)) for split in splits)
        raise DataError(f"{folder}: holds {len(splits)} splits: name one of them, {choices}")
    return folder / splits[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error}): save the dataset again") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(values).__name__}: save the dataset again")
    return values


def _named_files(state: dict[str, Any], key: str, folder: Path) -> list[Path]:
    names = [entry.get("filename") for entry in state.get(key) or []]
    for name in names:
        if not isinstance(name, str) or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{folder / STATE}: {name!r} is not a file of the folder: save the dataset again")
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: this file, named in {STATE}, is missing: copy the dataset again")
    return [folder / name for name in names]


class SavedTable:
    """Rows of a saved dataset, or some of them. Media are not decoded: they are {"bytes": …, "path": …}."""

    def __init__(self, location: Location, rows: slice = slice(None)):
        self._location = location
        state = _read_json(location.path / STATE)
        self._files = _named_files(state, "_data_files", location.path)
        self._shards = [ArrowTable(replace(location, path=path, name=str(path))) for path in self._files]
        selections = [path for key in INDICES_KEYS for path in _named_files(state, key, location.path)]
        self._selected = _read_indices(selections) if selections else None
        if rows != slice(None):
            self._selected = np.arange(self.num_rows())[rows] if self._selected is None else self._selected[rows]

    def num_rows(self) -> int:
        if self._selected is not None:
            return len(self._selected)
        return sum(shard.num_rows() for shard in self._shards)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        stop = self.num_rows() if stop is None else min(stop, self.num_rows())
        if self._selected is not None:
            total = max(1, self.num_rows())
            num_bytes = sum(path.stat().st_size for path in self._files)
            for at in range(start, stop, MAX_SELECTED):
                numbers = self._selected[at : min(at + MAX_SELECTED, stop)]
                share = num_bytes * len(numbers) // total
                yield SelectedRows(tuple(self._files), numbers.tobytes(), share, self._location.folder)
            return
        before = 0
        for shard in self._shards:
            num_rows = shard.num_rows()
            if before < stop and start < before + num_rows:
                yield from shard.units(max(0, start - before), stop - before)
            before += num_rows


def _read_indices(paths: list[Path]) -> Any:
    arrays = []
    for path in paths:
        with arrow_errors(str(path), "Arrow"), pyarrow.memory_map(str(path)) as file:
            arrays.append(pyarrow.ipc.open_stream(file).read_all().column(0).to_numpy().astype(np.int64))
    return np.concatenate(arrays)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows of consecutive Arrow streams, by number. numbers: int64 in bytes."""

    paths: tuple[Path, ...]
    numbers: bytes
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        batches: list[Any] = []
        for path in self.paths:
            with arrow_errors(str(path), "Arrow"), pyarrow.memory_map(str(path)) as file:
                batches += list(pyarrow.ipc.open_stream(file))
        ends = list(accumulate(batch.num_rows for batch in batches))
        columns = converters(batches[0].schema) if batches else {}
        for number, row in enumerate(np.frombuffer(self.numbers, np.int64).tolist()):
            if not 0 <= row < ends[-1]:
                raise DataError(f"row {row} is selected of {ends[-1]}: save the dataset again")
            batch = batches[bisect_right(ends, row)]
            at = row - ends[bisect_right(ends, row)] + batch.num_rows
            yield from python_rows(batch.slice(at, 1), number, columns)

    def count(self) -> int:
        return len(self.numbers) // 8
