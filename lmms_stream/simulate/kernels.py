"""The compiled loops of the simulation's caches."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


@njit(cache=True, nogil=True)
def _take_out(before: NDArray[np.int32], after: NDArray[np.int32], node: int, shard: int) -> None:
    before[node, after[node, shard]] = before[node, shard]
    after[node, before[node, shard]] = after[node, shard]


@njit(cache=True, nogil=True)
def use_least_recent(
    nodes: _Numbers,
    shards: _Numbers,
    sizes: _Numbers,
    limit: int,
    before: NDArray[np.int32],
    after: NDArray[np.int32],
    used: _Numbers,
    missed: NDArray[np.bool_],
) -> None:
    """Read shards on nodes whose caches hold `limit` bytes; those used least recently give way.

    nodes, shards: of each reading, in turn. before, after: int32[num_nodes, num_shards + 1], a ring of each node from
    the shard used least recently to the one used last, closed by the number num_shards; -1 for a shard that is not
    there. used: bytes in each cache. missed: whether each reading downloads, which is filled in.
    """
    end = len(sizes)
    for number in range(len(nodes)):
        node, shard = nodes[number], shards[number]
        missed[number] = after[node, shard] < 0
        if missed[number]:
            while used[node] + sizes[shard] > limit and after[node, end] != end:
                oldest = after[node, end]
                _take_out(before, after, node, oldest)
                after[node, oldest] = -1
                used[node] -= sizes[oldest]
            used[node] += sizes[shard]
        else:
            _take_out(before, after, node, shard)
        last = before[node, end]
        after[node, last], before[node, shard] = shard, last
        after[node, shard], before[node, end] = end, shard
