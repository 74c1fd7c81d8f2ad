"""Several datasets -> one index over all of them, in the folder above; no shard is copied or changed."""

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
from ...mds.index import DATASET_NAME, INDEX_NAME, ShardInfo, is_safe_name, parse_index, read_if_there
from ...mds.lengths import LengthIndex, joint_index, patches_of_all
from ...mds.measuring import upload_lengths, write_json
from ...mds.provenance import Provenance, join_provenance
from ...processors.not_shown import added
from ...storage.storage import Storage, open_storage
from ...version import VERSION
from .catalog import Catalog, columns_of, open_lengths, own_files, parse_dataset, read_catalog
from .row_counts import UnreadNames, described_unread, joined_unread, unread_of_dataset

_THREADS = 16  # threads that read catalogs mostly wait for their stores


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """Result of a merge. dropped: reasons for left-out lengths indexes, which only some sources have."""

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
    """Make `target` one dataset of all samples of `sources`, in this order, without changing the sources.

    sources: folders or URLs below `target`, datasets with the same columns. Lengths indexes of all sources are joined.
    overwrite: replace an earlier merge. on_start, on_source: called with the number of sources, and after each source
    is read. Raises ConfigError for sources that cannot be merged, StorageError for an existing dataset at `target`,
    ShardError and LengthsError for damaged sources.
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
    with tempfile.TemporaryDirectory(prefix="lmms_stream-merge-") as folder:
        joined = join(catalogs, Path(folder), url=storage.url)
        for name in old_files:
            storage.delete(name)
        listed = [
            {"name": name, "num_samples": catalog.num_samples, "num_shards": len(catalog.shards)}
            for name, catalog in catalogs.items()
        ]
        dataset = write_joined(storage, joined, {"sources": listed})
    return MergeReport(
        num_sources=len(names),
        num_shards=len(joined.shards),
        num_samples=dataset["num_samples"],
        num_bytes=sum(info.zip_size or info.size for _, info in joined.shards),
        num_lengths_indexes=len(joined.lengths),
        dropped=joined.dropped,
    )


Place = str | Path | tuple[str | Path, str | Path]  # a folder, a URL, or a pair of both


def merge_index(
    first: Place | list[Any],
    /,
    out: Place | bool | None = None,
    keep_local: bool = True,
    download_timeout: float | None = None,
) -> None:
    """MosaicML Streaming's call for merge_datasets: merge_index(index_file_urls, out, …), or merge_index(out, …).

    index_file_urls: the index.json files of the datasets, in the order of their samples; default: all index.json files
    below `out`, sorted by name. out: the folder or URL above the datasets, or a pair of both: the datasets at the URL
    are merged, and the folder gets a copy of the index unless keep_local is False. An existing index is replaced.
    download_timeout is ignored: requests have their own limits. Raises the errors of merge_datasets.
    """
    given = first if isinstance(first, list) else None
    if not isinstance(first, list):
        out, keep_local = first, keep_local if out is None else bool(out)
    if out is None or isinstance(out, bool):
        raise ConfigError("merge_index takes the folder or URL above the datasets behind the list of their indexes")
    local, target = out if isinstance(out, tuple) else (None, out)
    storage = open_storage(target)
    if given is None:
        keys = [each.key for each in storage.list_objects("")]
        found = [f"{storage.url}/{key}" for key in keys if key.endswith(f"/{INDEX_NAME}") and is_safe_name(key)]
    else:
        found = [str(each[1] if isinstance(each, tuple) else each) for each in given]
    sources = dict.fromkeys(url.removesuffix(f"/{INDEX_NAME}") for url in found)
    merge_datasets(str(target), list(sources), overwrite=True)
    if local is not None and keep_local:
        open_storage(local).write(INDEX_NAME, storage.read(INDEX_NAME))


def _names_below(target: Storage, sources: Sequence[str]) -> list[str]:
    """Return the paths of the sources relative to the target."""
    if not sources:
        raise ConfigError("there is nothing to merge: name the folders or URLs of datasets below the target")
    names: list[str] = []
    for source in sources:
        above, url = (_absolute(open_storage(text).url) for text in (target.url, source))
        name = url.removeprefix(f"{above}/")
        if name == url or not is_safe_name(name) or "_lmms" in name.split("/"):
            raise ConfigError(
                f"{source} is not below {target.url}, and a merge copies no shards: name a folder above all sources as "
                "target (hidden folders and _lmms cannot be sources)"
            )
        if name in names:
            raise ConfigError(f"{source} is given twice: name each source once")
        names.append(name)
    return names


def _absolute(url: str) -> str:
    return url if "://" in url else os.path.abspath(url)  # noqa: PTH100 - links are left as they are


def _earlier_merge(storage: Storage, *, overwrite: bool) -> list[str]:
    """Return the files of an existing merge at the target, in order of removal."""
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
            f"{storage.url} holds a dataset with shards ({own[0]}), which the merged index would not list: move the "
            "dataset into a subfolder and name the subfolder as a source, or choose another target"
        )
    return files


# Several datasets -> the content of one dataset of all samples; no shard is copied or changed. An entry of the joint
# index.json names its shard by a relative path ("a/shard.00000.mds"), which MosaicML Streaming's own readers also
# follow.

_CHUNK = 1 << 20  # lengths copied together


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """One dataset of several. index: content of its index.json. shards: each with the name of its dataset.

    dropped: reasons for left-out lengths indexes and provenance, which only some datasets have. folder: location of the
    files named in `provenance`. schema: schema of the samples. unread: unread names in all rows. not_shown: samples
    with content omitted by the chat template, by kind of content.
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
    """Join all samples of datasets, in this order. folder: location of new files made from theirs.

    catalogs: path from the joint dataset's folder, at `url`, to each dataset's folder; "" for the same folder. Raises
    ConfigError if they cannot be joined, ShardError and LengthsError for damaged datasets.
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
        unread=joined_unread(unread_of_dataset(each.dataset or {}) for each in catalogs.values()),
        not_shown=added((each.dataset or {}).get("not_shown", {}) for each in catalogs.values()),
    )


def path_to(name: str, file: str) -> str:
    """Return the path to a dataset's file from the folder of the joint dataset."""
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
        raise ConfigError(
            f"{found}: only datasets with the same columns and kind can be merged: leave one out, or convert it again"
        )
    return next(iter(schemas), None)


def _check_names(shards: Sequence[tuple[str, ShardInfo]]) -> None:
    owners: dict[str, str] = {}
    for name, info in shards:
        path = path_to(name, info.name)
        if path in owners:
            raise ConfigError(f"{owners[path]} and {name} both list {path}: leave one of the two out")
        owners[path] = name


def _entries(name: str, catalog: Catalog) -> list[dict[str, Any]]:
    """Return a source's entries of index.json, with paths from the target."""
    entries = copy.deepcopy(list(catalog.index["shards"]))
    for entry in entries:
        for data in map(entry.get, ("raw_data", "zip_data", "raw_meta", "zip_meta")):
            if data is not None:
                data["basename"] = path_to(name, data["basename"])
    return entries


def _join_lengths(catalogs: Mapping[str, Catalog], folder: Path) -> tuple[list[LengthIndex], list[str]]:
    """Join each lengths index present in all sources; return the joined indexes, and reasons for other indexes."""
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
                "lmms-stream index for the merged dataset, or for each source, and then merge again with --overwrite"
            )
        elif found:
            joined.append(_concatenate(found, folder))
    return joined, dropped


def _join_provenance(catalogs: Mapping[str, Catalog], folder: Path, dropped: list[str]) -> tuple[str, ...]:
    """Join provenance if all datasets have provenance; return its file names, or append the reason to `dropped`."""
    found = {
        name: Provenance.of(catalog.storage, folder / f"provenance-{number}")
        for number, (name, catalog) in enumerate(catalogs.items())
    }
    without = [name for name, each in found.items() if each is None]
    if not without:
        return join_provenance(folder, [each for each in found.values() if each is not None])
    if len(without) < len(found):
        dropped.append(
            f"provenance is left out, because {_some(without)} has none: convert it again, merge again with "
            "--overwrite, and samples will name their rows"
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
    """Return one index of all samples, in arrays mapped from files in a folder."""
    fingerprint, of_all = indexes[0].fingerprint, patches_of_all(indexes)
    patches = None if of_all is None else _joined(of_all, folder / f"{fingerprint}.patches.joined")
    lengths = _joined([index.lengths for index in indexes], folder / f"{fingerprint}.joined")
    return joint_index(indexes, lengths=lengths, patches=patches, is_all=True)


def _joined(arrays: Sequence[NDArray[np.integer[Any]]], path: Path) -> NDArray[np.uint32]:
    """Concatenate arrays in a file, and map the file."""
    with path.open("wb") as file:
        for array in arrays:
            for start in range(0, len(array), _CHUNK):
                file.write(np.asarray(array[start : start + _CHUNK], "<u4").tobytes())
    return np.memmap(path, dtype="<u4", mode="r")


def write_joined(storage: Storage, joined: Joined, more: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files of a joined dataset, `_lmms/dataset.json` last; return its content. more: additional entries."""
    storage.write(INDEX_NAME, joined.index)
    others = [INDEX_NAME, *upload_lengths(storage, joined.lengths, folder=joined.folder), *joined.provenance]
    for name in joined.provenance:
        storage.upload(joined.folder / name, name)
    dataset = {**_describe(joined), **more, "other_files": [*others, *more.get("other_files", [])]}
    write_json(storage, DATASET_NAME, dataset)
    return dataset


def _describe(joined: Joined) -> dict[str, Any]:
    """Return the entries of `_lmms/dataset.json` about samples, without sources and other files."""
    infos = [info for _, info in joined.shards]
    return {
        "version": 1,
        "schema": joined.schema,
        "columns": columns_of(infos),
        "num_samples": sum(info.num_samples for info in infos),
        "converter": f"lmms_stream {VERSION}",
        "shards": [_described(name, info) for name, info in joined.shards],
        "lengths": [index.fingerprint for index in joined.lengths],
        **described_unread(joined.unread),
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
