from __future__ import annotations

import pytest
from lmms_stream.plan.planner import MAX_STEPS_PER_ITEM, StepConfig, in_whole_steps, steps_asked_ahead
from lmms_stream.types import World

STEPS = StepConfig(global_batch=64, world=World(world_size=2))


@pytest.mark.parametrize(
    ("packing_length", "num_steps"), [(512, MAX_STEPS_PER_ITEM), (4096, 4), (8192, 2), (16384, 1), (1 << 20, 1)]
)
def test_workers_hand_over_short_steps_together_and_long_ones_by_themselves(
    packing_length: int, num_steps: int
) -> None:
    steps = in_whole_steps(STEPS, packing_length=packing_length, is_limited=False)
    assert steps.packs_per_item == num_steps * steps.micro_batches
    assert steps_asked_ahead(steps, num_workers=2, num_items=2) >= 2 * 2 * num_steps


def test_workers_of_a_limited_cache_hand_over_one_step_at_a_time() -> None:
    steps = in_whole_steps(STEPS, packing_length=512, is_limited=True)
    assert steps.packs_per_item == steps.micro_batches
