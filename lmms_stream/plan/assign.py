"""Deal the packs of a step to ranks. plan -> [assign] -> packs of each rank; integer arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .._core import loops
from ..errors import ConfigError
from .packing import PackRange

PAD = -1  # in a rank's list: a pack without samples, for equal numbers of packs on all ranks
WORK_BITS = 61  # work of a list of packs: the kernel marks ranks with all their packs by 2**62
SHARE_BITS = 30  # a pack's share of its list's cost is in units of 2**-30
LINEAR_COST = 12288  # linear work of a token in units of attention's len**2: 6 * hidden size, for a hidden size of 2048


def num_steps(*, global_batch: int, num_packs: int, drop_last: bool = False) -> int:
    """Return the number of steps in `num_packs` packs; the last step may be short.

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
    """Return the work of each pack, the sum over its segments of len**2 + linear_cost * len: int64[num_packs]."""
    work = np.concatenate([[0], np.cumsum(packs.lengths**2 + linear_cost * packs.lengths)])
    costs: NDArray[np.int64] = work[packs.offsets[1:]] - work[packs.offsets[:-1]]
    return costs


def home_nodes(
    canonical_nodes: NDArray[np.int64], *, nodes: Sequence[int], num_canonical_nodes: int
) -> NDArray[np.int64]:
    """Return the physical node that serves each canonical node: int64, same shape. nodes: ranks of each node."""
    homes: NDArray[np.int64] = _node_of_rank(nodes)[canonical_nodes * sum(nodes) // num_canonical_nodes]
    return homes


def has_equal_shares(*, nodes: Sequence[int], num_canonical_nodes: int) -> bool:
    """Return whether nodes can serve canonical nodes in proportion to their ranks; if not, some packs leave home."""
    return all(num_canonical_nodes * ranks % sum(nodes) == 0 for ranks in nodes)


def most_served(*, nodes: Sequence[int], num_canonical_nodes: int) -> int:
    """Return the number of canonical nodes of the node with the most ranks; see has_equal_shares."""
    is_divided = has_equal_shares(nodes=nodes, num_canonical_nodes=num_canonical_nodes)
    return num_canonical_nodes * max(nodes) // sum(nodes) if is_divided else num_canonical_nodes


def _node_of_rank(nodes: Sequence[int]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(nodes)), nodes)


def count_spilled(packs: PackRange, dealt: NDArray[np.int64], *, nodes: Sequence[int], num_canonical_nodes: int) -> int:
    """Return the number of packs that `assign` dealt to another node than their full home node."""
    home = home_nodes(packs.canonical_nodes, nodes=nodes, num_canonical_nodes=num_canonical_nodes)
    node_of_rank = _node_of_rank(nodes)
    read_on = np.broadcast_to(node_of_rank[:, None], dealt.shape)[dealt != PAD]
    return int(np.count_nonzero(home[dealt[dealt != PAD]] != read_on))


def assign(
    packs: PackRange,
    *,
    global_batch: int,
    nodes: Sequence[int],
    num_canonical_nodes: int = 1,
    linear_cost: int = LINEAR_COST,
) -> NDArray[np.int64]:
    """Return the packs of a step for each rank: int64[ranks, global_batch / ranks], PAD without a pack.

    nodes: ranks of each node. Numbers count from the first of `packs`. A pack goes to the physical node that serves its
    canonical node, or, if this node is full, to the next node with room; within a node, costliest pack first, to the
    rank with the least work (longest processing time, Graham 1969). Each rank's packs are sorted from costly to cheap:
    ranks do similar work at the same micro-batch.

    Packs of a node with media are dealt by two costs, of tokens and of the tower, each as a share of the node's total;
    see _core/deal.c. A costly pack then has a large sum of both shares. Packs stay at home even if a node has more
    media than another (64 packs of charts on 2 nodes of 4 ranks: the busiest tower does 1.04 of the mean, at worst
    1.15). Swapping 2 % of the packs between nodes would give 1.016 and 1.035, and each node would download nearly every
    shard of the dataset, because a pack has samples of many shards.
    """
    check_global_batch(global_batch, sum(nodes))
    if len(packs) > global_batch:
        raise ConfigError(f"a step of {global_batch} packs was given {len(packs)}: deal them with assign_steps")
    dealt: NDArray[np.int64] = assign_steps(
        packs,
        global_batch=global_batch,
        nodes=nodes,
        num_canonical_nodes=num_canonical_nodes,
        linear_cost=linear_cost,
    )[0]
    return dealt


def assign_steps(
    packs: PackRange,
    *,
    global_batch: int,
    nodes: Sequence[int],
    num_canonical_nodes: int = 1,
    linear_cost: int = LINEAR_COST,
) -> NDArray[np.int64]:
    """Return `assign` for consecutive steps of global_batch packs; the last step may be short.

    int64[num_steps, ranks, global_batch / ranks]; at least one step.
    """
    check_global_batch(global_batch, sum(nodes))
    node_of_pack = nodes_of_packs(
        packs.canonical_nodes, global_batch=global_batch, nodes=nodes, num_canonical_nodes=num_canonical_nodes
    )
    steps = max(1, num_steps(global_batch=global_batch, num_packs=len(packs)))
    step_of_pack = np.arange(len(packs)) // global_batch
    packs_per_rank = global_batch // sum(nodes)
    dealt = np.empty((steps, sum(nodes), packs_per_rank), np.int64)
    for ranks in sorted(set(nodes)):  # nodes of equal size together
        alike = np.flatnonzero(np.array(nodes) == ranks)
        index_of_node = np.full(len(nodes), -1)
        index_of_node[alike] = np.arange(len(alike))
        numbers = np.flatnonzero(index_of_node[node_of_pack] >= 0)
        part = deal_lists(
            packs if len(numbers) == len(packs) else packs.take(numbers),
            step_of_pack[numbers] * len(alike) + index_of_node[node_of_pack[numbers]],
            num_lists=steps * len(alike),
            ranks=ranks,
            packs_per_rank=packs_per_rank,
            linear_cost=linear_cost,
        )
        numbers = np.append(numbers, PAD)  # PAD, which is -1, stays
        dealt[:, np.isin(_node_of_rank(nodes), alike)] = numbers[part].reshape(steps, -1, packs_per_rank)
    return dealt


def nodes_of_packs(
    canonical_nodes: NDArray[np.int64], *, global_batch: int, nodes: Sequence[int], num_canonical_nodes: int
) -> NDArray[np.int64]:
    """Return the physical node that reads each pack of consecutive steps: its home, unless full.

    canonical_nodes: of the packs, int64[num_packs]. The content of packs does not matter: a node finds its packs before
    any pack is made. nodes: ranks of each node.
    """
    homes = home_nodes(canonical_nodes, nodes=nodes, num_canonical_nodes=num_canonical_nodes)
    if len(nodes) > 1:
        rooms = np.array(nodes, np.int64) * (global_batch // sum(nodes))
        for first in range(0, len(homes), global_batch):
            loops.settle(homes[first : first + global_batch], rooms)
    return homes


def deal_lists(
    packs: PackRange,
    lists: NDArray[np.int64],
    *,
    num_lists: int,
    ranks: int,
    packs_per_rank: int,
    linear_cost: int = LINEAR_COST,
) -> NDArray[np.int64]:
    """Deal the packs of each list, a node's packs in a step, to the node's ranks; see assign.

    lists: number of each pack's list. Return int64[num_lists, ranks, packs_per_rank], PAD without a pack.
    """
    costs = _scaled(pack_costs(packs, linear_cost=linear_cost), lists, num_lists)
    dealt = np.full(num_lists * ranks * packs_per_rank, PAD, np.int64)
    order = np.lexsort((-costs, lists))
    counts = np.bincount(lists, minlength=num_lists)
    is_full = counts == ranks * packs_per_rank  # ranks have equally many packs: a cost in common cannot be balanced
    in_common = np.zeros(num_lists, np.int64)
    in_common[is_full] = costs[order[np.cumsum(counts)[is_full] - 1]]
    if packs.patches is not None and packs.patches.any():
        has_media = np.zeros(num_lists, bool)
        has_media[lists[packs.patches > 0]] = True
        shares = _shares(costs, packs.patches, lists, num_lists)
        _deal_media(np.flatnonzero(has_media[lists]), shares, lists, ranks, packs_per_rank, dealt)
        order = order[~has_media[lists[order]]]
    loops.deal(order, costs - in_common[lists], lists, ranks, packs_per_rank, dealt)
    return dealt.reshape(num_lists, ranks, packs_per_rank)


def _scaled(costs: NDArray[np.int64], lists: NDArray[np.int64], num_lists: int) -> NDArray[np.int64]:
    """Return costs with a sum of less than 2**WORK_BITS in each list, in larger units for longer lists."""
    totals = np.bincount(lists, weights=costs, minlength=num_lists)
    too_long = np.maximum(0, np.frexp(totals)[1] - WORK_BITS).astype(np.int64)
    return costs >> too_long[lists] if too_long.any() else costs


def _shares(
    costs: NDArray[np.int64], patches: NDArray[np.int64], lists: NDArray[np.int64], num_lists: int
) -> NDArray[np.int64]:
    """Return each pack's shares of its list's cost and patches, in 2**-SHARE_BITS: int64[num_packs, 2]."""
    shares = np.empty((len(costs), 2), np.int64)
    for column, values in enumerate((costs, patches)):
        totals = np.zeros(num_lists, np.int64)
        np.add.at(totals, lists, values)
        too_long = np.maximum(0, np.frexp(totals.astype(np.float64))[1] - WORK_BITS + SHARE_BITS).astype(np.int64)
        totals = np.maximum(1, totals >> too_long)
        shares[:, column] = (values >> too_long[lists] << SHARE_BITS) // totals[lists]
    return shares


def _deal_media(
    numbers: NDArray[np.int64],
    shares: NDArray[np.int64],
    lists: NDArray[np.int64],
    ranks: int,
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Deal packs by both costs. numbers: of the packs; lists, dealt: as in `deal`."""
    order = numbers[np.lexsort((-shares[numbers].sum(axis=1), lists[numbers]))]
    found, firsts = np.unique(lists[order], return_index=True)
    bounds = np.stack([firsts, np.append(firsts[1:], len(order)), found], axis=1)
    loops.deal_both(order, bounds, shares, ranks, packs_per_rank, dealt)
