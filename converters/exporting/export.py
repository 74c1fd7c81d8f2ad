"""A stored dataset -> files of rows that give its samples again: each shard becomes a file, written at once or not."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import ConfigError, DataError, StorageError
from ...mds.index import ShardInfo, read_if_there
from ...mds.shard import fetch_shard, open_shard
from ...storage.cache import LocalCache
from ...storage.failures import disk_errors
from ...storage.storage import Storage, open_storage
from ..rows.kept_columns import FILES
from ..rows.kinds import KINDS, usual_names
from ..rows.schemas import READ_SCHEMAS, columns_schema
from ..sources.mds import row_of
from ..stored.catalog import Catalog, read_catalog
from .row_files import FORMATS, RowWriter, check_columns, row_in_json

MARK = "_export.json"  # says of what the files are an export, so that the same command goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was exported; num_skipped files were there from a run before. back: the command that makes it a dataset
    again, of the same samples.
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

    format: "parquet", "jsonl" or "webdataset". Each shard becomes part-NNNNN of it, which is there whole or not; the
    same call goes on where one was ended. Nothing that lies at the target is replaced or removed. on_start, on_samples:
    told the number of samples in all, and done. Raises ConfigError for columns that no row can hold, DataError for
    values of that kind, StorageError for a target that holds anything else, ShardError for a damaged dataset.
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
    """The schema of a dataset; "columns" for one that no processor reads."""
    named = (catalog.dataset or {}).get("schema")
    return str(named or catalog.schema or columns_schema({}).name)


def _begin(store: Storage, catalog: Catalog, *, format: str) -> set[str]:
    """Names of files that are there already, of the same export."""
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


# The command that converts an export to a dataset again. dataset + format -> command.

_BY_VALUES = ("str", "bytes", "int", "float64")  # encodings that the values of a column say
# Roles whose columns are called otherwise in rows of a schema than the roles are.
_ROLES: Mapping[str, Mapping[str, str]] = {"preference": {"response": "completion"}, "image": {"images": "image"}}
_MAP = f"{row_in_json.__module__}:{row_in_json.__name__}"


def command_back(catalog: Catalog, target: str, *, schema: str, format: str) -> str:
    """The command that makes the same samples of an export at `target`.

    Kept columns that are called like columns which kinds of rows read are told apart from these by --kind and
    --columns. Files of equal shards are copies, which are converted only with --allow-repeats.
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
        row = _first_row(catalog, schema) if schema == "preference" else columns  # the others' rows have columns alike
        words += _told_apart(row, schema, kept)
    for name, encoding in kept.items():
        words.append(f"--keep={name}" if encoding in _BY_VALUES else f"--keep={name}:{encoding}")
    contents = {(info.size, info.checksum) for info in catalog.shards}
    words += ["--allow-repeats"] if len(contents) < len(catalog.shards) else []
    return shlex.join(["lmms-stream", "convert", target, "TARGET", *words])


def _told_apart(row: Mapping[str, Any], schema: str, kept: Collection[str]) -> list[str]:
    """Options by which only the row's own columns are read, and not those that are kept. row: with its columns."""
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
