"""The lengths index of a dataset that is there already: shards -> measure -> index."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..cache import LocalCache, fetch_shard
from ..errors import ObjectMissingError
from ..lengths import LengthIndex
from ..processors.base import Processor, processor_fingerprint
from ..shards import DATASET_NAME, INDEX_NAME, Shard, parse_index
from ..storage import Storage, open_storage


def index_dataset(remote: str, processor: Processor, *, on_sample: Callable[[], None] = lambda: None) -> LengthIndex:
    """Measure every sample of `remote` and write its lengths index there; returns it."""
    storage = open_storage(remote)
    infos = parse_index(storage.read(INDEX_NAME), source=f"{storage.url}/{INDEX_NAME}")
    lengths = []
    with tempfile.TemporaryDirectory(prefix="lmms_stream-index-") as folder:
        cache = LocalCache(storage, Path(folder))
        for info in infos:
            path = fetch_shard(cache, info)
            shard = Shard(path, info, columns=processor.columns)
            for place in range(len(shard)):
                lengths.append(processor.measure(shard[place]))
                on_sample()
            if path.is_relative_to(folder):
                path.unlink()
        index = LengthIndex.from_array(
            np.array(lengths, np.uint32),
            fingerprint=processor_fingerprint(processor),
            processor=processor.description,
        )
        names = index.write(Path(folder))
        for name in names:
            storage.upload(Path(folder) / name, name)
    _list_index(storage, index.fingerprint, names)
    return index


def _list_index(storage: Storage, fingerprint: str, names: Sequence[str]) -> None:
    """Put the index last in `_lmms/dataset.json`; plain MDS datasets have none, and get none."""
    try:
        dataset = json.loads(storage.read(DATASET_NAME))
    except ObjectMissingError:
        return
    dataset["lengths"] = [*(other for other in dataset["lengths"] if other != fingerprint), fingerprint]
    dataset["other_files"] = sorted({*dataset["other_files"], *names})
    storage.write(DATASET_NAME, json.dumps(dataset, indent=1, sort_keys=True).encode() + b"\n")
