"""Which shards to fetch ahead: those of the shuffle blocks that the packs are in, and of the blocks that follow."""

from __future__ import annotations

import numpy as np

from .assign import home_nodes
from .dataset import PackedStreamingDataset
from .types import World


class BlocksAhead:
    """Follows the packs of a dataset through their blocks, for the canonical nodes that this machine serves.

    Packs of a block come from all over it, so all its shards are needed soon after the first; those of the next block
    are requested behind them, so that they come while this one is read.
    """

    def __init__(self, dataset: PackedStreamingDataset, world: World):
        self._dataset = dataset
        homes = home_nodes(
            np.arange(dataset.plan.num_canonical_nodes),
            num_nodes=world.num_group_nodes,
            num_canonical_nodes=dataset.plan.num_canonical_nodes,
        )
        self._served = homes == world.group * world.num_group_nodes // world.num_groups
        self._at: dict[int, tuple[int, int]] = {}  # canonical node -> epoch and block

    def follow(self, epoch: int, first: int, stop: int) -> None:
        """Packs [first, stop) of an epoch are about to be read."""
        plan, reader = self._dataset.plan, self._dataset.pack_reader
        entered = []
        for node, block in plan.blocks(epoch, first, stop):
            before = self._at.get(node)
            if self._served[node] and (before is None or before < (epoch, block)):
                self._at[node] = epoch, block
                entered.append((node, block))
                if before is not None:
                    passed = plan.shards_of_block(before[0], node, before[1])
                    reader.pass_over(np.setdiff1d(passed, plan.shards_of_block(epoch, node, block)))
        limited = self._dataset.fetch.cache_limit is not None  # its least has room for two blocks, not for three
        for next_block in (0,) if limited else (0, 1):
            for node, block in entered:
                reader.prefetch(plan.shards_of_block(epoch, node, block + next_block))
