"""The command that converts an export to a dataset again. dataset + format -> command."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...mds.shard import open_shard
from ...mds.shard_files import fetch_shard
from ...storage.cache import LocalCache
from ..rows.kinds import KINDS
from ..rows.schemas import READ_SCHEMAS
from ..sources.stored_rows import row_of
from ..stored.catalog import Catalog
from .values import row_in_json

_BY_VALUES = ("str", "bytes", "int", "float64")  # encodings that the values of a column say
# Roles whose columns are called otherwise in rows of a schema than the roles are.
_ROLES: Mapping[str, Mapping[str, str]] = {"preference": {"response": "completion"}, "image": {"images": "image"}}
_MAP = f"{row_in_json.__module__}:{row_in_json.__name__}"
_USUAL = frozenset(name for kind in KINDS.values() for names in kind.columns.values() for name in names)


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
    if schema != "columns" and _USUAL & kept.keys():
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
