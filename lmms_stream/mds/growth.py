"""A dataset that has grown by parts, read as it was before some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from .index import DATASET_NAME
from .shard_list import ShardList


def first_parts(shards: ShardList, parts: Sequence[Mapping[str, Any]], num_parts: int | None, *, url: str) -> ShardList:
    """The shards that the dataset at a URL had when it had taken in so many parts; all of them for None.

    parts: those that it has taken in by now. Raises ConfigError where it never had so many.
    """
    if num_parts is None:
        return shards
    if not 0 <= num_parts <= len(parts):
        raise ConfigError(
            f"num_parts is {num_parts}, and {url} has {len(parts)} ({DATASET_NAME} lists them): choose from 0 to "
            f"{len(parts)}, or leave it out"
        )
    later = sum(int(part["num_samples"]) for part in parts[num_parts:])
    ends = np.cumsum(shards.samples)
    return shards.first(int(np.searchsorted(ends, int(ends[-1]) - later, side="right")))
