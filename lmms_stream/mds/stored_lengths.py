"""Where a lengths index is kept: beside the shards, listed in `_lmms/dataset.json`, or in a folder of this node."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import LengthsError, ObjectMissingError
from ..storage.disk_errors import disk_errors
from ..storage.local import LocalStorage
from ..storage.locks import locked
from ..storage.storage import Storage
from .filled_folder import FilledFolder
from .index import DATASET_NAME
from .lengths import LENGTHS_FOLDER, LengthIndex, array_matches, lengths_names, patches_name
from .measuring import lock_folder


def write_json(storage: Storage, name: str, value: Mapping[str, Any]) -> None:
    """Write one of a dataset's small files, the same bytes for the same values."""
    storage.write(name, json_bytes(value))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Content of a small file of a dataset, the same bytes for the same values."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def upload_lengths(storage: Storage, indexes: Sequence[LengthIndex], *, folder: Path) -> list[str]:
    """Write lengths indexes below `folder` and upload their files; returns the names, in that order."""
    names = []
    for index in indexes:
        for name in index.write(folder):
            storage.upload(folder / name, name)
            names.append(name)
    return names


def add_lengths(storage: Storage, index: LengthIndex, *, folder: Path) -> None:
    """Put a lengths index beside the shards, and last in `_lmms/dataset.json`. folder: for its files.

    Plain MDS datasets have no such list and get none: their indexes are found where they lie.
    """
    names = upload_lengths(storage, [index], folder=folder)
    with locked(lock_folder(storage.url) / "listing", timeout_s=math.inf):
        try:
            dataset = json.loads(storage.read(DATASET_NAME))
        except ObjectMissingError:
            return
        others = [other for other in dataset["lengths"] if other != index.fingerprint]
        dataset["lengths"] = [*others, index.fingerprint]
        dataset["other_files"] = sorted({*dataset["other_files"], *names})
        if isinstance(storage, LocalStorage):  # it may be filled from another place
            FilledFolder(storage, storage.folder, timeout_s=math.inf).change(DATASET_NAME, json_bytes(dataset))
        else:
            write_json(storage, DATASET_NAME, dataset)


# On this node, for datasets that cannot be written


def node_folder(cache_folder: Path, digest: str) -> Path:
    """Where this node keeps lengths of a dataset. digest: of its index.json; another one has another folder."""
    return cache_folder / "_lmms" / "measured" / digest


def keep_lengths(folder: Path, index: LengthIndex) -> None:
    """Keep a lengths index below a node_folder; it is there whole or not at all."""
    with disk_errors(str(folder)):
        (folder / LENGTHS_FOLDER).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".writing-", dir=folder, ignore_cleanup_errors=True) as temporary:
            for name in index.write(Path(temporary)):  # the description last, which says that it is there
                (Path(temporary) / name).replace(folder / name)


def kept_lengths(folder: Path, fingerprint: str) -> LengthIndex | None:
    """A lengths index that keep_lengths kept, memory-mapped; None where there is none, or it was damaged."""
    array_path, description_path = (folder / name for name in lengths_names(fingerprint))
    try:
        index = LengthIndex.open(array_path, description_path.read_bytes(), fingerprint=fingerprint)
    except (OSError, LengthsError):
        return None
    if not array_matches(array_path, content_hash=index.content_hash):
        return None
    patches_path = folder / patches_name(fingerprint)
    if index.patches is not None and not array_matches(patches_path, content_hash=index.patches_hash):
        return None
    return index
