"""Datasets of the Hugging Face hub, and other datasets that its library loads -> units: carried batches of rows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import orjson
import pyarrow
from numpy.typing import NDArray
from pyarrow.lib import ArrowException

from ...errors import DataError, LmmsStreamError, StorageError
from ...extras import need
from .arrow import ArrowTable, arrow_errors, check_columns, python_rows, rows_of
from .arrow_values import converters
from .table import Location, NumberedRows, carried, carry, in_units
from .units import UNIT_ROWS, Row, Unit

BATCH_ROWS, BATCH_BYTES = 1000, 1 << 22
MOST_ROWS = 1 << 62
STREAM_ROWS = 32  # read at once while streaming: the size of rows is unknown
SPLIT_ROWS = re.compile(r"([^\[\]]+)\[(-?\d*):(-?\d*)(?::([1-9]\d*))?\]")
_SPLIT = re.compile(r"[^\[\]]+(\[(-?\d+%?)?:(-?\d+%?)?(:[1-9]\d*)?\](\(\w+\))?)?")  # of `datasets`, plus a step
SETTINGS = ("config", "split", "streaming", "revision", "data_dir", "data_files")
# The library's builders that only parse files: the other builders unpickle, run queries or run code.
BUILDERS = ("arrow", "audiofolder", "csv", "imagefolder", "json", "parquet", "text", "videofolder", "webdataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSpec:
    """hf:NAME?config=…&split=…&streaming=1&revision=…&data_dir=…&data_files=…; data_files may be repeated.

    name: a hub id, a local folder, or a builder of the library ("json", "parquet", …).
    """

    name: str
    config: str | None = None
    split: str | None = None
    streaming: bool = False
    revision: str | None = None
    data_dir: str | None = None
    data_files: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> HubSpec:
        name, _, query = text.removeprefix("hf:").removeprefix("//").partition("?")
        settings = parse_qs(query, keep_blank_values=True)
        for key, values in settings.items():
            if key not in SETTINGS:
                raise DataError(f"{text}: unknown setting {key!r}: expected one of {', '.join(SETTINGS)}")
            if not values[-1] or (len(values) > 1 and key != "data_files"):
                raise DataError(f"{text}: {key} needs exactly one value: write {key}=VALUE once")
        streaming = settings.pop("streaming", ["0"])[0]
        if streaming not in ("0", "1"):
            raise DataError(f"{text}: streaming={streaming} is neither 0 nor 1: write streaming=1 to stream")
        if not name:
            raise DataError(f"{text!r} names no dataset: write hf:NAME?split=SPLIT")
        files = tuple(settings.pop("data_files", []))
        texts = {key: values[0] for key, values in settings.items()}
        return HubSpec(name=name, streaming=streaming == "1", data_files=files, **texts)


def check_split(split: str, name: str) -> None:
    """Raise DataError for a slice of a split without numbers or percentages. name: of the dataset."""
    for part in split.split("+"):
        if _SPLIT.fullmatch(part.strip()) is None:
            raise DataError(
                f"{name}: split {part!r} is no slice: write NAME[START:STOP] or NAME[START:STOP:STEP], with numbers of "
                "rows, which may be negative, or NAME[:10%]"
            )


def rows_of_split(split: str) -> tuple[str, slice]:
    """Return the name of a split and the slice of its rows; a text without a slice of numbers is the name.

    >>> rows_of_split("train[10:20:2]")
    ('train', slice(10, 20, 2))
    """
    matched = SPLIT_ROWS.fullmatch(split)
    if matched is None:
        return split, slice(None)
    return matched[1], slice(*(int(bound) if bound else None for bound in matched.groups()[1:]))


class HubDataset:
    """A dataset of `datasets`, from its description; only the description is downloaded. Loading scripts are refused.

    Raise DataError for a missing or unreadable dataset, StorageError if the hub does not answer.
    """

    def __init__(self, spec: HubSpec, *, name: str):
        datasets = need("datasets", by="datasets of the hub")
        self.name = name
        self._spec = spec
        check_split(spec.split or "train", name)
        if (Path(datasets.__file__).parent / "packaged_modules" / spec.name / "__init__.py").is_file():
            _refuse_builder(spec.name, name)
        with _hub_errors(name):
            self._builder = datasets.load_dataset_builder(
                spec.name,
                spec.config,
                data_dir=spec.data_dir,
                data_files=list(spec.data_files) or None,
                revision=spec.revision,
            )
        _refuse_builder(type(self._builder).__module__.split(".")[-1], name)
        self._split = spec.split or self._only_split()
        self._base, self._rows = rows_of_split(self._split)
        if spec.streaming and self._split.endswith("]") and "%" in self._split:
            self._base, self._rows = self._percentage()
        if spec.streaming and min(self._rows.start or 0, self._rows.stop or 0) < 0:
            start, stop, step = self._rows.indices(self._num_rows(self._base))
            self._rows = slice(start, max(start, stop), step)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "name": self.name, "builder": self._builder.config_id, "hash": self._builder.hash, "split": self._split
        }  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes of the split in the dataset's description; 0 if unknown."""
        splits = self._builder.info.splits or {}
        return int(splits[self._base].num_bytes or 0) if self._base in splits else 0

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield the local files of a complete split, each with an upper bound of its number of rows."""
        files = (self._builder.config.data_files or {}).get(self._split, [])  # no files for a slice of a split
        return ((str(Path(file).resolve()), MOST_ROWS) for file in files if "://" not in file)

    def _only_split(self) -> str:
        import datasets

        spec = self._spec
        with _hub_errors(self.name):
            splits = datasets.get_dataset_split_names(
                spec.name,
                spec.config,
                data_dir=spec.data_dir,
                data_files=list(spec.data_files) or None,
                revision=spec.revision,
            )
        if len(splits) != 1:
            raise DataError(f"{self.name}: has splits {', '.join(splits)}: name one, as ?split={splits[0]}")
        return str(splits[0])

    def _percentage(self) -> tuple[str, slice]:
        """Return the split and the slice of rows of a percentage, rounded by `datasets`' rule."""
        import datasets

        base = self._split.partition("[")[0]
        num_rows = self._num_rows(base)
        with _hub_errors(self.name):
            (rows,) = datasets.ReadInstruction.from_spec(self._split).to_absolute({base: num_rows})
        return base, slice(rows.from_ or 0, num_rows if rows.to is None else rows.to)

    def _num_rows(self, base: str) -> int:
        """Number of rows of a streamed split: from the description, or counted for local files; else DataError."""
        num_rows = getattr((self._builder.info.splits or {}).get(base), "num_examples", None)
        files = (self._builder.config.data_files or {}).get(base, [])
        with _hub_errors(self.name):
            if not num_rows and files and not any("://" in file for file in files):
                streamed = self._builder.as_streaming_dataset(split=base).with_format("arrow")
                num_rows = sum(table.num_rows for table in streamed.iter(STREAM_ROWS))
        if not num_rows:
            raise DataError(
                f"{self.name}: the number of rows of {base} is unknown in a stream: select rows by number, for "
                f"example {base}[:1000], or leave out streaming=1"
            )
        return int(num_rows)

    def table(self, location: Location) -> HubTable:
        with _hub_errors(self.name):
            if self._spec.streaming:
                dataset: Any = self._builder.as_streaming_dataset(split=self._base)
            else:
                with _without_bars():
                    self._builder.download_and_prepare()
                dataset = self._builder.as_dataset(split=self._base)
                if self._rows != slice(None):
                    dataset = dataset.select(range(*self._rows.indices(len(dataset))))
        if dataset.column_names:
            check_columns(dataset.column_names, self.name)
        rows = self._rows if self._spec.streaming else None
        return HubTable(dataset.with_format("arrow"), streamed_rows=rows, location=location)


def _refuse_builder(builder: str, name: str) -> None:
    if builder not in BUILDERS:
        raise DataError(
            f"{name}: builder {builder!r} runs more than a parser of files, and is not supported: use one of "
            f"{', '.join(BUILDERS)}"
        )


class HubTable:
    """Rows of a dataset, in its order. Media are not decoded: {"bytes": …, "path": …}.

    streamed_rows: slice of the rows of a streamed dataset; None without streaming.
    """

    def __init__(self, dataset: Any, *, streamed_rows: slice | None, location: Location):
        self._dataset = dataset
        self._streaming = streamed_rows is not None
        self._rows = streamed_rows or slice(None)
        self._location = location

    def num_rows(self) -> int:
        if self._streaming:
            raise DataError(
                f"{self._location.name}: the number of rows is unknown in a stream: count rows from the start, or "
                "leave out streaming=1"
            )
        return len(self._dataset)

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        found = (table.to_batches() for table in self._tables(start, stop))
        max_items = UNIT_ROWS // (STREAM_ROWS if self._streaming else BATCH_ROWS)
        for block in in_units(found, _num_bytes, unit_bytes=self._location.unit_bytes, max_items=max_items):
            yield self._unit(list(chain.from_iterable(block)))

    def _tables(self, start: int, stop: int | None) -> Iterator[Any]:
        with _hub_errors(self._location.name):
            if self._streaming:
                yield from (table for table in self._streamed(start, stop) if table.num_rows)
                return
            num_rows = len(self._dataset)
            stop = num_rows if stop is None else min(stop, num_rows)
            step = max(1, min(BATCH_ROWS, BATCH_BYTES * num_rows // max(1, self._dataset.data.nbytes)))
            for at in range(start, stop, step):
                yield self._dataset[at : min(at + step, stop)]

    def _streamed(self, start: int, stop: int | None) -> Iterator[Any]:
        """Yield rows [start, stop) of the slice."""
        first, last, step = self._rows.start or 0, self._rows.stop, self._rows.step or 1
        begin = first + start * step
        ends = [end for end in (last, None if stop is None else first + stop * step) if end is not None]
        rows = self._dataset.skip(begin) if begin else self._dataset
        rows = rows.take(max(0, min(ends) - begin)) if ends else rows
        passed = 0
        for table in rows.iter(STREAM_ROWS):
            yield table if step == 1 else table.take(np.arange(-passed % step, table.num_rows, step))
            passed += table.num_rows

    def _unit(self, batches: list[Any]) -> Unit:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        payload = carry(sink.getvalue().to_pybytes(), self._location)
        num_rows = sum(batch.num_rows for batch in batches)
        return CarriedBatches(payload, num_rows, _num_bytes(batches), self._location.folder)


def _num_bytes(batches: list[Any]) -> int:
    """Bytes of the columns of record batches."""
    return sum(batch.nbytes for batch in batches)


@dataclass(frozen=True, slots=True)
class CarriedBatches:
    """Rows in a stream of Arrow batches. num_bytes: of the columns."""

    payload: bytes | Path
    num_rows: int
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        yield from self._rows()

    def by_index(self) -> NumberedRows:
        return NumberedRows(self.num_rows, self._rows, name="rows of a dataset of the hub")

    def _rows(self, wanted: NDArray[np.int64] | None = None) -> Iterator[Row]:
        batches: Iterable[Any] = pyarrow.ipc.open_stream(pyarrow.py_buffer(carried(self.payload)))
        yield from rows_of(batches, skip=0, num_rows=self.num_rows, wanted=wanted)

    def count(self) -> int:
        return self.num_rows


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except LmmsStreamError:
        raise
    except (DatasetsError, OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, ArrowException) as e:
        text = " ".join(str(e).split())
        if "Dataset scripts" in text:
            raise DataError(
                f"{name}: has a loading script, which is never run: name its data files, or a revision in Parquet"
            ) from e
        if isinstance(e, OSError) and not isinstance(e, (DatasetsError, FileNotFoundError)):
            raise StorageError(f"{name}: {text}: check the network, HF_TOKEN and HF_ENDPOINT") from e
        remedy = "check its name and HF_TOKEN" if isinstance(e, DatasetNotFoundError) else "correct it"
        raise DataError(f"{name}: {text}: {remedy}, as hf:NAME?config=CONFIG&split=SPLIT") from e


@contextmanager
def _without_bars() -> Iterator[None]:
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# Folders saved by `datasets` (save_to_disk) -> units: Arrow files in the order of their state.json.

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
