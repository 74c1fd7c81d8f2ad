"""How many packs each shuffle block of an epoch has. lengths + order + packing -> [this] -> counts.

Counting packs all blocks once, so that counts are kept, and one of several processes that share them counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from ..freed_memory import give_back_memory
from .block_packs import PlanInputs, pack_block
from .order import EpochOrder

CountsCache = MutableMapping[str, NDArray[np.int64]]
Counting = Callable[[str], AbstractContextManager[object]]


def block_counts(
    inputs: PlanInputs,
    order: EpochOrder,
    key: str,
    *,
    counts_cache: CountsCache,
    counting: Counting,
    num_threads: int | None = None,
) -> NDArray[np.int64]:
    """Packs, tokens and overlong samples of each block of an epoch, as they are kept, or counted: int64[num_blocks, 3].

    Where samples have media, a fourth column counts the overlong ones with media. num_threads: that count, one for each
    core unless given.
    """
    num_blocks = sum(order.num_blocks(node) for node in range(order.num_canonical_nodes))
    shape = num_blocks, 3 + (inputs.index.patches is not None)
    counts = counts_cache.get(key)
    if counts is not None and counts.shape == shape:
        return counts
    with counting(key):
        counts = counts_cache.get(key)  # another process may have counted meanwhile
        if counts is None or counts.shape != shape:
            counts = counts_cache[key] = count_blocks(inputs, order, num_threads=num_threads)
    return counts


def count_blocks(inputs: PlanInputs, order: EpochOrder, *, num_threads: int | None) -> NDArray[np.int64]:
    """Counts as block_counts returns them, made now."""
    blocks = [(node, block) for node in range(order.num_canonical_nodes) for block in range(order.num_blocks(node))]

    def count(node_and_block: tuple[int, int]) -> tuple[int, int, int, int]:
        packs = pack_block(inputs, order, *node_and_block)
        return len(packs), packs.num_tokens, packs.num_overlong, packs.num_overlong_media

    if num_threads == 1:  # in this thread, which does not keep the process from ending as those of a pool do
        counted = [count(each) for each in blocks]
    else:
        with ThreadPoolExecutor(max_workers=num_threads or len(os.sched_getaffinity(0))) as pool:
            counted = list(pool.map(count, blocks))
    give_back_memory()
    num_columns = 3 + (inputs.index.patches is not None)
    return np.array(counted, dtype=np.int64).reshape(-1, 4)[:, :num_columns]
