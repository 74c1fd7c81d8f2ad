"""Which shards to fetch ahead: those of the shuffle blocks that the packs are in, and of the blocks that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..mds.core import PackedDataset
from ..plan.assign import home_nodes
from ..plan.source_ranges import SourceBlock
from ..types import World


class BlocksAhead:
    """Follows packs through their blocks, for the canonical nodes that this machine serves.

    Packs of a block come from all over it, so all its shards are needed soon after the first; those of the next block
    are requested behind them, so that they come while this one is read.
    """

    def __init__(self, datasets: Mapping[str, PackedDataset], world: World):
        self._datasets = datasets
        self._world = world
        self._at: dict[tuple[str, int], tuple[int, int]] = {}  # source and canonical node -> epoch and block

    def enter(self, blocks: Sequence[SourceBlock]) -> None:
        """Packs of these blocks are about to be read."""
        entered = []
        for source, epoch, node, block in blocks:
            before = self._at.get((source, node))
            if not self._serves(source, node) or (before is not None and before >= (epoch, block)):
                continue
            self._at[source, node] = epoch, block
            entered.append(SourceBlock(source, epoch, node, block))
            if before is not None:
                passed = self._shards(SourceBlock(source, before[0], node, before[1]))
                self._datasets[source].pack_reader.pass_over(np.setdiff1d(passed, self._shards(entered[-1])))
        for each in entered:
            self._datasets[each.source].pack_reader.prefetch(self._shards(each))
        for each in entered:
            if self._datasets[each.source].fetch.cache_limit is None:  # the least cache_limit has room for two blocks
                self._datasets[each.source].pack_reader.prefetch(self._shards(each._replace(block=each.block + 1)))

    def _shards(self, block: SourceBlock) -> NDArray[np.int64]:
        return self._datasets[block.source].plan.shards_of_block(block.epoch, block.node, block.block)

    def _serves(self, source: str, node: int) -> bool:
        world, num_canonical_nodes = self._world, self._datasets[source].plan.num_canonical_nodes
        home = home_nodes(np.array(node), num_nodes=world.num_group_nodes, num_canonical_nodes=num_canonical_nodes)
        return bool(home == world.group * world.num_group_nodes // world.num_groups)
