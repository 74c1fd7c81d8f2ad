"""Nodes of a run that take shards from each other, where their datasets say `fetch: {peers: true}`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...mds.core import core_of, opens_loader
from ...mds.peers import meet_peers
from ...types import World
from .distributed import address_for_others, cpu_group

logger = logging.getLogger("lmms_stream")


def share_shards(datasets: Sequence[Any], world: World) -> None:
    """Have nodes take the shards of those datasets that say so from each other; all ranks call it.

    The first rank of each node starts the node's server, which ends with the datasets, or with the rank.
    """
    cores = [core_of(each) for each in datasets if not opens_loader(each)]
    sharing = [core for core in cores if core.fetch.peers]
    if not sharing or world.num_nodes == 1:
        return
    meet_peers(sharing, host=address_for_others(os.environ), gather=_gather, world=world)
    if world.rank == 0:
        logger.info("%d nodes take shards from each other", world.num_nodes)


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=cpu_group())
    return everyone
