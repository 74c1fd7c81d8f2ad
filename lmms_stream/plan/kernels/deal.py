"""Compiled loops that deal the packs of steps to ranks.

Most steps have few packs, and loading compiled code takes most of the time. The loops are small and import nothing
else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...versions.numba import compiled

PAD = -1  # in a rank's list: a pack without samples, for equal numbers of packs on all ranks


@compiled
def settle(homes: NDArray[np.int64], sizes: NDArray[np.int64], rooms: NDArray[np.int64]) -> None:
    """Move packs of a step from full nodes, in order, to the first node with room.

    homes: node of each pack, changed. sizes: zeros, one for each node; at the end, packs of each node. rooms: maximum
    packs of each node.
    """
    for number in range(len(homes)):
        if sizes[homes[number]] < rooms[homes[number]]:
            sizes[homes[number]] += 1
        else:
            homes[number] = -1
    node = 0
    for number in range(len(homes)):
        if homes[number] < 0:
            while sizes[node] == rooms[node]:
                node += 1
            homes[number] = node
            sizes[node] += 1


@compiled
def deal(
    order: NDArray[np.int64],
    costs: NDArray[np.int64],
    lists: NDArray[np.int64],
    heaps: NDArray[np.int64],
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Give each pack of `order` to the rank of its list (a node in a step) with the least work so far.

    lists: number of each pack's list. heaps: int64[lists, ranks, 3], the ranks of each list as a heap of (work, rank,
    packs). dealt: int64[lists * ranks * packs_per_rank], filled with PAD before; packs_per_rank entries for each rank.
    """
    ranks = heaps.shape[1]
    for at in range(len(order)):
        number = order[at]
        heap = heaps[lists[number]]
        work, rank, count = heap[0, 0], heap[0, 1], heap[0, 2]
        dealt[(lists[number] * ranks + rank) * packs_per_rank + count] = number
        count += 1
        work += costs[number]
        if count == packs_per_rank:
            work = np.int64(1) << 62  # the rank has all its packs, and never comes first in the heap again
        here = 0
        while True:
            child = 2 * here + 1
            if child >= ranks:
                break
            other = child + 1
            if other < ranks and (
                heap[other, 0] < heap[child, 0]
                or (heap[other, 0] == heap[child, 0] and heap[other, 1] < heap[child, 1])
            ):
                child = other
            if work < heap[child, 0] or (work == heap[child, 0] and rank < heap[child, 1]):
                break
            heap[here, 0], heap[here, 1], heap[here, 2] = heap[child, 0], heap[child, 1], heap[child, 2]
            here = child
        heap[here, 0], heap[here, 1], heap[here, 2] = work, rank, count


# The compiled loop that deals packs with media to ranks by two costs at once: tokens, and patches of the media tower.
#
# Only steps with media load the kernel.

SWAPS_LOOKED_AT = 256  # for each pack of a node: the time for dealing is proportional to the number of packs
GOOD_ENOUGH = 200  # swapping ends when no rank has more than 1/200 above the mean load


@compiled
def deal_both(
    order: NDArray[np.int64],
    bounds: NDArray[np.int64],
    shares: NDArray[np.int64],
    ranks: int,
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Give packs to the ranks of their list (a node in a step), with the larger of each rank's two loads small.

    Packs go in rounds of `ranks` packs, a pack for each rank: each pack in turn goes to the rank with the least larger
    load after it. Then the busiest rank swaps packs with the first rank, least busy first, with any helpful pair of
    packs. The most helpful pair is swapped. The swaps end when no swap helps, or when the loads are nearly equal.

    order: the packs, list after list, in each list by decreasing cost. bounds: int64[lists, 3], the first and one past
    the last of each list's packs in `order`, and the list's number. shares: int64[packs, 2], share of each pack in the
    two costs of its list. dealt: int64[lists * ranks * packs_per_rank], as in `deal`; the packs of a rank are in the
    order of `order`.
    """
    loads = np.empty((ranks, 2), np.int64)
    counts = np.empty(ranks, np.int64)
    mine = np.empty((ranks, packs_per_rank), np.int64)  # indices in `order`
    for at in range(len(bounds)):
        first, stop, number = bounds[at]
        mean = deal_rounds(order[first:stop], shares, loads, counts, mine)
        swap(order[first:stop], shares, loads, counts, mine, mean // GOOD_ENOUGH)
        for rank in range(ranks):
            begins = (number * ranks + rank) * packs_per_rank
            mine[rank, : counts[rank]].sort()
            for turn in range(counts[rank]):
                dealt[begins + turn] = order[first + mine[rank, turn]]


@compiled
def deal_rounds(
    order: NDArray[np.int64],
    shares: NDArray[np.int64],
    loads: NDArray[np.int64],
    counts: NDArray[np.int64],
    mine: NDArray[np.int64],
) -> int:
    """Deal the packs of a list in rounds. loads: written, load of each rank minus the mean. Return the larger mean."""
    ranks, num_packs = len(loads), len(order)
    loads[:] = 0
    counts[:] = 0
    for begin in range(0, num_packs, ranks):
        end = min(begin + ranks, num_packs)
        for cost in range(2):  # loads are counted from the mean, after each round
            total = np.int64(0)
            for index in range(begin, end):
                total += shares[order[index], cost]
            for rank in range(ranks):
                loads[rank, cost] -= total // ranks
        for index in range(begin, end):
            tokens, patches = shares[order[index], 0], shares[order[index], 1]
            best, least, lesser = -1, np.int64(0), np.int64(0)
            for rank in range(ranks):
                if counts[rank] * ranks > begin:
                    continue  # it has its pack of this round
                load = max(loads[rank, 0] + tokens, loads[rank, 1] + patches)
                both = loads[rank, 0] + loads[rank, 1]
                if best < 0 or load < least or (load == least and both < lesser):
                    best, least, lesser = rank, load, both
            loads[best, 0] += tokens
            loads[best, 1] += patches
            mine[best, counts[best]] = index
            counts[best] += 1
    means = np.zeros(2, np.int64)
    for index in range(num_packs):
        means += shares[order[index]]
    return max(means[0], means[1]) // ranks


@compiled
def swap(
    order: NDArray[np.int64],
    shares: NDArray[np.int64],
    loads: NDArray[np.int64],
    counts: NDArray[np.int64],
    mine: NDArray[np.int64],
    enough: int,
) -> None:
    """Swap packs of the busiest rank until no load is above `enough`, or no swap is left that helps."""
    ranks = len(loads)
    left = SWAPS_LOOKED_AT * len(order)
    tried = np.full(ranks, -1, np.int64)
    for turn in range(left):
        busiest = 0
        for rank in range(1, ranks):
            if max(loads[rank, 0], loads[rank, 1]) > max(loads[busiest, 0], loads[busiest, 1]):
                busiest = rank
        worst = max(loads[busiest, 0], loads[busiest, 1])
        if worst <= enough:
            return
        cost = 0 if loads[busiest, 0] >= loads[busiest, 1] else 1
        tried[busiest] = turn
        mine_best, other_best, partner = -1, -1, -1
        while mine_best < 0:
            partner = -1
            for rank in range(ranks):
                if tried[rank] != turn and (partner < 0 or loads[rank, cost] < loads[partner, cost]):
                    partner = rank
            if partner < 0 or left <= 0:
                return
            tried[partner] = turn
            left -= counts[busiest] * counts[partner]
            least = worst
            for here in range(counts[busiest]):
                for there in range(counts[partner]):
                    given, got = order[mine[busiest, here]], order[mine[partner, there]]
                    tokens, patches = shares[got, 0] - shares[given, 0], shares[got, 1] - shares[given, 1]
                    load = max(
                        max(loads[busiest, 0] + tokens, loads[busiest, 1] + patches),
                        max(loads[partner, 0] - tokens, loads[partner, 1] - patches),
                    )
                    if load < least:
                        least, mine_best, other_best = load, here, there
        given, got = mine[busiest, mine_best], mine[partner, other_best]
        mine[busiest, mine_best], mine[partner, other_best] = got, given
        for kind in range(2):
            change = shares[order[got], kind] - shares[order[given], kind]
            loads[busiest, kind] += change
            loads[partner, kind] -= change
