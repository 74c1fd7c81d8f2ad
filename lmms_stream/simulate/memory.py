"""How much memory of its own a loader worker takes, from the sizes of what the code keeps. Arithmetic only."""

from __future__ import annotations

from ..plan.mixture import Mixture
from ..plan.planner import STRETCH_PACKS

SEGMENT_BYTES = 16  # of a pack that is kept: a sample's id and its length
CARRIED_BYTES = 12  # of a sample of the window that waits, where a block is not kept whole
REPLAY_BYTES = 56  # of a sample of the block that is packed: ids, lengths, segments, packs, and what sorts them
PLANNED_BYTES = 56  # of a segment of the packs that are planned together: its sample, shard, offset and lengths
SHARD_BYTES = 3400  # of a shard's entry in the index as Python holds it, and of the arrays of orders and readers
MAPPED_SHARD_BYTES = 100  # of the arrays alone
LONG_INDEX = 3000  # shards: a longer index is a memory-mapped table (see mds/stored_index.py)
TOKEN_BYTES = 24  # of a batch: input_ids, labels and position_ids


def worker_bytes(mixture: Mixture, *, num_items: int, packs_per_item: int, makes_batches: bool) -> int:
    """Private memory of a worker beyond an interpreter with its libraries, in bytes; media are not counted.

    Of each source the packs that are kept (see PackPlan's kept_segments), one block that is replayed, and the index;
    the packs that are planned together; and where workers make the batches, num_items of packs_per_item packs. Shards
    are memory-mapped: they are the page cache's.
    """
    total = 0
    replayed = planned = 0.0
    for plan in mixture.plans.values():
        nodes = plan.num_canonical_nodes
        block = min(plan.order.shuffle_block_size, -(-plan.num_samples // nodes))
        kept = min(plan.kept_segments, nodes * block)
        if kept < nodes * block:
            total += nodes * min(plan.packing.samples_at_once or block, block) * CARRIED_BYTES
        num_shards, num_packs = len(plan.samples_per_shard), plan.num_packs(0)
        of_shard = SHARD_BYTES if num_shards <= LONG_INDEX else MAPPED_SHARD_BYTES
        total += kept * SEGMENT_BYTES + num_shards * of_shard
        replayed = max(replayed, block * REPLAY_BYTES)
        planned = max(planned, plan.num_samples * min(1.0, STRETCH_PACKS / num_packs) * PLANNED_BYTES)
    longest = max(plan.longest_pack for plan in mixture.plans.values())
    return round(total + replayed + planned) + makes_batches * num_items * packs_per_item * longest * TOKEN_BYTES
