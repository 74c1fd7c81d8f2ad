"""Several datasets -> one index over all of them, in the folder above; no shard is copied or changed.

An entry of the merged index.json names its shard by the path from there ("a/shard.00000.mds"), which MosaicML
Streaming's own readers follow as well.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, LengthsError, ShardError, StorageError
from ...mds.index import DATASET_NAME, INDEX_NAME, ShardInfo, is_safe_name, parse_index
from ...mds.lengths import KINDS, LengthIndex
from ...mds.stored_lengths import upload_lengths, write_json
from ...storage.storage import Storage, open_storage
from ...version import VERSION
from .catalog import (
    Catalog,
    columns_of,
    open_lengths,
    own_files,
    parse_dataset,
    read_catalog,
    read_if_there,
    schema_of,
)

_THREADS = 16  # threads that read catalogs mostly wait for their stores
_CHUNK = 1 << 20  # lengths copied together


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What a merge made. dropped: why lengths indexes that only some of the sources have are not in it."""

    num_sources: int
    num_shards: int
    num_samples: int
    num_bytes: int
    num_lengths_indexes: int
    dropped: tuple[str, ...]


def merge_datasets(
    target: str,
    sources: Sequence[str],
    *,
    overwrite: bool = False,
    on_start: Callable[[int], None] = lambda count: None,
    on_source: Callable[[], None] = lambda: None,
) -> MergeReport:
    """Make `target` one dataset of all samples of `sources`, in this order, and leave those as they are.

    sources: folders or URLs below `target`, datasets with the same columns. Lengths indexes that all of them have
    become one. overwrite: replace an earlier merge. on_start, on_source: told the number of sources, and of each that
    was read. Raises ConfigError for sources that cannot be merged, StorageError when there is a dataset at `target`,
    ShardError and LengthsError for sources that are damaged.
    """
    storage = open_storage(target)
    names = _names_below(storage, sources)
    old_files = _earlier_merge(storage, overwrite=overwrite)
    on_start(len(names))

    def read(name: str) -> Catalog:
        catalog = read_catalog(open_storage(f"{storage.url}/{name}"))
        on_source()
        return catalog

    with ThreadPoolExecutor(_THREADS) as threads:
        catalogs = dict(zip(names, threads.map(read, names), strict=True))
    _check_columns(catalogs)
    index = {"version": 2, "shards": [entry for name in names for entry in _entries(name, catalogs[name])]}
    shards = [(name, info) for name in names for info in catalogs[name].shards]
    _check_names(shards)
    data = json.dumps(index, sort_keys=True).encode()
    parse_index(data, source=f"{storage.url}/{INDEX_NAME}")

    with tempfile.TemporaryDirectory(prefix="lmms_stream-merge-") as folder:
        lengths, dropped = _join_lengths(catalogs, Path(folder))
        for name in old_files:
            storage.delete(name)
        storage.write(INDEX_NAME, data)
        others = [INDEX_NAME, *upload_lengths(storage, lengths, folder=Path(folder))]
        dataset = _describe(catalogs, shards, fingerprints=[joined.fingerprint for joined in lengths], others=others)
        write_json(storage, DATASET_NAME, dataset)
    return MergeReport(
        num_sources=len(names),
        num_shards=len(shards),
        num_samples=dataset["num_samples"],
        num_bytes=sum(info.zip_size or info.size for _, info in shards),
        num_lengths_indexes=len(lengths),
        dropped=tuple(dropped),
    )


def _names_below(target: Storage, sources: Sequence[str]) -> list[str]:
    """The paths of the sources, as seen from the target."""
    if not sources:
        raise ConfigError("there is nothing to merge: name the folders or URLs of datasets below the target")
    names: list[str] = []
    for source in sources:
        above, url = (_absolute(open_storage(text).url) for text in (target.url, source))
        name = url.removeprefix(f"{above}/")
        if name == url or not is_safe_name(name) or "_lmms" in name.split("/"):
            raise ConfigError(
                f"{source} does not lie below {target.url}: a merge copies no shards, so name the folder above all of "
                "its sources as target (hidden folders and _lmms cannot be sources)"
            )
        if name in names:
            raise ConfigError(f"{source} is given twice: name each source once")
        names.append(name)
    return names


def _absolute(url: str) -> str:
    return url if "://" in url else os.path.abspath(url)  # noqa: PTH100 - links are left as they are


def _earlier_merge(storage: Storage, *, overwrite: bool) -> list[str]:
    """The files of a merge at the target, in the order in which they are to be removed."""
    index, described = (read_if_there(storage, name) for name in (INDEX_NAME, DATASET_NAME))
    if index is None and described is None:
        return []
    if not overwrite:
        raise StorageError(f"{storage.url} holds a dataset already: choose another target, or pass --overwrite")
    files, shard_names = [INDEX_NAME], []
    if index is not None:
        shard_names += [info.name for info in parse_index(index, source=f"{storage.url}/{INDEX_NAME}")]
    if described is not None:
        dataset = parse_dataset(described, source=f"{storage.url}/{DATASET_NAME}")
        shard_names += [shard["name"] for shard in dataset["shards"]]
        files = list(dict.fromkeys([DATASET_NAME, *own_files(dataset), INDEX_NAME]))
    own = [name for name in shard_names if "/" not in name]
    if own:
        raise StorageError(
            f"{storage.url} holds a dataset with shards of its own ({own[0]}), which a merge would orphan: move it "
            "into a folder below and name that as a source, or choose another target"
        )
    return files


def _check_columns(catalogs: Mapping[str, Catalog]) -> None:
    first: tuple[str, ShardInfo] | None = None
    for name, catalog in catalogs.items():
        for info in catalog.shards:
            first = first or (name, info)
            if _layout(info) != _layout(first[1]):
                raise ConfigError(
                    f"{name}/{info.name} has the columns {_layout(info)}, and {first[0]}/{first[1].name} has "
                    f"{_layout(first[1])}: datasets are merged when their columns are the same; convert one again"
                )
    if not sum(catalog.num_samples for catalog in catalogs.values()):
        raise ShardError(f"{', '.join(catalogs)} list no samples: convert them again")


def _layout(info: ShardInfo) -> str:
    columns = zip(info.column_names, info.column_encodings, info.column_sizes, strict=True)
    return ", ".join(f"{name} ({code}{'' if size is None else f', {size} bytes'})" for name, code, size in columns)


def _check_names(shards: Sequence[tuple[str, ShardInfo]]) -> None:
    owners: dict[str, str] = {}
    for name, info in shards:
        path = f"{name}/{info.name}"
        if path in owners:
            raise ConfigError(f"{owners[path]} and {name} both list {path}: leave one of the two out")
        owners[path] = name


def _entries(name: str, catalog: Catalog) -> list[dict[str, Any]]:
    """A source's entries of index.json, with paths from the target."""
    entries = copy.deepcopy(list(catalog.index["shards"]))
    for entry in entries:
        for data in (entry["raw_data"], entry.get("zip_data")):
            if data is not None:
                data["basename"] = f"{name}/{data['basename']}"
    return entries


def _join_lengths(catalogs: Mapping[str, Catalog], folder: Path) -> tuple[list[LengthIndex], list[str]]:
    """Each lengths index that all sources have, as one; and why others are left out."""
    joined, dropped = [], []
    fingerprints = dict.fromkeys(key for catalog in catalogs.values() for key in catalog.fingerprints)
    for fingerprint in fingerprints:
        found: list[LengthIndex] = []
        without: list[str] = []
        for number, (name, catalog) in enumerate(catalogs.items()):
            index = _open_index(name, catalog, fingerprint, folder / str(number))
            if index is None:
                without.append(name)
            else:
                found.append(index)
        if found and without:
            dropped.append(
                f"lengths index {fingerprint} ({found[0].processor.get('class', 'unknown')}) is left out, because "
                f"{', '.join(without[:3])}{' and others' if len(without) > 3 else ''} has none: write it with "
                "lmms-stream index, there or for the merged dataset"
            )
        elif found:
            joined.append(_concatenate(found, folder))
    return joined, dropped


def _open_index(name: str, catalog: Catalog, fingerprint: str, folder: Path) -> LengthIndex | None:
    try:
        return open_lengths(catalog.storage, fingerprint, folder=folder, num_samples=catalog.num_samples)
    except LengthsError as error:
        raise LengthsError(f"{name}: {error}") from error


def _concatenate(indexes: Sequence[LengthIndex], folder: Path) -> LengthIndex:
    """One index of the samples of all, in arrays mapped from files in a folder."""
    first = indexes[0]
    patches = None
    if any(index.patches is not None for index in indexes):
        arrays = [
            np.zeros(len(index.lengths), np.uint8) if index.patches is None else index.patches for index in indexes
        ]
        patches = _joined(arrays, folder / f"{first.fingerprint}.patches.joined")
    lengths = _joined([index.lengths for index in indexes], folder / f"{first.fingerprint}.joined")
    for index in indexes:
        index.release()
    return LengthIndex.from_array(
        lengths,
        fingerprint=first.fingerprint,
        processor=first.processor,
        patches=patches,
        num_tokens_of={kind: sum((index.num_tokens_of or {}).get(kind, 0) for index in indexes) for kind in KINDS},
        num_cut=sum(index.num_cut for index in indexes),
    )


def _joined(arrays: Sequence[NDArray[np.integer[Any]]], path: Path) -> NDArray[np.uint32]:
    """Arrays one after another, mapped from a file."""
    with path.open("wb") as file:
        for array in arrays:
            for start in range(0, len(array), _CHUNK):
                file.write(np.asarray(array[start : start + _CHUNK], "<u4").tobytes())
    return np.memmap(path, dtype="<u4", mode="r")


def _describe(
    catalogs: Mapping[str, Catalog],
    shards: Sequence[tuple[str, ShardInfo]],
    *,
    fingerprints: Sequence[str],
    others: Sequence[str],
) -> dict[str, Any]:
    """What `_lmms/dataset.json` holds; sources: whose shards the merged dataset reads."""
    infos = [info for _, info in shards]
    listed = []
    for name, info in shards:
        entry = {"name": f"{name}/{info.name}", "size": info.size, "num_samples": info.num_samples}
        algorithm, _, digest = (info.checksum or "").partition(":")
        listed.append(entry | ({"xxh3_64": digest} if algorithm == "xxh3_64" else {}))
    return {
        "version": 1,
        "schema": schema_of(infos),
        "columns": columns_of(infos),
        "num_samples": sum(info.num_samples for info in infos),
        "converter": f"lmms_stream {VERSION}",
        "sources": [
            {"name": name, "num_samples": catalog.num_samples, "num_shards": len(catalog.shards)}
            for name, catalog in catalogs.items()
        ],
        "shards": listed,
        "lengths": list(fingerprints),
        "other_files": list(others),
    }
