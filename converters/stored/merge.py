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

    index_file_urls: the index.json files of the datasets, in the order of their samples; without them all that lie
    below `out`, in the order of their names. out: the folder or URL above the datasets, or a pair of both: then what
    lies at the URL is merged, and the folder gets a copy of the index unless keep_local is False. An index that is
    there is replaced. download_timeout is not needed: requests have limits of their own. Raises what merge_datasets
    raises.
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


# Several datasets -> what one dataset of all their samples consists of; no shard is copied or changed.
#
# An entry of the joint index.json names its shard by the path from there ("a/shard.00000.mds"), which MosaicML
# Streaming's own readers follow as well.

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
        unread=joined_unread(unread_of_dataset(each.dataset or {}) for each in catalogs.values()),
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
