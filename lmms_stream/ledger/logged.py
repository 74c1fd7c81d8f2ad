"""What the log of a run in lanes says of its samples. Lanes pack samples as they are read, so no plan tells them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from ..errors import ConfigError, CursorError
from ..train.checkpoint.store import CHECKPOINTS_NAME
from ..train.report.train_log import LOG_NAME, history, read_log
from .opening import RunHistory

CANNOT = (
    "the packs of this run are made in lanes, as samples are read: of steps to come, of ranks and micro-batches, and "
    "of what is left of an epoch nothing is known"
)


class LoggedLedger:
    """The samples of the steps that a run in lanes has logged; it had log_sample_ids.

    output_dir: of the run, where its log lies. Steps are counted from 0, as by Ledger. ConfigError where the log is
    not there, or has no ids.
    """

    def __init__(self, run: RunHistory, *, output_dir: Path):
        self.where, self.stop = run.where, run.stop
        self.tokens_seen, self.samples_seen = (int(run.state.get(name, 0)) for name in ("tokens_seen", "samples_seen"))
        self._log = output_dir / LOG_NAME

    @cached_property
    def steps(self) -> Mapping[int, tuple[int, ...]]:
        """Ids of the samples of each logged step that the checkpoint has, each as often as it is in the step."""
        records = history(read_log(self._log)).steps
        found = {
            record["step"] - 1: tuple(map(int, record["sample_ids"]))
            for record in records
            if "sample_ids" in record and record["step"] <= self.stop
        }
        if not found:
            raise ConfigError(
                f"{self._log} has no sample ids: {CANNOT}, and of steps that are done it is what the log keeps with "
                "train.log_sample_ids"
            )
        return found

    def step(self, number: int) -> tuple[int, ...]:
        """The ids of the samples of a step; CursorError for one that is not in the log."""
        if number not in self.steps:
            raise CursorError(
                f"step {number} is not in {self._log}, which has the samples of {len(self.steps)} steps: {CANNOT}"
            )
        return self.steps[number]

    def sample(self, sample_id: int) -> list[int]:
        """The logged steps that read something of a sample."""
        return [number for number, ids in sorted(self.steps.items()) if sample_id in ids]


def output_dir_of(run: str) -> Path:
    """The output_dir of what a user names: itself, its folder of checkpoints, or one of these."""
    path = Path(run)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / LOG_NAME).is_file():
            return folder
    raise ConfigError(
        f"{run}: {CANNOT}, and there is no {LOG_NAME} beside it: name the output_dir of the run, where its "
        f"{CHECKPOINTS_NAME} lie"
    )
