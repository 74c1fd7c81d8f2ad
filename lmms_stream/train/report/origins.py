"""Ids of samples -> the rows of the user's files that they were made of, for an alert to name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...errors import LmmsStreamError
from ...loader.loader import PackedLoader
from ..run.distributed import cpu_group

logger = logging.getLogger("lmms_stream")


def rows_of(ids: Sequence[Any], loader: PackedLoader) -> list[str]:
    """`file:row` of each sample, as far as their datasets say; all ranks call it alike, and rank 0 reads a few bytes.

    ids: as a record names them, after their source where there are several.
    """
    told = [_read(ids, loader) if loader.world.rank == 0 else []]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    return told[0]


def _read(ids: Sequence[Any], loader: PackedLoader) -> list[str]:
    try:
        found = [_origin(str(each), loader) for each in ids]
    except (LmmsStreamError, IndexError) as error:
        logger.warning("the rows that samples were made of cannot be told: %s", error)
        return []
    return [row for row in found if row is not None]


def _origin(sample: str, loader: PackedLoader) -> str | None:
    source, _, number = sample.rpartition(":")
    row = loader.origin_of(source or loader.sources[0], int(number))
    return None if row is None else str(row)
