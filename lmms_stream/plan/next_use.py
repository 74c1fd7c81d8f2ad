"""Next use of each shard. order + the blocks at hand -> [next use] -> epochs from now; arithmetic only.

The next use follows from the order alone: the shards of an epoch are permuted and laid end to end. Each shard is in one
block of a canonical node, or in a few consecutive blocks. No samples or packs are read: O(shards + blocks) an epoch. A
cache that evicts the shard with the latest next use downloads least (Belady, IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .assign import has_equal_shares, home_nodes
from .order import EpochOrder, Turns
from .pack_plan import PackPlan
from .sample_order import SampleOrder

NOW, NEVER = 0.0, float("inf")
MAX_EPOCHS = 4  # epochs to search
_TURN_BITS = 32
_SOON = np.float32(2.0**-20)  # of an epoch: minimum time for shards that are not needed now
_BLOCKS_OF_SHARD = 4  # pieces of a shard that give its next use precisely enough
_MAX_CALLS = 1 << 14  # of shards_of_block: seconds at most


class _Pieces(NamedTuple):
    """Parts of shards in blocks.

    shards, nodes, firsts, lasts: int32[n]; firsts, lasts: turns of the first and the last block with the piece. at:
    float32[n], share of the canonical node's blocks before the piece.
    """

    shards: NDArray[np.int32]
    nodes: NDArray[np.int32]
    firsts: NDArray[np.int32]
    lasts: NDArray[np.int32]
    at: NDArray[np.float32]


def place(epoch: int, turn: int) -> int:
    """Return the place of a canonical node: an epoch, and the turn of a block in it (see Turns); later is larger."""
    return epoch << _TURN_BITS | turn


class Places:
    """Positions of the canonical nodes of a plan, and the blocks at hand of each node. The arrays are never changed.

    held, now: see NextUse.times. All nodes begin at the start of the epoch.
    """

    def __init__(self, num_canonical_nodes: int, *, epoch: int):
        self.epoch = epoch
        self.held = self.now = np.full(num_canonical_nodes, place(epoch, 0), np.int64)
        self._is_entered = np.zeros(num_canonical_nodes, bool)
        self._passing: list[tuple[int, int, int]] = []  # step, canonical node, and the node's place from this step on

    def enter(self, node: int, at: int, *, until: int) -> None:
        """Move a canonical node to a place; the blocks before it stay at hand until a step."""
        self.now = _with(self.now, node, at)
        if self._is_entered[node]:
            self._passing.append((until, node, at))
        else:
            self._is_entered[node], self.held = True, _with(self.held, node, at)

    def pass_to(self, step: int) -> bool:
        """Drop blocks that are at hand only until this step; return whether any was dropped."""
        passed = [each for each in self._passing if each[0] <= step]
        if passed:
            self._passing = [each for each in self._passing if each[0] > step]
            for _, node, at in passed:
                self.held = _with(self.held, node, at)
        return bool(passed)


def _with(values: NDArray[np.int64], at: int, value: int) -> NDArray[np.int64]:
    changed = values.copy()
    changed[at] = value
    return changed


def served_nodes(node: int, *, nodes: Sequence[int], num_canonical_nodes: int) -> NDArray[np.bool_]:
    """Return the canonical nodes whose packs a machine reads: bool[num_canonical_nodes]. nodes: ranks of each machine.

    All canonical nodes, if the shares of machines cannot be in proportion to their ranks; see has_equal_shares.
    """
    if not has_equal_shares(nodes=nodes, num_canonical_nodes=num_canonical_nodes):
        return np.ones(num_canonical_nodes, bool)
    homes = home_nodes(np.arange(num_canonical_nodes), nodes=nodes, num_canonical_nodes=num_canonical_nodes)
    served: NDArray[np.bool_] = homes == node
    return served


class NextUse:
    """Next use of the shards of a plan by a machine.

    serves: bool[num_canonical_nodes], nodes whose packs the machine reads. sizes: bytes of each shard,
    int64[num_shards]. limit_bytes: limit of the cache; next epochs are searched until the shards needed in them would
    fill the cache.
    """

    def __init__(self, plan: PackPlan, *, serves: NDArray[np.bool_], sizes: NDArray[np.int64], limit_bytes: int | None):
        self._plan = plan
        self._serves = serves
        self._sizes = sizes
        self._limit = limit_bytes or int(sizes.sum())
        self._epochs: dict[int, _Pieces] = {}

    def times(self, held: NDArray[np.int64], now: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return epochs until the next use of each shard: float32[num_shards]; NOW, or NEVER if no use is found.

        held, now: int64[num_canonical_nodes], places: blocks before held are no longer needed, blocks from held to now
        are at hand. Values of canonical nodes that are not served do not matter.
        """
        found = np.full(len(self._sizes), NEVER, np.float32)
        if not self._serves.any():
            return found
        first, of_first, of_all = int(held[self._serves].min()) >> _TURN_BITS, 0, int(self._sizes.sum())
        for epoch in range(first, first + MAX_EPOCHS):
            pieces = self._pieces(epoch)
            begin = np.int64(place(epoch, 0))
            needed = begin + pieces.lasts >= held[pieces.nodes]
            is_now = begin + pieces.firsts <= now[pieces.nodes]
            times = np.where(is_now, np.float32(NOW), np.float32(epoch - first) + pieces.at + _SOON)
            np.minimum.at(found, pieces.shards[needed], times[needed])
            num_bytes = int(self._sizes[found < NEVER].sum())
            if epoch == first:
                of_first = num_bytes
            elif num_bytes - of_first >= self._limit or num_bytes == of_all:
                break
        for epoch in [each for each in self._epochs if each < first]:
            del self._epochs[epoch]
        return found

    def _pieces(self, epoch: int) -> _Pieces:
        if epoch not in self._epochs:
            self._epochs[epoch] = self._cut(epoch)
        return self._epochs[epoch]

    def _cut(self, epoch: int) -> _Pieces:
        if self._plan.streams is not None:
            return self._cut_streams(epoch)
        config = self._plan.order
        order = EpochOrder(self._plan.samples_per_shard, config=config, epoch=epoch if config.reshuffle else 0)
        num_blocks = np.array([order.num_blocks(node) for node in range(order.num_canonical_nodes)], np.int64)
        together = 1
        if config.reshuffle:
            together = max(1, int(num_blocks.sum()) // (_BLOCKS_OF_SHARD * len(self._sizes)))
        shards, nodes, blocks = order.pieces(together)
        mine = self._serves[nodes]
        shards, nodes, blocks = shards[mine], nodes[mine], blocks[mine]
        firsts, lasts = blocks, np.minimum(blocks + together, num_blocks[nodes]) - 1
        if not config.reshuffle:
            first_rows = np.cumsum(num_blocks) - num_blocks
            turn_of_row = np.argsort(Turns(config, epoch, num_blocks.tolist()).blocks_of_turns)
            firsts = lasts = turn_of_row[first_rows[nodes] + blocks] - first_rows[nodes]
        at = (firsts / np.maximum(num_blocks[nodes], 1)).astype(np.float32)
        narrow = [each.astype(np.int32) for each in (shards, nodes, firsts, lasts)]
        return _Pieces(narrow[0], narrow[1], narrow[2], narrow[3], at)

    def _cut_streams(self, epoch: int) -> _Pieces:
        """Return a piece for each shard of each block: a shard of a stream may be in many blocks."""
        order = self._plan.order_of(epoch)
        assert isinstance(order, SampleOrder)
        nodes = np.flatnonzero(self._serves).tolist()
        num_blocks = {node: order.num_blocks(node) for node in nodes}
        most = min(_BLOCKS_OF_SHARD * len(self._sizes), _MAX_CALLS)
        together = max(1, sum(num_blocks.values()) // most)
        starts = [(node, block) for node in nodes for block in range(0, num_blocks[node], together)]
        shards = [order.shards_of_block(node, block, together) for node, block in starts]
        counts = [len(each) for each in shards]
        rows = [(node, block, min(block + together, num_blocks[node]) - 1) for node, block in starts]
        at_nodes, firsts, lasts = np.repeat(np.array(rows, np.int32).reshape(-1, 3), counts, axis=0).T
        at = np.repeat(np.array([block / num_blocks[node] for node, block in starts], np.float32), counts)
        found = np.concatenate([np.empty(0, np.int64), *shards]).astype(np.int32)
        return _Pieces(found, at_nodes, firsts, lasts, at)
