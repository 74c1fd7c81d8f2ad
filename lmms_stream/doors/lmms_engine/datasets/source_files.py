"""Sources -> files read by units, and the lane of each unit.

The lane of a unit depends only on its file's name and its number in the file. Every reader computes the same lane
without communication, even if a folder gets new files and the readers list it at different times.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ....converters.sources.hub import HubSpec, saved_kind
from ....converters.sources.lists import YAML_KEYS, entry_spec, list_entries
from ....converters.sources.sources import open_sources
from ....converters.sources.specs import SETTING_KEYS, Spec, settings_of
from ....converters.sources.units import Source as OpenedSource
from ....errors import ConfigError, DataError
from ....mds.dataset_config import check_names
from .names import LIST, SHARDS, SOURCE_FORMATS, STORES, EngineDatasetConfig, check, is_shards

UNITS_PER_LANE = 8  # units of a file per lane, to balance the lanes, unless units would be too small
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 1 << 9, 1 << 22
UNKNOWN_BYTES = 1 << 20  # bytes of a unit if the size of a source is unknown

_SORTED: dict[str, Any] = {"sort_keys": True, "default": str}


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """An entry of a list of sources.

    path: a file, folder, glob or URL; a hub id or saved folder with data_type "hf_dataset". data_folder: base of media
    paths (None: the source's folder). data_type: a name in SOURCE_FORMATS, "mds", or "" to detect it by content.
    settings: other keys of the entry, named in SETTING_KEYS.
    """

    path: str
    data_folder: str | None
    data_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """The source as an entry of a list."""
        said = {"path": self.path, "data_folder": self.data_folder, "data_type": self.data_type or None}
        return {**said, **self.settings}


# Called at each listing, because a list of sources may grow.
SourcesOf = Callable[[], Sequence[SourceEntry]]


def sources_of(config: EngineDatasetConfig) -> list[SourceEntry]:
    """Return the sources in order; ConfigError if the config names none, DataError for an invalid list."""
    check(config)
    sources, bucket = _sources_of(config), bucket_of(config)
    if not (config.HAS_MEDIA_IN_BUCKET and bucket):
        return sources
    folders = [each.data_folder or "" for each in sources]
    folders = [each if "://" in each else "/".join(filter(None, (bucket, each.strip("/")))) for each in folders]
    return [replace(each, data_folder=folder) for each, folder in zip(sources, folders, strict=True)]


def bucket_of(config: EngineDatasetConfig) -> str:
    """Return the URL of the bucket of object_storage and bucket_name; "" without a store."""
    store = STORES[config.object_storage or "none"]
    if store != "azure":
        return f"{store}://{config.bucket_name}" if store else ""
    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if not account:
        raise ConfigError(
            f"object_storage azure needs the account of bucket {config.bucket_name!r}: set AZURE_ACCOUNT_NAME"
        )
    return f"azure://{account}.blob.core.windows.net/{config.bucket_name}"


def _sources_of(config: EngineDatasetConfig) -> list[SourceEntry]:
    format = SHARDS if is_shards(config) else config.dataset_format
    if config.datasets is not None:
        if format not in (LIST, None) and not all(
            isinstance(each, Mapping) and each.get("data_type") for each in config.datasets
        ):
            raise ConfigError(
                f"datasets is a list of sources, and dataset_format is {format!r}: set dataset_format: yaml, name "
                "the data_type of each, or leave datasets out"
            )
        return [_entry(number, each) for number, each in enumerate(config.datasets)]
    if not config.dataset_path:
        raise ConfigError("dataset_path is missing: name a file, a folder, a URL or a hub id, or give datasets, a list")
    path = str(config.dataset_path)
    if format == LIST or (format is None and path.endswith((".yaml", ".yml"))):
        entries = list_entries(Path(path))
        return [_source(each, f"entry {number} of {path}") for number, each in enumerate(entries, start=1)]
    if format == "json" and path.endswith(".jsonl"):
        format = "jsonl"
    return [SourceEntry(path, (config.extra_kwargs or {}).get("data_folder"), format or "")]


def _source(entry: Mapping[str, Any], where: str) -> SourceEntry:
    if entry.get("weight") is not None:
        raise ConfigError(
            f"{where} has a weight, but sources are read one after another: leave the weight out, or convert the list "
            "with lmms-stream convert, which writes a dataset for each entry and their weights for a run"
        )
    settings = {key: entry[key] for key in SETTING_KEYS if entry.get(key) is not None}
    return SourceEntry(entry["path"], entry.get("data_folder") or None, entry.get("data_type") or "", settings)


def _entry(number: int, entry: Mapping[str, Any]) -> SourceEntry:
    where = f"entry {number} of datasets"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise ConfigError(f"{where} is {entry!r}: write {{path: …, data_folder: …, data_type: …}}")
    check_names(entry, YAML_KEYS, where)
    settings_of(entry, where=where)
    data_type = entry.get("data_type") or ""
    if data_type:
        check_names([data_type], SOURCE_FORMATS, f"data_type of {where}")
    return _source(entry, where)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source. key: its unique name. digest: changes with its content.

    source: None if the file cannot be opened; error has the reason.
    """

    key: str
    digest: str
    source: OpenedSource | None
    error: DataError | None = None

    @property
    def opened(self) -> OpenedSource:
        """The opened source; DataError if it cannot be opened."""
        if self.source is None:
            raise DataError(str(self.error))
        return self.source


def list_files(
    sources: Sequence[SourceEntry], *, num_lanes: int, scratch: Path, keeps_refused: bool
) -> dict[str, SourceFile]:
    """Return the current files of the sources by key, in order. Raises the errors of open_sources.

    keeps_refused: append files of folders that cannot be opened.
    """
    specs = [_spec(source) for source in sources]
    found: dict[str, SourceFile] = {}
    refused: dict[str, DataError] = {}
    all_opened = open_sources(
        specs,
        scratch=scratch,
        unit_bytes=lambda num_bytes: _unit_bytes(num_bytes, num_lanes),
        refused=refused.__setitem__ if keeps_refused else None,
    )
    for opened in all_opened:
        _check_no_code(opened.settings, where=opened.name)  # an entry of a nested list has its own settings
        name = opened.name + _slice_text(opened.rows)
        key, number = name, 1
        while key in found:  # a file named twice is read twice
            number += 1
            key = f"{name} ({number})"
        identity = json.dumps([opened.identity, opened.settings] if opened.settings else opened.identity, **_SORTED)
        found[key] = SourceFile(key, xxhash.xxh3_64_hexdigest(identity.encode()), opened)
    return found | {key: SourceFile(key, "refused", None, error) for key, error in refused.items()}


def _number_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape"))


def lane_of(key: str, unit: int, num_lanes: int) -> int:
    """Return the lane that reads a unit of a file."""
    return (_number_of(key) + unit) % num_lanes


def file_order(keys: Sequence[str], *, seed: int | None, epoch: int) -> list[str]:
    """Return files in reading order: unchanged without a seed, shuffled with a seed."""
    if seed is None:
        return list(keys)
    return sorted(keys, key=lambda key: (_number_of(f"{seed}\0{epoch}\0{key}"), key))


def row_order(num_rows: int, key: str, unit: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the shuffled order of the rows of a unit."""
    return np.random.default_rng([seed, epoch, _number_of(key), unit]).permutation(num_rows)


def sample_id_of(key: str, unit: int, row: int) -> int:
    """Return a number for logs, unique within a file and most likely unique across files.

    20 bits of the file's name, 23 of the unit's number, 20 of the row's number in the unit.
    """
    of_file = _number_of(key) & 0xFFFFF
    return of_file << 43 | (unit & 0x7FFFFF) << 20 | (row & 0xFFFFF)


def _unit_bytes(num_bytes: int, num_lanes: int) -> int:
    if not num_bytes:
        return UNKNOWN_BYTES
    return max(MIN_UNIT_BYTES, min(MAX_UNIT_BYTES, num_bytes // (UNITS_PER_LANE * num_lanes)))


def _slice_text(rows: slice) -> str:
    """Return a slice in path notation; "" for all rows."""
    start, stop = ("" if bound is None else bound for bound in (rows.start, rows.stop))
    return "" if rows == slice(None) else f"@[{start}:{stop}]"


def _spec(source: SourceEntry) -> Spec:
    """Return the spec of a source; hub datasets are streamed, saved datasets of `datasets` are read in place."""
    _check_no_code(source.settings, where=source.path)
    spec = entry_spec(source.entry, where=source.path)
    if not spec.is_hub:
        return spec
    named = HubSpec.parse(spec.path)
    if named.streaming or saved_kind(Path(named.name)):
        return spec
    return replace(spec, path=f"{spec.path}{'&' if '?' in spec.path else '?'}streaming=1")


def _check_no_code(settings: Mapping[str, Any], *, where: str) -> None:
    """Raise ConfigError for the user's map and filter functions: only a conversion calls them."""
    code = [key for key in ("map", "filter") if key in settings]
    if code:
        raise ConfigError(
            f"{where}: {' and '.join(code)} applies only to conversions, but these sources are read directly: use a "
            "dataset_type that does not end with _iterable, or lmms-stream convert"
        )
