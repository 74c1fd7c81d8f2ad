"""A dataset and a part in a folder below it -> the dataset of the samples of both, in the place of the first.

Readers find the old dataset or the new one. What the new one consists of is first written whole into the part's folder;
then a note at the target names it; then it is put in place, index.json, which every reader begins with, at once. A
command that is ended on the way leaves either no note, and the old dataset, or the note, by which `finish_growth` puts
all of it in place, as often as that is begun.
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
    """Where the part of a number, from 1, lies below its dataset."""
    return f"parts/{number:05}"


def parts_of(dataset: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts that a dataset has taken in, in their order. dataset: what its `_lmms/dataset.json` holds."""
    return list(dataset.get("parts", []))


def grow(target: Storage, part: str) -> tuple[str, ...]:
    """Make the samples of a part those that follow the dataset's own; returns why anything of it is left out.

    part: the folder below the target of a whole dataset of the same columns. The caller holds the target's lock.
    Raises what `join` raises, and StorageError; then the dataset is as it was.
    """
    catalogs = {"": read_catalog(target), part: read_catalog(open_storage(f"{target.url}/{part}"))}
    target.delete(GROWING_NAME)  # there is none; a store that cannot delete says so now
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
    """What the grown dataset says of its sources: those of both, counted together."""
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
    """Put in place what a note at the target says is ready; nothing where there is no note."""
    note = _read_note(target)
    if note is None:
        return
    staged = open_storage(f"{target.url}/{note['part']}/{_STAGED}")
    if read_if_there(staged, DATASET_NAME) is not None:  # else all of it is in place
        _put_in_place(target, staged, old=note["old"], new=note["new"])
    for name in sorted(note["new"], key=DATASET_NAME.__ne__):
        staged.delete(name)
    try:
        target.delete(GROWING_NAME)
    except StorageError:  # a store without deletion
        target.write(GROWING_NAME, b"{}")


def _put_in_place(target: Storage, staged: Storage, *, old: Sequence[str], new: Sequence[str]) -> None:
    """old: files that say more of the old samples than index.json does, dataset.json first: they would be taken for
    the new ones' after. new: dataset.json last.
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
