"""Where a run ends: stretches and skipped steps -> counts of steps. Pure."""

from __future__ import annotations

from ..plan.assign import num_steps
from ..plan.ledger import Ranges, Stretch


def steps_to_end(stretch: Stretch, *, num_epochs: int | None = None) -> int | None:
    """Steps from the cursor of a stretch until its sources have no packs left; None where that never comes.

    num_epochs: how often a mixture without weights is gone through, since the run began, of which none may be left;
    None: to the end of its epoch.
    """
    mixture, cursor, size = stretch.mixture, stretch.cursor, stretch.global_batch
    if mixture.schedule is not None:
        left = mixture.packs_left(cursor)
        return None if left is None else num_steps(global_batch=size, num_packs=left)
    total = 0
    epoch = max(cursor.sources[name].epoch for name in mixture.names)  # that of a source added later is earlier
    for _ in range(epoch, epoch + 1 if num_epochs is None else num_epochs):
        steps = num_steps(global_batch=size, num_packs=mixture.packs_left(cursor) or 0)
        cursor = mixture.skip(cursor, steps, global_batch=size)
        total += steps
    return total


def step_after(first: int, num_steps: int, *, skipped: Ranges) -> int:
    """The step after `num_steps` steps from `first` on that lie in none of the ranges `skipped`, which may overlap.

    >>> [step_after(0, num_steps, skipped=[(2, 4), (3, 5), (9, 20)]) for num_steps in (2, 6, 8)]
    [2, 9, 22]
    """
    end = first
    for begin, stop in sorted(skipped):
        kept = max(begin, end) - end
        if kept >= num_steps:
            break
        if stop <= end:
            continue
        end, num_steps = stop, num_steps - kept
    return end + num_steps
