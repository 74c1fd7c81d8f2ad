"""A stored dataset -> files of rows (JSON lines, Parquet or a WebDataset tar) that convert into the same samples.

Each shard becomes a file, written atomically. Samples are written one by one, with little of a file in memory.
"""

from __future__ import annotations

import base64
import io
import json
import math
import shlex
import tarfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Protocol

import numpy as np
import orjson

from ...errors import ConfigError, DataError, StorageError
from ...mds.index import ShardInfo, read_if_there
from ...mds.shard import fetch_shard, open_shard
from ...processors.media.facts import MediaPart
from ...storage.cache import LocalCache
from ...storage.failures import disk_errors
from ...storage.storage import Storage, open_storage
from ...types import Sample
from ..rows.kept_columns import FILES
from ..rows.kinds import KINDS, usual_names
from ..rows.schemas import READ_SCHEMAS, columns_schema
from ..sources.mds import row_of
from ..stored.catalog import Catalog, read_catalog

SaveMedia = Callable[[str, bytes], None]  # a name below the target, and the bytes
_ROW_GROUP_BYTES = 1 << 24
_ARROW_TYPES = {"input_ids": ("int32", 1), "loss_spans": ("int32", 2)}  # columns of the schema tokens: dtype and axes


class RowWriter(Protocol):
    """A file being written. add: write a sample and its id. close: complete the file, unless `add` raised."""

    def add(self, sample_id: int, sample: Sample) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A row per line; media are separate files in a folder `media`, named in the rows."""

    extension = "jsonl"

    def __init__(self, path: Path, info: ShardInfo, *, schema: str, folder: str, save: SaveMedia):
        self._file: IO[bytes] = path.open("wb")
        self._schema = schema
        self._folder = folder
        self._save = save

    def add(self, sample_id: int, sample: Sample) -> None:
        num_media = 0

        def refer(part: MediaPart) -> Any:
            nonlocal num_media
            name = f"media/{self._folder}/{sample_id:09}-{num_media}{part.extension}"
            self._save(name, part.data)
            num_media += 1
            return name

        row = row_of(sample, self._schema, refer=refer)
        self._file.write(_json_of({name: json_value(name, value) for name, value in row.items()}) + b"\n")

    def close(self) -> None:
        self._file.close()


class Parquet:
    """Row groups of a few megabytes; chats as JSON text, with media as data URLs, and images as {"bytes", "path"}."""

    extension = "parquet"

    def __init__(self, path: Path, info: ShardInfo, *, schema: str, folder: str, save: SaveMedia):
        self._path = path
        self._schema = schema
        self._encodings = info.encodings
        self._rows: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._writer: Any = None

    def add(self, sample_id: int, sample: Sample) -> None:
        row = row_of(sample, self._schema, refer=_url_of if self._schema in ("messages", "preference") else _struct_of)
        if self._schema == "messages":
            row["messages"] = _json_of(row["messages"]).decode()
            row["tools"] = _json_of(row["tools"]).decode() if "tools" in row else None
        if self._schema == "preference":  # lists and labels as JSON text, with the same columns in every row
            told = {name: row[name] for name in PREFERENCE_NAMES if name in row}
            texts = {name: said if isinstance(said, str) else _json_of(said).decode() for name, said in told.items()}
            row = {**dict.fromkeys(PREFERENCE_NAMES), **row, **texts}
        self._rows.append({name: self._value(name, value) for name, value in row.items()})
        self._num_bytes += sum(_size(value) for value in sample.values())
        if self._num_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _value(self, name: str, value: Any) -> Any:
        return json.dumps(value) if self._encodings.get(name) == "json" else plain_value(value)

    def _flush(self) -> None:
        import pyarrow
        import pyarrow.parquet

        types, rows = self._types(pyarrow), self._rows
        self._rows, self._num_bytes = [], 0
        try:
            if self._writer is None:
                self._writer = pyarrow.parquet.ParquetWriter(self._path, types, compression="zstd")
            self._writer.write_table(pyarrow.Table.from_pylist(rows, types))
        except (pyarrow.ArrowException, OverflowError) as error:
            raise DataError(f"rows do not fit the columns of Parquet ({error}): export them to jsonl") from error

    def _types(self, pyarrow: Any) -> Any:
        fields = []
        for name in self._rows[0]:
            encoding = self._encodings.get(name, "str")
            if self._schema == "image" and name == "image":
                kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
            elif encoding.startswith("ndarray"):
                kind = self._array_type(name, encoding, pyarrow)
            else:
                kind = arrow_type(encoding, pyarrow)
            fields.append((name, kind))
        return pyarrow.schema(fields)

    def _array_type(self, name: str, encoding: str, pyarrow: Any) -> Any:
        value = np.asarray(self._rows[0][name])
        dtype, axes = encoding.split(":")[1] if ":" in encoding else str(value.dtype), max(1, value.ndim)
        if self._schema == "tokens":
            dtype, axes = _ARROW_TYPES.get(name, (dtype, axes))
        kind = pyarrow.from_numpy_dtype(np.dtype(dtype))
        for _ in range(axes):
            kind = pyarrow.list_(kind)
        return kind

    def close(self) -> None:
        if self._rows:
            self._flush()
        if self._writer is not None:
            self._writer.close()


class WebDataset:
    """A tar of files by sample: KEY.txt of texts, else KEY.json, whose URLs are extensions of the media files."""

    extension = "tar"

    def __init__(self, path: Path, info: ShardInfo, *, schema: str, folder: str, save: SaveMedia):
        self._schema = schema
        self._columns = set(info.column_names)
        self._archive = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed by close

    def add(self, sample_id: int, sample: Sample) -> None:
        key, files = f"{sample_id:09}", list[tuple[str, bytes]]()

        def refer(part: MediaPart) -> Any:
            name = add(part.extension, part.data)
            return {"path": name} if self._schema == "image" else name

        def add(extension: str, data: bytes) -> str:
            """Add a file and return its name; no text of the sample contains this name, to avoid false references."""
            name = f"{len(files)}{extension}"
            while any(name in text for text in texts):
                name = f"0{name}"
            files.append((name, data))
            return name

        if self._columns == {"text"}:
            self._put(f"{key}.txt", sample["text"].encode())
            return
        texts = [str(value) for value in sample.values() if isinstance(value, (str, dict, list))]
        row = row_of(sample, self._schema, refer=refer)
        if self._schema == "messages":
            row.setdefault("tools", [])  # gives the first rows this column
        for name, value in row.items():
            if isinstance(value, bytes):
                check_bytes(name, value)
                row[name] = {"bytes": None, "path": add(".bin", value)}
            else:
                row[name] = json_value(name, value)
        self._put(f"{key}.json", _json_of(row))
        for extension, data in files:
            self._put(f"{key}.{extension}", data)

    def _put(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._archive.addfile(member, io.BytesIO(data))

    def close(self) -> None:
        self._archive.close()


FORMATS: Mapping[str, type[JsonLines] | type[Parquet] | type[WebDataset]] = {
    "parquet": Parquet,
    "jsonl": JsonLines,
    "webdataset": WebDataset,
}


def _url_of(part: MediaPart) -> Any:
    return data_url(part.data, part.real_mime)


def _struct_of(part: MediaPart) -> Any:
    return {"bytes": part.data, "path": None}


def _json_of(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers of more than 64 bits, unpaired surrogates
        return json.dumps(value).encode()


def _size(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else len(value) if isinstance(value, (str, bytes)) else 8


# Values of columns -> values for JSON and Arrow, readable by `convert`. Pure.

PREFERENCE_NAMES = ("prompt", "chosen", "rejected", "completion", "label", "tools")  # columns of preference rows
_ROW_NAMES = {"messages": ("tools",), "preference": PREFERENCE_NAMES}  # columns added to the stored columns
_NUMBERS = ("int", "str_int", "float16", "float32", "float64", "str_float")
_TEXTS = ("str", "str_decimal")
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def check_columns(info: ShardInfo, *, schema: str) -> None:
    """Raise ConfigError for a column without a form in files of rows."""
    for name, encoding in info.encodings.items():
        known = {*FILES, *_NUMBERS, *_TEXTS, *_INTEGERS, "bytes", "json"}
        if encoding not in known and not encoding.startswith("ndarray:"):
            raise ConfigError(
                f"column {name!r} has the encoding {encoding!r}, which other formats do not support: convert the "
                "dataset without it, or read it with StreamingDataset"
            )
        if name in _ROW_NAMES.get(schema, ()):
            raise ConfigError(
                f"column {name!r} has the name of a column of {schema} rows, and names in a row are unique: convert "
                "the dataset without it, or read it with StreamingDataset"
            )


def row_in_json(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the row in the JSON of a sample of an exported WebDataset; called by `convert --map`."""
    row: dict[str, Any] = sample["json"]
    return row


def data_url(data: bytes, mime: str = "") -> str:
    """Return bytes as a data URL, the form of media in JSON."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def json_value(name: str, value: Any) -> Any:
    """Return a value in JSON form: bytes as {"bytes": a data URL, "path": null}, arrays as lists.

    DataError for values without a JSON form: NaN, infinity, and empty bytes.
    """
    if isinstance(value, bytes):
        check_bytes(name, value)
        return {"bytes": data_url(value), "path": None}
    plain = plain_value(value)
    if _has_nan(plain):
        raise DataError(f"column {name!r} holds NaN or Infinity, which JSON has not: export to parquet")
    return plain


def check_bytes(name: str, value: bytes) -> None:
    """Raise DataError for empty bytes, which are not media."""
    if not value:
        raise DataError(f"column {name!r} holds no bytes, which JSON cannot give back: export to parquet")


def plain_value(value: Any) -> Any:
    """Return arrays as lists, NumPy numbers as Python numbers, and decimals as text."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value if value is None or isinstance(value, (str, bytes, int, float, list, dict)) else str(value)


def _has_nan(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_nan, value))
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    return isinstance(value, float) and not math.isfinite(value)


def arrow_type(encoding: str, pyarrow: Any) -> Any:
    """Return the type of an Arrow column; None for arrays, whose values determine the type."""
    if encoding in ("bytes", *FILES):
        return pyarrow.binary()
    if encoding == "json":
        return pyarrow.json_()
    if encoding in ("int", "str_int"):
        return pyarrow.int64()
    if encoding in ("float64", "str_float"):
        return pyarrow.float64()
    if encoding in _TEXTS:
        return pyarrow.string()
    return None if encoding.startswith("ndarray") else pyarrow.from_numpy_dtype(np.dtype(encoding))


MARK = "_export.json"  # identity of the exported dataset, to resume the same export


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """Result of an export.

    num_skipped: files kept from an earlier run. back: command that converts the files to a dataset of the same samples.
    """

    num_samples: int
    num_files: int
    num_skipped: int
    seconds: float
    back: str


def export_dataset(
    dataset: str,
    target: str,
    *,
    format: str,
    on_start: Callable[[int], None] = lambda count: None,
    on_samples: Callable[[int], None] = lambda count: None,
) -> ExportReport:
    """Write the samples of a dataset as files of rows below `target`; both are folders or URLs.

    format: "parquet", "jsonl" or "webdataset". Each shard becomes part-NNNNN, written atomically; the same call resumes
    an interrupted export. Existing files at the target are never replaced or removed. on_start, on_samples: called with
    the total number of samples, and with the number of finished samples. Raises ConfigError for columns without a form
    in rows, DataError for values without a form in rows, StorageError for a target with other files, ShardError for a
    damaged dataset.
    """
    started = time.monotonic()
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    catalog, store = read_catalog(open_storage(dataset)), open_storage(target)
    for info in catalog.shards:
        check_columns(info, schema=schema_in(catalog))
    parts = [f"part-{number:05}.{FORMATS[format].extension}" for number in range(len(catalog.shards))]
    there = _begin(store, catalog, format=format)
    firsts = accumulate((info.num_samples for info in catalog.shards), initial=0)
    on_start(catalog.num_samples)
    for number, (info, first, part) in enumerate(zip(catalog.shards, firsts, parts, strict=False)):
        if part not in there and info.num_samples:
            _export_shard(catalog, info, store, part, first=first, number=number, format=format)
        on_samples(info.num_samples)
    return ExportReport(
        num_samples=catalog.num_samples,
        num_files=sum(info.num_samples > 0 for info in catalog.shards),
        num_skipped=len(there.intersection(parts)),
        seconds=time.monotonic() - started,
        back=command_back(catalog, target, schema=schema_in(catalog), format=format),
    )


def schema_in(catalog: Catalog) -> str:
    """Return the schema of a dataset; "columns" without a processor's schema."""
    named = (catalog.dataset or {}).get("schema")
    return str(named or catalog.schema or columns_schema({}).name)


def _begin(store: Storage, catalog: Catalog, *, format: str) -> set[str]:
    """Return the names of existing files of the same export."""
    mark = {
        "format": format,
        "shards": [[info.name, info.size, info.checksum] for info in catalog.shards],
        "schema": schema_in(catalog),
    }
    there = {file.key for file in store.list_objects("")}
    said = read_if_there(store, MARK)
    if said is None and there:
        raise StorageError(f"{store.url} holds {sorted(there)[0]!r}, which no export wrote: choose an empty target")
    if said is not None and said != _bytes_of(mark):
        raise StorageError(f"{store.url} holds an export of another dataset or format: choose another target")
    store.write(MARK, _bytes_of(mark))
    return there


def _bytes_of(mark: object) -> bytes:
    return json.dumps(mark, indent=1, sort_keys=True).encode() + b"\n"


def _export_shard(
    catalog: Catalog, info: ShardInfo, store: Storage, part: str, *, first: int, number: int, format: str
) -> None:
    with TemporaryDirectory(prefix="lmms_stream-export-") as folder, disk_errors(folder):
        path = fetch_shard(LocalCache(catalog.storage, Path(folder) / "shard"), info)
        encodings = tuple("bytes" if encoding in FILES else encoding for encoding in info.column_encodings)
        info = replace(info, column_encodings=encodings)
        shard, out = open_shard(path, info), Path(folder) / part
        file: RowWriter = FORMATS[format](
            out, info, schema=schema_in(catalog), folder=f"{number:05}", save=partial(_save, store)
        )
        with closing(file):
            for index in range(len(shard)):
                try:
                    file.add(first + index, shard[index])
                except DataError as error:
                    raise DataError(f"sample {first + index}: {error}") from error
        store.upload(out, part)


def _save(store: Storage, name: str, data: bytes) -> None:
    store.write(name, data)


# The command that converts an export back to a dataset. dataset + format -> command.

_BY_VALUES = ("str", "bytes", "int", "float64")  # encodings determined by the values of a column
# Roles whose columns have other names in rows of a schema.
_ROLES: Mapping[str, Mapping[str, str]] = {"preference": {"response": "completion"}, "image": {"images": "image"}}
_MAP = f"{row_in_json.__module__}:{row_in_json.__name__}"


def command_back(catalog: Catalog, target: str, *, schema: str, format: str) -> str:
    """Return the command that converts an export at `target` into the same samples.

    --kind and --columns separate kept columns from the columns of other kinds of rows with the same names. Files of
    equal shards are copies, converted only with --allow-repeats.
    """
    own = READ_SCHEMAS[schema].columns if schema in READ_SCHEMAS else {}
    columns = catalog.shards[0].encodings
    kept = {name: encoding for name, encoding in columns.items() if name not in own}
    words: list[str] = []
    if format == "webdataset":
        words += ["--columns", "text=txt"] if set(columns) == {"text"} else ["--map", _MAP]
    if schema in ("image", "columns"):
        words += ["--kind", schema]
    if schema != "columns" and usual_names() & kept.keys():
        row = _first_row(catalog, schema) if schema == "preference" else columns  # other schemas: equal for all rows
        words += _told_apart(row, schema, kept)
    for name, encoding in kept.items():
        words.append(f"--keep={name}" if encoding in _BY_VALUES else f"--keep={name}:{encoding}")
    contents = {(info.size, info.checksum) for info in catalog.shards}
    words += ["--allow-repeats"] if len(contents) < len(catalog.shards) else []
    return shlex.join(["lmms-stream", "convert", target, "TARGET", *words])


def _told_apart(row: Mapping[str, Any], schema: str, kept: Collection[str]) -> list[str]:
    """Return options to read only the row's own columns, without kept columns. row: mapping with its columns."""
    name = "kto" if schema == "preference" and "completion" in row else schema
    words = [] if schema == "image" else ["--kind", name]
    for role, names in KINDS[name].columns.items():
        column = _ROLES.get(schema, {}).get(role, role)
        column = column if column in row and column not in kept else ""
        if any(each in kept for each in names):
            words += ["--columns", f"{role}={column}"]
    return words


def _first_row(catalog: Catalog, schema: str) -> dict[str, Any]:
    info = next(each for each in catalog.shards if each.num_samples)
    with TemporaryDirectory(prefix="lmms_stream-export-") as folder:
        shard = open_shard(fetch_shard(LocalCache(catalog.storage, Path(folder) / "shard"), info), info)
        return row_of(shard[0], schema)
