"""Several datasets -> what one dataset of all their samples consists of; no shard is copied or changed.

An entry of the joint index.json names its shard by the path from there ("a/shard.00000.mds"), which MosaicML
Streaming's own readers follow as well.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, LengthsError, ShardError
from ...mds.index import DATASET_NAME, INDEX_NAME, ShardInfo, parse_index
from ...mds.lengths import LengthIndex, joint_index, patches_of_all
from ...mds.provenance import Provenance, join_provenance
from ...mds.stored_lengths import upload_lengths, write_json
from ...processors.not_shown import added
from ...storage.storage import Storage
from ...version import VERSION
from . import unread
from .catalog import Catalog, columns_of, open_lengths
from .unread import UnreadNames

_CHUNK = 1 << 20  # lengths copied together


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """One dataset of several. index: what its index.json holds. shards: each with the name of its dataset.

    dropped: why lengths indexes, and provenance, that only some of the datasets have are not in it. folder: where
    `provenance`, names of files, lie. schema: of the samples. unread: names in the rows of all that nothing read.
    not_shown: samples of all with content that the chat template did not show, by the kind of content.
    """

    index: bytes
    shards: tuple[tuple[str, ShardInfo], ...]
    lengths: tuple[LengthIndex, ...]
    provenance: tuple[str, ...]
    dropped: tuple[str, ...]
    folder: Path
    schema: str | None
    unread: UnreadNames
    not_shown: Mapping[str, int]


def join(catalogs: Mapping[str, Catalog], folder: Path, *, url: str) -> Joined:
    """All samples of datasets, in this order, as one. folder: for files that are made of theirs.

    catalogs: path from the joint dataset's folder, at `url`, to that of each; "" for one that lies there itself.
    Raises ConfigError where they cannot be joined, ShardError and LengthsError where they are damaged.
    """
    _check_columns(catalogs)
    schema = _one_schema(catalogs)
    index = {"version": 2, "shards": [entry for name, each in catalogs.items() for entry in _entries(name, each)]}
    shards = tuple((name, info) for name, catalog in catalogs.items() for info in catalog.shards)
    _check_names(shards)
    data = json.dumps(index, sort_keys=True).encode()
    parse_index(data, source=f"{url}/{INDEX_NAME}")
    lengths, dropped = _join_lengths(catalogs, folder)
    provenance = _join_provenance(catalogs, folder, dropped)
    return Joined(
        index=data,
        shards=shards,
        lengths=tuple(lengths),
        provenance=provenance,
        dropped=tuple(dropped),
        folder=folder,
        schema=schema,
        unread=unread.joined(unread.of_dataset(each.dataset or {}) for each in catalogs.values()),
        not_shown=added((each.dataset or {}).get("not_shown", {}) for each in catalogs.values()),
    )


def path_to(name: str, file: str) -> str:
    """The path to a file of one of the datasets from the folder of the joint one."""
    return f"{name}/{file}" if name else file


def _check_columns(catalogs: Mapping[str, Catalog]) -> None:
    first: tuple[str, ShardInfo] | None = None
    for name, catalog in catalogs.items():
        for info in catalog.shards:
            first = first or (name, info)
            if info.shown_columns != first[1].shown_columns:
                raise ConfigError(
                    f"{name}/{info.name} has the columns {info.shown_columns}, and {first[0]}/{first[1].name} has "
                    f"{first[1].shown_columns}: datasets are merged when their columns are the same; convert one again"
                )
    if not sum(catalog.num_samples for catalog in catalogs.values()):
        raise ShardError(f"{', '.join(catalogs)} list no samples: convert them again")


def _one_schema(catalogs: Mapping[str, Catalog]) -> str | None:
    schemas = {catalog.schema: name for name, catalog in catalogs.items() if catalog.shards}
    if len(schemas) > 1:
        found = ", ".join(f"{name} holds {schema}" for schema, name in schemas.items())
        raise ConfigError(f"{found}: datasets are merged when they hold the same; leave one out, or convert it again")
    return next(iter(schemas), None)


def _check_names(shards: Sequence[tuple[str, ShardInfo]]) -> None:
    owners: dict[str, str] = {}
    for name, info in shards:
        path = path_to(name, info.name)
        if path in owners:
            raise ConfigError(f"{owners[path]} and {name} both list {path}: leave one of the two out")
        owners[path] = name


def _entries(name: str, catalog: Catalog) -> list[dict[str, Any]]:
    """A source's entries of index.json, with paths from the target."""
    entries = copy.deepcopy(list(catalog.index["shards"]))
    for entry in entries:
        for data in map(entry.get, ("raw_data", "zip_data", "raw_meta", "zip_meta")):
            if data is not None:
                data["basename"] = path_to(name, data["basename"])
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
                f"{_some(without)} has none: write it with "
                "lmms-stream index, there or for the merged dataset"
            )
        elif found:
            joined.append(_concatenate(found, folder))
    return joined, dropped


def _join_provenance(catalogs: Mapping[str, Catalog], folder: Path, dropped: list[str]) -> tuple[str, ...]:
    """The names of its files, where all datasets have it; else why it is left out is added to what was dropped."""
    found = {
        name: Provenance.of(catalog.storage, folder / f"provenance-{number}")
        for number, (name, catalog) in enumerate(catalogs.items())
    }
    without = [name for name, each in found.items() if each is None]
    if not without:
        return join_provenance(folder, [each for each in found.values() if each is not None])
    if len(without) < len(found):
        dropped.append(
            f"provenance is left out, because {_some(without)} has none: convert it again, and samples will name their "
            "rows"
        )
    return ()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def _open_index(name: str, catalog: Catalog, fingerprint: str, folder: Path) -> LengthIndex | None:
    try:
        return open_lengths(catalog.storage, fingerprint, folder=folder, num_samples=catalog.num_samples)
    except LengthsError as error:
        raise LengthsError(f"{name}: {error}") from error


def _concatenate(indexes: Sequence[LengthIndex], folder: Path) -> LengthIndex:
    """One index of the samples of all, in arrays mapped from files in a folder."""
    fingerprint, of_all = indexes[0].fingerprint, patches_of_all(indexes)
    patches = None if of_all is None else _joined(of_all, folder / f"{fingerprint}.patches.joined")
    lengths = _joined([index.lengths for index in indexes], folder / f"{fingerprint}.joined")
    return joint_index(indexes, lengths=lengths, patches=patches, is_all=True)


def _joined(arrays: Sequence[NDArray[np.integer[Any]]], path: Path) -> NDArray[np.uint32]:
    """Arrays one after another, mapped from a file."""
    with path.open("wb") as file:
        for array in arrays:
            for start in range(0, len(array), _CHUNK):
                file.write(np.asarray(array[start : start + _CHUNK], "<u4").tobytes())
    return np.memmap(path, dtype="<u4", mode="r")


def write_joined(storage: Storage, joined: Joined, more: Mapping[str, Any]) -> dict[str, Any]:
    """Write its files, `_lmms/dataset.json` last, which is returned. more: what else that says."""
    storage.write(INDEX_NAME, joined.index)
    others = [INDEX_NAME, *upload_lengths(storage, joined.lengths, folder=joined.folder), *joined.provenance]
    for name in joined.provenance:
        storage.upload(joined.folder / name, name)
    dataset = {**_describe(joined), **more, "other_files": [*others, *more.get("other_files", [])]}
    write_json(storage, DATASET_NAME, dataset)
    return dataset


def _describe(joined: Joined) -> dict[str, Any]:
    """What `_lmms/dataset.json` holds of the samples; not what of their sources, and not of other files."""
    infos = [info for _, info in joined.shards]
    return {
        "version": 1,
        "schema": joined.schema,
        "columns": columns_of(infos),
        "num_samples": sum(info.num_samples for info in infos),
        "converter": f"lmms_stream {VERSION}",
        "shards": [_described(name, info) for name, info in joined.shards],
        "lengths": [index.fingerprint for index in joined.lengths],
        **unread.described(joined.unread),
        **({"not_shown": dict(joined.not_shown)} if joined.not_shown else {}),
    }


def _described(name: str, info: ShardInfo) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": path_to(name, info.name), "size": info.size, "num_samples": info.num_samples}
    algorithm, _, digest = (info.checksum or "").partition(":")
    if algorithm == "xxh3_64":
        entry["xxh3_64"] = digest
    if info.zip_name is not None:
        entry |= {"file": path_to(name, info.zip_name), "file_size": info.zip_size}
    return entry
