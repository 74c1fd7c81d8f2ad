"""The ledger of a run, from one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..plan.ledger import Ledger as PlanLedger
from ..plan.ledger import PieceEntry, StepEntry
from ..storage.storage import open_storage
from ..train.checkpoint.paths import checkpoints_url, split_path
from ..train.checkpoint.store import Checkpoint, open_target, read_checkpoint
from .amounts import SourceAmounts, amounts_of
from .stretches import OpenedSources, open_stretches


class Ledger:
    """What the steps of a run held and will hold, whichever settings and ranks it had on the way.

    run: a checkpoint, or the output_dir or the checkpoint folder of a run, whose latest is taken; paths or URLs. urls:
    where sources lie now, by name, if that changed. Steps are counted as skip_steps and the plan count them: from 0,
    those that were passed over among them. No shard is read, and no log.

    CheckpointError for what is no checkpoint, and for one without a history: of an earlier release, or of a run whose
    packs lanes make, which are not known beforehand. LengthsError, StorageError, CursorError where a dataset is gone or
    is another.
    """

    def __init__(self, run: str | Path, *, urls: Mapping[str, str] | None = None):
        checkpoint = _find(str(run))
        saved = checkpoint.state.get("history")
        if not saved:
            raise CheckpointError(
                f"{checkpoint.where} keeps no history of its run: it is of an earlier release, or its packs are made "
                "in lanes, which are not known beforehand; log_sample_ids in the settings of a run has its log say them"
            )
        self._sources = OpenedSources(urls)
        self._saved: list[dict[str, Any]] = saved
        self.plans = PlanLedger(open_stretches(saved, self._sources, where=checkpoint.where))
        self.where = checkpoint.where
        self.stop = int(checkpoint.state["cursor"]["step"])  # the first step that the checkpoint has not

    def step(self, number: int) -> StepEntry:
        """The packs of a step, trained or not yet; CursorError for one that the run has not, nor will have."""
        return self.plans.step(number)

    def sample(self, source: str, sample_id: int, *, stop: int | None = None) -> list[PieceEntry]:
        """Where a sample was, and in steps before `stop` (default: the checkpoint's) will be; see PlanLedger.sample."""
        return self.plans.sample(source, sample_id, stop=self.stop if stop is None else stop)

    def amounts(self, stop: int | None = None) -> dict[str, SourceAmounts]:
        """What was read of each source before a step (default: the checkpoint's)."""
        return amounts_of(self.plans, self.stop if stop is None else stop)

    def tokens_of(self, source: str, sample_id: int) -> int:
        """The length of a sample; PackingError for one that is not there."""
        plan = self.plans.plan(source)
        plan.check_sample(sample_id)
        return int(plan.lengths[sample_id])

    def why_nowhere(self, source: str, sample_id: int) -> str:
        """Why no step so far read anything of a sample, for people."""
        tokens, limit = self.tokens_of(source, sample_id), self.plans.plan(source).packing.packing_length
        if tokens > limit:
            return f"it is in no pack: it has more than the {limit:,} tokens of one, and such samples are dropped"
        return f"no step reads {source} before step {self.stop}"

    @property
    def urls(self) -> dict[str, str]:
        """Where each source lies."""
        return {
            name: self._sources.url(name, source)
            for stretch in self._saved
            for name, source in stretch["sources"].items()
        }


def _find(run: str) -> Checkpoint:
    folder, step = split_path(run)
    if step is not None:
        return read_checkpoint(open_storage(folder), step)
    for url in (checkpoints_url(run, None), run):
        target = open_target(url, staging=Path())  # nothing is fetched
        if steps := target.candidates():
            return read_checkpoint(target.storage, steps[-1])
    raise CheckpointError(f"{run} has no complete checkpoint: name one, or the output_dir of a run that has saved one")
