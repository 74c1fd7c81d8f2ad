"""The last write: index.json, lengths, provenance and rejected rows make shards a dataset, then `_lmms/dataset.json`.

When a dataset is replaced, overwriting index.json turns the old dataset into the new dataset at once. Other files that
describe the old samples are removed first: next to the new index they would be taken for descriptions of new samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ...mds.index import DATASET_NAME, INDEX_NAME
from ...mds.lengths import LengthIndex, lengths_names, patches_name
from ...mds.measuring import MEDIA_KINDS, upload_lengths, write_json
from ...mds.provenance import PROVENANCE_NAME, SOURCES_NAME, write_provenance
from ...processors.base import Processor, processor_fingerprint
from ...processors.lengths import measures_media
from ...storage.storage import Storage
from ..stored.catalog import REJECTS_NAME
from .encoding import HASH, index_json
from .work import is_shard


def commit(
    target: Storage,
    entries: Sequence[Mapping[str, Any]],
    description: Mapping[str, Any],
    *,
    lengths: Sequence[LengthIndex],
    rejects: Sequence[tuple[str, int, str]],
    rows: Sequence[np.ndarray[Any, Any]],
    sources: Sequence[str],
    staging: Path,
    replaced: Sequence[str] = (),
) -> None:
    """Write the files. entries: of index.json, in order. rejects: source, row and reason of each.

    rows: packed source rows of the samples, in the order of the samples. sources: names of the sources. replaced: files
    of the dataset that is replaced; files that the new dataset does not have are removed.
    """
    # Delete dataset.json first: without it, no other file is taken for a part of a dataset.
    for name in sorted(replaced, key=DATASET_NAME.__ne__):
        if name != INDEX_NAME and not is_shard(name):
            target.delete(name)
    target.write(INDEX_NAME, index_json(entries))
    others = [INDEX_NAME, *upload_lengths(target, lengths, folder=staging)]
    for name in write_provenance(staging, rows, sources, num_samples=description["num_samples"]):
        target.upload(staging / name, name)
        others.append(name)
    if rejects:
        target.write(REJECTS_NAME, b"".join(_reject_lines(rejects)))
        others.append(REJECTS_NAME)
    dataset = {
        **description,
        "version": 1,
        "shards": [_described(entry) for entry in entries],
        "lengths": [index.fingerprint for index in lengths],
        "other_files": others,
    }
    write_json(target, DATASET_NAME, dataset)
    for name in replaced:
        if is_shard(name):  # of the old dataset, since the new shards have other numbers
            target.delete(name)


def other_files(measured_by: Processor | None, carried: Sequence[str] = ()) -> list[str]:
    """Names of all files that `commit` may write. carried: fingerprints of lengths indexes of the stored datasets."""
    names = [INDEX_NAME, REJECTS_NAME, PROVENANCE_NAME, SOURCES_NAME, DATASET_NAME]
    if measured_by is not None:
        fingerprint = processor_fingerprint(measured_by)
        names += lengths_names(fingerprint)
        if measures_media(measured_by):
            names.append(patches_name(fingerprint))
    for fingerprint in carried:
        names += [*lengths_names(fingerprint), patches_name(fingerprint)]
    return list(dict.fromkeys(names))


def measured_lengths(
    lengths: Sequence[np.ndarray[Any, Any]], measured_by: Processor, *, not_shown: Mapping[str, int]
) -> LengthIndex:
    """The lengths index of samples, from several arrays of lengths: uint32[n] or uint32[n, k], see EncodedUnit."""
    columns = np.atleast_2d(np.concatenate(lengths).astype(np.uint32).T)
    patches = np.ascontiguousarray(columns[1]) if len(columns) > 1 else None
    return LengthIndex.from_array(
        np.ascontiguousarray(columns[0]),
        fingerprint=processor_fingerprint(measured_by),
        processor=measured_by.description,
        patches=patches,
        num_tokens_of=dict(zip(MEDIA_KINDS, columns[2:].sum(axis=1, dtype=np.int64).tolist(), strict=False)),
        num_cut=int(columns[5].sum(dtype=np.int64)) if len(columns) > 5 else 0,
        not_shown=not_shown,
    )


def _described(entry: Mapping[str, Any]) -> dict[str, Any]:
    raw, zipped = entry["raw_data"], entry["zip_data"]
    described = {
        "name": raw["basename"],
        "size": raw["bytes"],
        HASH: raw["hashes"][HASH],
        "num_samples": entry["samples"],
    }
    return described | ({"file": zipped["basename"], "file_size": zipped["bytes"]} if zipped else {})


def _reject_lines(rejects: Sequence[tuple[str, int, str]]) -> Iterator[bytes]:
    for source, row, reason in rejects:
        yield orjson.dumps({"source": source, "row": row, "reason": reason}) + b"\n"
