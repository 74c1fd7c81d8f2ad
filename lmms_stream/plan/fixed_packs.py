"""Packs that are made once: the order in which an epoch reads those of the first. counts -> [this] -> block, pack.

The blocks of each canonical node come in another order in each epoch, and so do the packs of each block. Both follow
from the seed, the epoch and the numbers of node and block, so any pack is found alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .order import OrderConfig

_Numbers = NDArray[np.int64]
_PACKS, _BLOCKS = 2, 3  # the last words of the streams' keys; 1 is block_seed's
_KEPT_BLOCKS = 64  # orders of packs, of blocks of all canonical nodes


class Turns:
    """The turn of a block is its position in the order of its canonical node's blocks; 0 is read first.

    blocks_of_turns: of all nodes, one after another, the row of the block that comes at each turn, of the rows of all
    blocks of all nodes.
    """

    def __init__(self, config: OrderConfig, epoch: int, num_blocks: list[int]):
        self._shuffles = config.shuffle and epoch > 0
        self._key = (config.seed, epoch)
        firsts = np.cumsum([0, *num_blocks])[:-1].tolist()
        orders = [self._permutation(count, node, 0, _BLOCKS) for node, count in enumerate(num_blocks)]
        rows = [order + first for order, first in zip(orders, firsts, strict=True)]
        self.blocks_of_turns: _Numbers = np.concatenate(rows) if rows else np.empty(0, np.int64)
        self._orders = orders
        self._kept = lru_cache(_KEPT_BLOCKS)(self._order_of)

    def block(self, node: int, turn: int) -> int:
        """The block of a canonical node at a turn."""
        return int(self._orders[node][turn])

    def turn(self, node: int, block: int) -> int:
        """The turn of a block of a canonical node."""
        return int(np.flatnonzero(self._orders[node] == block)[0])

    def packs(self, node: int, turn: int, positions: _Numbers, *, num_packs: int) -> _Numbers:
        """The numbers in their block of the packs at these positions of a turn, of num_packs."""
        found: _Numbers = self._kept(node, turn, num_packs)[positions]
        return found

    def _order_of(self, node: int, turn: int, num_packs: int) -> _Numbers:
        return self._permutation(num_packs, node, self.block(node, turn), _PACKS)

    def _permutation(self, size: int, node: int, block: int, stream: int) -> _Numbers:
        if not self._shuffles:
            return np.arange(size)
        return np.random.default_rng([*self._key, node + 1, block, stream]).permutation(size)
