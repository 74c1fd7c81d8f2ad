"""Several datasets -> one index over all of them, in the folder above; no shard is copied or changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, StorageError
from ...mds.index import DATASET_NAME, INDEX_NAME, is_safe_name, parse_index
from ...mds.listing import read_if_there
from ...storage.storage import Storage, open_storage
from .catalog import Catalog, own_files, parse_dataset, read_catalog
from .joining import join, write_joined

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
