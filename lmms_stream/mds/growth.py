"""A dataset that has grown by parts, read as it was before some of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

from ..errors import ConfigError, ObjectMissingError
from ..storage.storage import Storage
from .index import DATASET_NAME, ShardInfo


def num_parts_of(storage: Storage) -> int:
    """How many parts the dataset in a store has taken in."""
    try:
        return len(json.loads(storage.read(DATASET_NAME)).get("parts", []))
    except ObjectMissingError:
        return 0


def first_parts(
    shards: Sequence[ShardInfo], dataset: bytes | None, num_parts: int | None, *, url: str
) -> list[ShardInfo]:
    """The shards that the dataset at a URL had when it had taken in so many parts; all of them for None.

    dataset: what its dataset.json holds. Raises ConfigError where it never had so many.
    """
    if num_parts is None:
        return list(shards)
    parts = [] if dataset is None else json.loads(dataset).get("parts", [])
    if not 0 <= num_parts <= len(parts):
        raise ConfigError(
            f"num_parts is {num_parts}, and {url} has {len(parts)} ({DATASET_NAME} lists them): choose from 0 to "
            f"{len(parts)}, or leave it out"
        )
    later = sum(int(part["num_samples"]) for part in parts[num_parts:])
    stop = sum(info.num_samples for info in shards) - later
    ends = accumulate(info.num_samples for info in shards)
    return [info for info, end in zip(shards, ends, strict=True) if end <= stop]
