"""What conversions wrote at a target, and what of it readers still read while another one replaces it.

A dataset that is to be replaced stays as it is until the new one is there: the new shards take numbers that the old
ones do not have, and index.json, which every reader begins with, is written over at once. What is left of the old
dataset is removed after that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

from ...errors import StorageError
from ...mds.index import DATASET_NAME, INDEX_NAME, is_safe_name, parse_index
from ...mds.listing import read_if_there
from ...storage.storage import Storage
from ..stored.catalog import own_files, parse_dataset
from .shards import shard_name

UNFINISHED_NAME = "_lmms/unfinished.json"
_SHARD = re.compile(r"shard\.(\d{5,})\.mds(\.\w+)?")


def is_shard(name: str) -> bool:
    """Whether a file is named as shards are, in whatever folder."""
    return _SHARD.fullmatch(name.rpartition("/")[2]) is not None


def free_numbers(replaced: Iterable[str]) -> Iterator[int]:
    """Numbers for the files of new shards: 0, 1, 2, … without those of the files that are replaced.

    >>> list(islice(free_numbers(["index.json", "shard.00000.mds", "shard.00002.mds.zstd"]), 3))
    [1, 3, 4]
    """
    found = (_SHARD.fullmatch(name) for name in replaced)
    taken = {int(each[1]) for each in found if each}
    return (number for number in count() if number not in taken)


def remove_unreadable(target: Storage) -> list[str]:
    """Remove what conversions wrote there and no reader reads; the names of what is left, a dataset's own files.

    They are those of a whole dataset, or of one that was about to be replaced when the command was killed; none are
    left of a first conversion that is unfinished. Its claim stays: it goes, or another takes its turn, after that.
    """
    described, claim = read_if_there(target, DATASET_NAME), read_claim(target)
    ours = set() if claim is None else _claimed(claim)
    kept: set[str] = set()
    if described is not None:
        kept = {DATASET_NAME, *own_files(parse_dataset(described, source=f"{target.url}/{DATASET_NAME}"))}
    elif claim is not None and claim.get("replaced"):
        index = read_if_there(target, INDEX_NAME)
        listed = parse_index(index, source=f"{target.url}/{INDEX_NAME}") if index is not None else []
        files = {info.zip_name or info.name for info in listed}
        kept = {name for name in ours if name in files or not is_shard(name)}
    for name in sorted(ours - kept):
        target.delete(name)
    if kept and claim is None:
        # There is none; a store that cannot delete says so now, and not once all is done.
        target.delete(UNFINISHED_NAME)
    return sorted(kept)


def read_claim(target: Storage) -> dict[str, Any] | None:
    """What an unfinished conversion says of itself at its target; None where there is none."""
    return read_described(target, UNFINISHED_NAME) or None


def read_described(target: Storage, name: str) -> dict[str, Any] | None:
    """A JSON object at the target whose names are safe to follow."""
    data = read_if_there(target, name)
    if data is None:
        return None
    try:
        described = dict(json.loads(data))
        files = [*described.get("files", ()), *described.get("replaced", ()), f"shard{described.get('extension', '')}"]
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{target.url}/{name} is damaged ({error}): remove it, or choose another target") from error
    if not all(is_safe_name(file) for file in files):
        raise StorageError(f"{target.url}/{name} names files outside the dataset: remove it, or choose another target")
    return described


def _claimed(claim: Mapping[str, Any]) -> set[str]:
    """Files that an unfinished conversion may have written, and those that it replaces."""
    replaced = claim.get("replaced", [])
    numbers = islice(free_numbers(replaced), claim["num_shards"])
    return {*claim["files"], *replaced, *(shard_name(number) + claim["extension"] for number in numbers)}
