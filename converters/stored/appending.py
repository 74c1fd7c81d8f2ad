"""A dataset and a part in a folder below it -> a dataset of both samples, in place of the first.

Readers find the old dataset or the new dataset. All files of the new dataset are first written into the part's folder.
Then a note at the target names them. Then they are moved in place, first index.json, where every reader begins, in one
step. An interrupted command leaves either no note, and the old dataset; or the note, and `finish_growth` completes the
move, as often as needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import StorageError
from ...mds.index import DATASET_NAME, INDEX_NAME, is_safe_name, read_if_there
from ...mds.measuring import write_json
from ...storage.storage import Storage, open_storage
from .catalog import REJECTS_NAME, Catalog, own_files, read_catalog
from .merge import join, path_to, write_joined

GROWING_NAME = "_lmms/growing.json"
_STAGED = "_lmms/grown"  # in the part's folder


def part_name(number: int) -> str:
    """Return the path of a part below its dataset; number: from 1."""
    return f"parts/{number:05}"


def parts_of(dataset: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the appended parts of a dataset, in order. dataset: content of its `_lmms/dataset.json`."""
    return list(dataset.get("parts", []))


def grow(target: Storage, part: str) -> tuple[str, ...]:
    """Append a part's samples to the dataset; return the reasons for left-out lengths indexes and provenance.

    part: folder, below the target, of a complete dataset with the same columns. The caller holds the target's lock.
    Raises the errors of `join`, and StorageError; the dataset is then unchanged.
    """
    catalogs = {"": read_catalog(target), part: read_catalog(open_storage(f"{target.url}/{part}"))}
    target.delete(GROWING_NAME)  # normally missing; a store without deletion raises here
    staged = open_storage(f"{target.url}/{part}/{_STAGED}")
    with TemporaryDirectory(prefix="lmms_stream-append-") as folder:
        joined = join(catalogs, Path(folder), url=target.url)
        more = _description(catalogs, part)
        rejects = [
            data for each in catalogs.values() if (data := read_if_there(each.storage, REJECTS_NAME)) is not None
        ]
        if rejects:
            staged.write(REJECTS_NAME, b"".join(rejects))
            more["other_files"] = [REJECTS_NAME]
        new = write_joined(staged, joined, more)
    old = catalogs[""].dataset
    assert old is not None
    note = {"part": part, "old": [DATASET_NAME, *old["other_files"]], "new": [*new["other_files"], DATASET_NAME]}
    write_json(target, GROWING_NAME, note)
    finish_growth(target)
    return joined.dropped


def _description(catalogs: Mapping[str, Catalog], part: str) -> dict[str, Any]:
    """Return the grown dataset's description of its sources: both descriptions with summed counts."""
    old, new = (catalog.dataset for catalog in catalogs.values())
    assert old is not None
    assert new is not None
    files = [DATASET_NAME, *own_files(new)]
    counts = [name for name in {**old, **new} if name.startswith("num_") and name != "num_samples"]
    return {
        "source": [*old["source"], *new["source"]],
        "options": old["options"] | {"code": old["options"].get("code", {}) | new["options"].get("code", {})},
        **{name: old.get(name, 0) + new.get(name, 0) for name in counts},
        "parts": [
            *parts_of(old),
            {
                "name": part,
                "num_samples": new["num_samples"],
                "files": [path_to(part, file) for file in files],
            },
        ],
    }


def finish_growth(target: Storage) -> None:
    """Move the files named by a note at the target in place; do nothing without a note."""
    note = _read_note(target)
    if note is None:
        return
    staged = open_storage(f"{target.url}/{note['part']}/{_STAGED}")
    if read_if_there(staged, DATASET_NAME) is not None:  # else all files are in place
        _put_in_place(target, staged, old=note["old"], new=note["new"])
    for name in sorted(note["new"], key=DATASET_NAME.__ne__):
        staged.delete(name)
    try:
        target.delete(GROWING_NAME)
    except StorageError:  # a store without deletion
        target.write(GROWING_NAME, b"{}")


def _put_in_place(target: Storage, staged: Storage, *, old: Sequence[str], new: Sequence[str]) -> None:
    """Replace the old files by the new files.

    old: files that describe the old samples beyond index.json, dataset.json first: they would be mistaken for files of
    the new samples. new: dataset.json last.
    """
    for name in old:
        if name != INDEX_NAME:
            target.delete(name)
    with TemporaryDirectory(prefix="lmms_stream-append-") as folder:
        path = Path(folder) / "file"
        for name in (INDEX_NAME, *(name for name in new if name != INDEX_NAME)):
            staged.download(name, path)
            target.upload(path, name)


def _read_note(target: Storage) -> dict[str, Any] | None:
    data = read_if_there(target, GROWING_NAME)
    if data is None or data == b"{}":
        return None
    try:
        note = dict(json.loads(data))
        names = [note["part"], *note["old"], *note["new"]]
    except (ValueError, TypeError, LookupError) as error:
        raise StorageError(
            f"{target.url}/{GROWING_NAME} is damaged ({error!r}): remove it, and append again"
        ) from error
    if not all(is_safe_name(name) for name in names):
        raise StorageError(f"{target.url}/{GROWING_NAME} names files outside the dataset: remove it, and append again")
    return note
