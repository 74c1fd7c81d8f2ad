"""How far loader workers are ahead of the step at hand. step config + workers -> items and packs; arithmetic only."""

from __future__ import annotations

from dataclasses import replace

from .planner import StepConfig

PREFETCH_PACKS = 32  # shards are requested this many packs before a worker reads them
MAX_ITEMS_AHEAD = 32
MAX_MEDIA_ITEMS_AHEAD = 4  # a pack of 8192 tokens of images is 150 MB of patches
TOKENS_PER_FILL = 1 << 17  # tokens of packs whose rows are one piece of memory: one call fills many short packs
TOKENS_PER_ITEM = 1 << 19  # of steps that are handed over together: an item costs both processes half a millisecond
MAX_STEPS_PER_ITEM = 4


def in_whole_steps(steps: StepConfig, *, packing_length: int, is_limited: bool) -> StepConfig:
    """The config where workers only fetch packs: they hand over a rank's whole steps, several where these are short.

    packing_length: the longest. is_limited: there is room for some shards only, so none look further ahead than a step.
    """
    num_steps = TOKENS_PER_ITEM // (steps.micro_batches * packing_length)
    num_steps = 1 if is_limited else max(1, min(MAX_STEPS_PER_ITEM, num_steps))
    return replace(
        steps,
        packs_per_item=num_steps * steps.micro_batches,
        packs_per_work=max(1, TOKENS_PER_FILL // packing_length),
    )


def items_ahead(steps: StepConfig, *, num_workers: int, reads_media: bool) -> int:
    """Items that each worker has ready: a step's, which are taken at once, as far as memory allows."""
    of_step = steps.micro_batches // steps.packs_per_item
    most = MAX_MEDIA_ITEMS_AHEAD if reads_media else MAX_ITEMS_AHEAD
    return min(most, max(2, -(-of_step // max(1, num_workers))))


def steps_ahead(steps: StepConfig, *, num_workers: int) -> int:
    """Steps that a worker plans ahead of the one that is handed out, at most."""
    of_worker = (
        PREFETCH_PACKS + (items_ahead(steps, num_workers=num_workers, reads_media=False) + 1) * steps.packs_per_item
    )
    return -(-of_worker * max(1, num_workers) // steps.micro_batches) + 1


def steps_asked_ahead(steps: StepConfig, *, num_workers: int, num_items: int) -> int:
    """How many steps after the one that a rank has taken its workers have asked for shards of.

    Workers have num_items of items_ahead each, and ask for PREFETCH_PACKS more before they make the next. Items go to
    workers in turn, so the last worker's, begun or whole, are the furthest.
    """
    whole, rest = divmod(PREFETCH_PACKS, steps.packs_per_item)
    items = (whole + (num_items if num_workers else 0)) * max(1, num_workers)
    begun = steps.packs_per_item * (max(1, num_workers) - 1) + rest if rest else 0
    return (items * steps.packs_per_item + begun) // steps.micro_batches


def packs_ahead(steps: StepConfig, *, num_workers: int, num_items: int) -> int:
    """Packs that all workers of a node look ahead together, num_items of items_ahead each; of the largest node."""
    of_worker = PREFETCH_PACKS + (num_items + 1) * steps.packs_per_item
    return of_worker * max(1, num_workers) * max(steps.world.group_nodes)
