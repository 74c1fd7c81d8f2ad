"""The compiled loop that deals the packs of steps to ranks."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

PAD = -1  # in a rank's list: a pack without samples, so that every rank has the same number


@njit(cache=True, nogil=True)
def deal(costs: NDArray[np.int64], homes: NDArray[np.int64], num_nodes: int, dealt: NDArray[np.int64]) -> None:
    """Deal packs with these costs and home nodes into dealt[step, rank, place], which holds PAD everywhere."""
    num_steps, world_size, places = dealt.shape
    global_batch, ranks_per_node = world_size * places, world_size // num_nodes
    room = ranks_per_node * places
    members = np.empty((num_nodes, room), np.int64)
    sizes = np.empty(num_nodes, np.int64)
    spilled = np.empty(global_batch, np.int64)
    heap = np.empty(ranks_per_node, np.int64)  # the ranks of a node that have room, the one with the least work first
    work, counts = np.empty(ranks_per_node, np.int64), np.empty(ranks_per_node, np.int64)
    for step in range(num_steps):
        first = step * global_batch
        stop = min(len(costs), first + global_batch)
        sizes[:] = 0
        num_spilled = 0
        for number in range(first, stop):
            node = homes[number]
            if sizes[node] < room:
                members[node, sizes[node]] = number
                sizes[node] += 1
            else:
                spilled[num_spilled] = number
                num_spilled += 1
        node = 0
        for number in spilled[:num_spilled]:
            while sizes[node] == room:
                node += 1
            members[node, sizes[node]] = number
            sizes[node] += 1
        # In a full step every rank has as many packs: only what they cost above the cheapest can be balanced.
        cheapest = costs[first:stop].min() if stop - first == global_batch else np.int64(0)
        for node in range(num_nodes):
            mine = members[node, : sizes[node]]
            work[:] = 0
            counts[:] = 0
            heap[:] = np.arange(ranks_per_node)
            num_open = ranks_per_node
            for number in mine[np.argsort(-costs[mine], kind="mergesort")]:
                rank = heap[0]
                dealt[step, node * ranks_per_node + rank, counts[rank]] = number
                counts[rank] += 1
                work[rank] += costs[number] - cheapest
                if counts[rank] == places:
                    num_open -= 1
                    heap[0] = heap[num_open]
                _sift_down(heap[:num_open], work)


@njit(cache=True, nogil=True, inline="always")
def _sift_down(heap: NDArray[np.int64], work: NDArray[np.int64]) -> None:
    """Put the first of a heap of ranks in its place: by work, then by number."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= len(heap):
            return
        other = child + 1
        if other < len(heap) and (
            work[heap[other]] < work[heap[child]]
            or (work[heap[other]] == work[heap[child]] and heap[other] < heap[child])
        ):
            child = other
        here, below = heap[at], heap[child]
        if work[here] < work[below] or (work[here] == work[below] and here < below):
            return
        heap[at], heap[child] = below, here
        at = child
