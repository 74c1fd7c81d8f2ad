"""The compiled loops that deal the packs of steps to ranks.

Most steps have few packs, so loading the compiled code dominates: they are small, and import nothing else.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

PAD = -1  # in a rank's list: a pack without samples, so that every rank has the same number


@njit(cache=True, nogil=True)
def settle(homes: NDArray[np.int64], sizes: NDArray[np.int64], rooms: NDArray[np.int64]) -> None:
    """Move the packs of a step from nodes that have no room, in their order, to the first that has some.

    homes: the node of each pack. sizes: zeros, one for each node; in the end, the packs of each. rooms: packs that
    each node has room for.
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


@njit(cache=True, nogil=True)
def deal(
    order: NDArray[np.int64],
    costs: NDArray[np.int64],
    lists: NDArray[np.int64],
    heaps: NDArray[np.int64],
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Give the packs in `order` to the rank that has the least work so far, of those of its node in its step.

    lists: of each pack, the number of its node counted through all steps. heaps: int64[lists, ranks, 3], the ranks of
    each node as a heap of (work, rank, packs). dealt: int64[lists * ranks * packs_per_rank], PAD; each rank takes
    packs_per_rank.
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
