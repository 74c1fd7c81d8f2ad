"""Deal the packs of a step to ranks. plan -> [assign] -> packs of each rank; integer arithmetic only."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError
from .types import PackRange

PAD = -1  # in a rank's list: a pack without samples, so that every rank has the same number
LINEAR_COST = 12288  # linear work of a token in units of attention's len**2: 6 * hidden size, here of 2048


def num_steps(*, global_batch: int, num_packs: int, drop_last: bool = False) -> int:
    """Steps in `num_packs` packs; the last one may be short.

    >>> num_steps(global_batch=8, num_packs=20), num_steps(global_batch=8, num_packs=20, drop_last=True)
    (3, 2)
    """
    return num_packs // global_batch if drop_last else -(-num_packs // global_batch)


def check_global_batch(global_batch: int, world_size: int) -> None:
    if global_batch < 1 or global_batch % world_size:
        raise ConfigError(
            f"global_batch {global_batch} cannot be shared equally by {world_size} ranks: "
            f"make it a multiple of {world_size}"
        )


def pack_costs(packs: PackRange, *, linear_cost: int = LINEAR_COST) -> NDArray[np.int64]:
    """Work of each pack: sum over its segments of len**2 + linear_cost * len. int64[num_packs]."""
    work = np.concatenate([[0], np.cumsum(packs.lengths**2 + linear_cost * packs.lengths)])
    costs: NDArray[np.int64] = work[packs.offsets[1:]] - work[packs.offsets[:-1]]
    return costs


def home_nodes(canonical_nodes: NDArray[np.int64], *, num_nodes: int, num_canonical_nodes: int) -> NDArray[np.int64]:
    """The physical node that serves each canonical node: int64, of the same shape."""
    return canonical_nodes * num_nodes // num_canonical_nodes


def count_spilled(packs: PackRange, dealt: NDArray[np.int64], *, num_nodes: int, num_canonical_nodes: int) -> int:
    """Packs that `assign` dealt to another node than their home, because that one had no room."""
    home = home_nodes(packs.canonical_nodes, num_nodes=num_nodes, num_canonical_nodes=num_canonical_nodes)
    node_of_rank = np.arange(len(dealt)) * num_nodes // len(dealt)
    read_on = np.broadcast_to(node_of_rank[:, None], dealt.shape)[dealt != PAD]
    return int(np.count_nonzero(home[dealt[dealt != PAD]] != read_on))


def assign(
    packs: PackRange,
    *,
    global_batch: int,
    world_size: int,
    num_nodes: int = 1,
    num_canonical_nodes: int = 1,
    linear_cost: int = LINEAR_COST,
) -> NDArray[np.int64]:
    """Which packs of a step each rank reads: int64[world_size, global_batch / world_size], PAD where none.

    Numbers count from the first of `packs`. A pack goes to the physical node that serves its canonical node,
    as long as that one has room (else it spills to the next with room); within a node to the rank with the least
    work so far, costliest pack first (longest processing time, Graham 1969). Each rank's packs are sorted from
    costly to cheap, so that ranks do alike work at the same micro-batch.
    """
    check_global_batch(global_batch, world_size)
    costs = pack_costs(packs, linear_cost=linear_cost)
    if len(packs) == global_batch:
        costs -= costs.min()  # every rank has as many packs: only what they cost above the cheapest can be balanced
    room = global_batch // num_nodes
    home = home_nodes(packs.canonical_nodes, num_nodes=num_nodes, num_canonical_nodes=num_canonical_nodes)
    per_node: list[list[int]] = [[] for _ in range(num_nodes)]
    spilled: list[int] = []
    for number, node in enumerate(home):
        (per_node[node] if len(per_node[node]) < room else spilled).append(number)
    for number in spilled:
        next(members for members in per_node if len(members) < room).append(number)

    ranks_per_node = world_size // num_nodes
    dealt = np.full((world_size, global_batch // world_size), PAD, np.int64)
    for node, members in enumerate(per_node):
        # (work so far, rank, packs so far); a rank whose list is full leaves the heap.
        heap = [(0, rank, 0) for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node)]
        for number in sorted(members, key=lambda n: (-int(costs[n]), n)):
            work, rank, count = heapq.heappop(heap)
            dealt[rank, count] = number
            if count + 1 < dealt.shape[1]:
                heapq.heappush(heap, (work + int(costs[number]), rank, count + 1))
    return dealt
