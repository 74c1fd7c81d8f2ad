"""The least that a cache downloads: Belady's rule over every access of every step, known beforehand."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lmms_stream.mds.core import PackedDataset
from lmms_stream.plan.planner import StepConfig
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.tools.simulate.needs import Needs
from lmms_stream.types import World


def accesses(dataset: PackedDataset, *, global_batch: int, epochs: int) -> tuple[list[int], list[int]]:
    """The shards that a machine reads in each step of each epoch, one after another; and where each epoch ends."""
    mixture = WindowedMixture({"data": dataset.plan})
    needs = Needs(mixture, StepConfig(global_batch=global_batch, world=World()))
    cursor, shards, ends = mixture.start(), list[int](), list[int]()
    for epoch in range(epochs):
        num_steps = -(-dataset.plan.num_packs(epoch) // global_batch)
        shards += [shard for stretch in needs.walk(cursor, num_steps) for shard in stretch.shards.tolist()]
        cursor = mixture.skip(cursor, num_steps, global_batch=global_batch)
        ends.append(len(shards))
    return shards, ends


def least_downloads(shards: Sequence[int], sizes: Sequence[int], limit: int) -> list[int]:
    """The numbers of the accesses that download, when what is needed last gives way. sizes, limit: bytes."""
    following, last = [len(shards)] * len(shards), dict[int, int]()
    for at in reversed(range(len(shards))):
        following[at], last[shards[at]] = last.get(shards[at], len(shards)), at
    held, heap = dict[int, int](), list[tuple[int, int]]()  # shard -> its next access
    used, missed = 0, list[int]()
    for at, shard in enumerate(shards):
        if shard not in held:
            missed.append(at)
            used += sizes[shard]
            while used > limit:
                needed, other = heapq.heappop(heap)
                if held.get(other) == -needed:
                    used -= sizes[other]
                    del held[other]
        held[shard] = following[at]
        heapq.heappush(heap, (-following[at], shard))
    return missed
