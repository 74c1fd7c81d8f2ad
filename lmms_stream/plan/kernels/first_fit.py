"""The compiled loops of next_fit and first_fit: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

# mypy: allow-untyped-decorators, disable-error-code="assignment, return-value, no-any-return"

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def next_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    count = len(lengths)
    offsets = np.empty(count + 1, np.int64)
    num_packs = 0
    room = 0
    samples_left = 0
    for position in range(count):
        length = lengths[position]
        if length > room or samples_left == 0:
            offsets[num_packs] = position
            num_packs += 1
            room = limit
            samples_left = max_samples
        room -= length
        samples_left -= 1
    offsets[num_packs] = count
    return np.arange(count).astype(np.int32), offsets[: num_packs + 1].copy()


@njit(cache=True, nogil=True)
def first_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Each sample into the pack that was opened first among those with room, found in a tree of maxima."""
    count = len(lengths)
    leaves = 1
    while leaves < count:
        leaves *= 2
    rooms = np.zeros(2 * leaves, np.int32)  # node n has children 2n and 2n + 1; leaf `leaves + pack`
    pack_of = np.empty(count, np.int32)
    sizes = np.zeros(count + 1, np.int64)
    num_packs = 0
    for position in range(count):
        length = lengths[position]
        if rooms[1] >= length:
            node = 1
            while node < leaves:
                node = 2 * node if rooms[2 * node] >= length else 2 * node + 1
            chosen = node - leaves
        else:
            chosen = num_packs
            num_packs += 1
            rooms[leaves + chosen] = limit
        pack_of[position] = chosen
        sizes[chosen + 1] += 1
        node = leaves + chosen
        rooms[node] = rooms[node] - length if sizes[chosen + 1] < max_samples else 0
        while node > 1:
            node >>= 1
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    offsets = np.cumsum(sizes[: num_packs + 1])
    order = np.empty(count, np.int32)
    filled = offsets[:num_packs].copy()
    for position in range(count):
        order[filled[pack_of[position]]] = position
        filled[pack_of[position]] += 1
    return order, offsets
