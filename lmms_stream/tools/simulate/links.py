"""Waiting time of steps for the links of nodes. Downloads and requests -> seconds; compiled.

The loaders of a node fetch `at_once` shards at a time, with equal shares of the node's link. A free thread chooses a
shard needed by the current step; else the first shard at hand; else, after all shards at hand have arrived, the oldest
request. The last two are skipped while `ahead` fetched shards wait for their use (see storage/prefetch.py). Shards of a
canonical node's second block are at hand from the start of the block, other shards from their request
(loader/blocks_ahead.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..._core import loops

_Numbers = NDArray[np.int64]
_Floats = NDArray[np.float64]


class Link(NamedTuple):
    """Link of every node. bytes_per_s: bandwidth. latency_s: time from a request to its first byte.

    taken_ahead: number of steps after the current step with shards already taken by loaders; taken shards do not count
    towards `ahead`.
    """

    bytes_per_s: float
    latency_s: float
    at_once: int
    ahead: int
    taken_ahead: int


def wait_for_links(
    steps: _Numbers,
    nodes: _Numbers,
    released: _Numbers,
    at_hand: _Numbers,
    sizes: _Numbers,
    begins: NDArray[np.bool_],
    *,
    link: Link,
    num_nodes: int,
    step_time_s: float,
) -> _Floats:
    """Seconds of waiting per step, until the last node has its shards.

    steps, nodes, sizes: step with the need, node and bytes of each download. released: step of the request, at the
    start of the step; at_hand: first step with priority over other downloads. begins: bool[num_steps], loaders restart
    at the step, and request its shards only after the end of the previous step.
    """
    order = np.lexsort((steps, released, nodes))
    bounds = np.searchsorted(nodes[order], np.arange(num_nodes + 1))
    steps, nodes, released, at_hand = steps[order], nodes[order], released[order], at_hand[order]
    waits: _Floats = np.zeros(len(begins))
    loops.wait(
        bounds, steps, released, at_hand, sizes[order].astype(np.int64), np.lexsort((steps, nodes)),
        np.lexsort((steps, released, at_hand, nodes)), *link, begins, step_time_s, waits,
    )  # fmt: skip
    return waits
