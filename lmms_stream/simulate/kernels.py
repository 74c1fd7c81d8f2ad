"""The compiled loops of the simulation: a cache of each node, and its link."""

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


@njit(cache=True, nogil=True)
def wait_for_links(
    steps: _Numbers,
    nodes: _Numbers,
    released: _Numbers,
    sizes: _Numbers,
    bytes_per_s: float,
    latency_s: float,
    step_time_s: float,
    links: NDArray[np.float64],
    starts: NDArray[np.float64],
    waits: NDArray[np.float64],
) -> float:
    """Wait, in each step, until the last node has its shards; the time at which the last step ends.

    steps, nodes, sizes: of each download, the step that needs it, by step: it is requested when step released[i]
    begins, or before the first. A node's link carries one download after another. links: zeros, one for each node.
    starts, waits: seconds, of each step, which are filled in.
    """
    number = 0
    now = 0.0
    for step in range(len(starts)):
        ready = now
        while number < len(steps) and steps[number] == step:
            node = nodes[number]
            asked = starts[released[number]] if 0 < released[number] < step else (0.0 if released[number] <= 0 else now)
            links[node] = max(links[node], asked) + sizes[number] / bytes_per_s
            ready = max(ready, links[node] + latency_s, asked + latency_s)
            number += 1
        waits[step] = ready - now
        starts[step] = ready
        now = ready + step_time_s
    return now
