"""What would have to be trained again, had some samples not been there. plans + checkpoints -> a step."""

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
    """From which step on a run would have been another one without some samples.

    step: the first that was trained on any of them, and source, sample_id: one of those. num_steps: from there to the
    checkpoint, those that were passed over among them. checkpoint: the latest from before that step; None: there is
    none any more, so that the run would begin anew.
    """

    step: int
    source: str
    sample_id: int
    num_steps: int
    checkpoint: str | None


def retraining(
    plans: StepLookup, sample_ids: Mapping[str, NDArray[np.int64]], *, history: RunHistory, left_out: LeftOut
) -> Retraining | None:
    """None where no step so far was trained on any of the samples. sample_ids: by source."""
    stop, firsts = history.stop, []
    for source, ids in sample_ids.items():
        found = plans.first_step(source, ids, stop=stop, left_out=left_out)
        if found is not None:
            firsts.append(found)
            stop = found.step + 1  # another source matters where it comes before
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
    """The latest checkpoint in a folder or URL that is whole and has no step from `step` on."""
    target = open_target(checkpoints, staging=Path())  # nothing is fetched
    for number in reversed(target.candidates()):
        try:
            found = read_checkpoint(target.storage, number)
        except CheckpointError:  # a file of it is lost, so that no run could go on from it
            continue
        if int(found.state["cursor"]["step"]) <= step:
            return found.where
    return None
