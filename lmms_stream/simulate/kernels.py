"""The compiled loops of the simulation's caches."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


@njit(cache=True, nogil=True)
def use_needed_last(
    steps: _Numbers,
    shards: _Numbers,
    sizes: _Numbers,
    limit: int,
    used_at: NDArray[np.int32],
    held: NDArray[np.bool_],
    victims: _Numbers,
    since: int,
    used: int,
    missed: NDArray[np.bool_],
) -> int:
    """Read shards on a node whose cache holds `limit` bytes while what is foretold stays the same; the bytes it holds.

    steps, shards: of each reading, in turn. used_at: int32[num_shards], the step in which each was read last. held:
    bool[num_shards]. victims: those that are not needed now, in the order in which they give way; one that was read
    after step `since`, which is before all of steps, stays. Where none is left, what was read least recently gives way.
    used: bytes in the cache. missed: whether each reading downloads, which is filled in.
    """
    at = 0
    for number in range(len(shards)):
        shard = shards[number]
        missed[number] = not held[shard]
        if missed[number]:
            while used + sizes[shard] > limit:
                while at < len(victims) and (not held[victims[at]] or used_at[victims[at]] > since):
                    at += 1
                gone = victims[at] if at < len(victims) else -1
                if gone < 0:
                    for other in range(len(sizes)):
                        if held[other] and (gone < 0 or used_at[other] < used_at[gone]):
                            gone = other
                if gone < 0:
                    break
                held[gone] = False
                used -= sizes[gone]
            held[shard] = True
            used += sizes[shard]
        used_at[shard] = steps[number]
    return used
