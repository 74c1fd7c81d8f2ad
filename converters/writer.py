"""Samples -> shards in a store. Shards are uploaded as they fill; what makes them a dataset is written last."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streaming import MDSWriter

from ..errors import DataError, StorageError
from ..lengths import LengthIndex
from ..shards import DATASET_NAME, INDEX_NAME
from ..storage import Storage
from ..types import Sample
from .catalog import own_files, parse_dataset, read_if_there

REJECTS_NAME = "_lmms/rejects.jsonl"
MAX_SAMPLE_BYTES = 1 << 31  # MDS counts a shard's bytes in 32 bits


class DatasetWriter:
    """Writes the shards of one dataset into `storage`, in the order of `write`; `commit` makes it readable.

    Until then the store has shards at most, and no index that names them. Use as `open_writer` gives it.
    """

    def __init__(self, storage: Storage, *, columns: Mapping[str, str], shard_bytes: int, staging: Path):
        self.storage = storage
        self._staging = staging
        self._uploaded = 0
        self._writer = MDSWriter(
            columns=dict(columns), out=str(staging / "shards"), hashes=["xxh3_64"], size_limit=shard_bytes
        )

    def write(self, sample: Sample) -> None:
        size = sum(len(value) for value in sample.values() if isinstance(value, (str, bytes)))
        if size >= MAX_SAMPLE_BYTES:
            raise DataError(f"the sample has {size} bytes, a shard holds less than {MAX_SAMPLE_BYTES}: split it")
        self._writer.write(sample)
        self._upload_full_shards()

    def commit(self, description: Mapping[str, Any], lengths: LengthIndex | None, rejects: bytes) -> dict[str, Any]:
        """Upload what is left, then index.json, the lengths index, and last `_lmms/dataset.json`, which it returns."""
        self._writer.finish()
        self._upload_full_shards()
        folder = self._staging / "shards"
        self.storage.write(INDEX_NAME, (folder / INDEX_NAME).read_bytes())
        others = [INDEX_NAME]
        if lengths is not None:
            for name in lengths.write(self._staging):
                self.storage.upload(self._staging / name, name)
                others.append(name)
        if rejects:
            self.storage.write(REJECTS_NAME, rejects)
            others.append(REJECTS_NAME)
        shards = [
            {
                "name": shard["raw_data"]["basename"],
                "size": shard["raw_data"]["bytes"],
                "xxh3_64": shard["raw_data"]["hashes"]["xxh3_64"],
                "num_samples": shard["samples"],
            }
            for shard in self._writer.shards
        ]
        dataset = {
            **description,
            "version": 1,
            "shards": shards,
            "lengths": [lengths.fingerprint] if lengths is not None else [],
            "other_files": others,
        }
        self.storage.write(DATASET_NAME, json.dumps(dataset, indent=1, sort_keys=True).encode() + b"\n")
        return dataset

    def _upload_full_shards(self) -> None:
        for shard in self._writer.shards[self._uploaded :]:
            path = self._staging / "shards" / shard["raw_data"]["basename"]
            self.storage.upload(path, path.name)
            path.unlink()
            self._uploaded += 1


@contextmanager
def open_writer(
    storage: Storage, *, columns: Mapping[str, str], shard_bytes: int, overwrite: bool = False
) -> Iterator[DatasetWriter]:
    """A writer into a store without a dataset; `overwrite` first removes the one there, file by file it lists."""
    _make_room(storage, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="lmms_stream-convert-") as staging:
        yield DatasetWriter(storage, columns=columns, shard_bytes=shard_bytes, staging=Path(staging))


def _make_room(storage: Storage, *, overwrite: bool) -> None:
    described = read_if_there(storage, DATASET_NAME)
    if described is None:
        return
    if not overwrite:
        raise StorageError(f"{storage.url} holds a dataset already: choose another target, or pass --overwrite")
    files = own_files(parse_dataset(described, source=f"{storage.url}/{DATASET_NAME}"))
    storage.delete(DATASET_NAME)
    for name in files:
        storage.delete(name)
