"""Deal the packs of a step to ranks. plan -> [assign] -> packs of each rank; integer arithmetic only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .kernels.deal import PAD, deal, settle
from .kernels.deal_both import deal_both
from .pack_range import PackRange

SHARE_BITS = 30  # a pack's part of the cost of its step is told in 2**-30
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

    A step with media is dealt by two costs, tokens' and the tower's, each as a part of what the step has of it; see
    deal_both. Costly is then what has large parts of both together. Packs stay at home also where a node's have more
    media than another's (64 packs of charts on 2 nodes of 4 ranks: the busiest tower does 1.04 of the mean, at worst
    1.15). Swapping 2 % of them between nodes would make that 1.016 and 1.035, and each node download nearly every shard
    of the dataset, because a pack's samples lie in many shards.
    """
    check_global_batch(global_batch, world_size)
    if len(packs) > global_batch:
        raise ConfigError(f"a step of {global_batch} packs was given {len(packs)}: deal them with assign_steps")
    dealt: NDArray[np.int64] = assign_steps(
        packs,
        global_batch=global_batch,
        world_size=world_size,
        num_nodes=num_nodes,
        num_canonical_nodes=num_canonical_nodes,
        linear_cost=linear_cost,
    )[0]
    return dealt


def assign_steps(
    packs: PackRange,
    *,
    global_batch: int,
    world_size: int,
    num_nodes: int = 1,
    num_canonical_nodes: int = 1,
    linear_cost: int = LINEAR_COST,
) -> NDArray[np.int64]:
    """`assign` for steps that follow one another, each of global_batch packs but the last, which may be short.

    int64[num_steps, world_size, global_batch / world_size]; at least one step.
    """
    check_global_batch(global_batch, world_size)
    total, packs_per_rank = len(packs), global_batch // world_size
    steps = max(1, num_steps(global_batch=global_batch, num_packs=total))
    step_of_pack = np.arange(total) // global_batch
    costs = pack_costs(packs, linear_cost=linear_cost)
    shares = None
    if packs.patches is not None and packs.patches.any():
        shares = _shares(costs, packs.patches, global_batch=global_batch)
    if total >= global_batch:  # in a full step every rank has as many packs: what all cost cannot be balanced
        whole = costs[: total - total % global_batch].reshape(-1, global_batch)
        whole -= whole.min(axis=1, keepdims=True)
    homes = home_nodes(packs.canonical_nodes, num_nodes=num_nodes, num_canonical_nodes=num_canonical_nodes)
    if num_nodes > 1:
        for step in range(steps):
            here = slice(step * global_batch, (step + 1) * global_batch)
            settle(homes[here], np.zeros(num_nodes, np.int64), global_batch // num_nodes)
    lists = step_of_pack * num_nodes + homes
    heaps = np.zeros((steps * num_nodes, world_size // num_nodes, 3), np.int64)
    heaps[:, :, 1] = np.arange(world_size // num_nodes)
    dealt = np.full(steps * global_batch, PAD, np.int64)
    order = np.lexsort((-costs, lists))
    if shares is not None and packs.patches is not None:
        of_media = np.isin(step_of_pack, step_of_pack[packs.patches > 0])  # packs of steps with media
        _deal_media(np.flatnonzero(of_media), shares, lists, heaps.shape[1], packs_per_rank, dealt)
        order = order[~of_media[order]]
    deal(order, costs, lists, heaps, packs_per_rank, dealt)
    return dealt.reshape(steps, world_size, packs_per_rank)


def _shares(costs: NDArray[np.int64], patches: NDArray[np.int64], *, global_batch: int) -> NDArray[np.int64]:
    """The parts of its step's cost and patches that each pack has, in 2**-SHARE_BITS: int64[num_packs, 2]."""
    starts = np.arange(0, len(costs), global_batch)
    step_of_pack = np.arange(len(costs)) // global_batch
    shares = np.empty((len(costs), 2), np.int64)
    for column, values in enumerate((costs, patches)):
        totals = np.add.reduceat(values, starts) if len(starts) else values
        too_long = np.maximum(0, np.frexp(totals.astype(np.float64))[1] - 61 + SHARE_BITS).astype(np.int64)
        totals = np.maximum(1, totals >> too_long)
        shares[:, column] = (values >> too_long[step_of_pack] << SHARE_BITS) // totals[step_of_pack]
    return shares


def _deal_media(
    numbers: NDArray[np.int64],
    shares: NDArray[np.int64],
    lists: NDArray[np.int64],
    ranks: int,
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Deal the packs of these numbers by both costs; lists and dealt are as in `deal`."""
    order = numbers[np.lexsort((-shares[numbers].sum(axis=1), lists[numbers]))]
    found, firsts = np.unique(lists[order], return_index=True)
    bounds = np.stack([firsts, np.append(firsts[1:], len(order)), found], axis=1)
    deal_both(order, bounds, shares, ranks, packs_per_rank, dealt)
