"""Steps to retrain for a run without some samples. plans + checkpoints -> a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...plan.ledger import StepLookup
from ...plan.left_out import LeftOut
from ...train.checkpoint.store import open_target, read_checkpoint
from .opening import RunHistory


@dataclass(frozen=True, kw_only=True, slots=True)
class Retraining:
    """Effect of removing some samples on a run.

    step: the first step trained on any removed sample; source, sample_id: one removed sample in this step. num_steps:
    steps from there to the end of the history, including skipped steps. checkpoint: the latest checkpoint before
    `step`; None: no earlier checkpoint exists, and the run would start again from step 0.
    """

    step: int
    source: str
    sample_id: int
    num_steps: int
    checkpoint: str | None


def retraining(
    plans: StepLookup, sample_ids: Mapping[str, NDArray[np.int64]], *, history: RunHistory, left_out: LeftOut
) -> Retraining | None:
    """Return the effect of removing samples; None if no step was trained on the samples. sample_ids: by source."""
    stop, firsts = history.stop, []
    for source, ids in sample_ids.items():
        found = plans.first_step(source, ids, stop=stop, left_out=left_out)
        if found is not None:
            firsts.append(found)
            stop = found.step + 1  # other sources matter only at earlier steps
    if not firsts:
        return None
    first = min(firsts, key=lambda each: each.step)
    return Retraining(
        step=first.step,
        source=first.source,
        sample_id=first.sample_id,
        num_steps=history.stop - first.step,
        checkpoint=None if history.checkpoints is None else _last_before(history.checkpoints, first.step),
    )


def _last_before(checkpoints: str, step: int) -> str | None:
    """Return the latest complete checkpoint in a folder or URL with steps before `step` only."""
    target = open_target(checkpoints, staging=Path())  # nothing is fetched
    for number in reversed(target.candidates()):
        try:
            found = read_checkpoint(target.storage, number)
        except CheckpointError:  # a lost file: no run can resume from this checkpoint
            continue
        if int(found.state["cursor"]["step"]) <= step:
            return found.where
    return None
