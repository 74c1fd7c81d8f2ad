"""All that a run reports: its records, its progress, its traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...storage.storage import open_storage
from ...types import World
from ..run.phases import Phases
from ..run.schedules import Schedule
from ..run.settings import TrainConfig
from .kept_log import KeptLog, restore_log
from .profiling import StepProfiler
from .progress import RunProgress
from .reporters import Report, check_reporters, open_reports
from .standstill import Standstill
from .train_log import LOG_NAME


class RunLog:
    """Takes the steps and records of a run while `running`: rank 0 writes and shows, every rank traces."""

    def __init__(self, args: TrainConfig, *, world: World):
        check_reporters(args.report_to)
        self._args = args
        self._world = world
        self._reports: list[Report] = []
        # Checkpoints that lie elsewhere outlive the output_dir, so the log is kept beside them.
        self._kept = KeptLog() if args.checkpoint_dir is not None and world.rank == 0 else None

    def begin(self, step: int, *, url: str) -> None:
        """Go on behind a checkpoint (step 0: at the beginning), with what is kept of the log at the URL of these."""
        if self._kept is not None:
            self._kept.begin(step)
            if step:
                restore_log(open_storage(url), step, Path(self._args.output_dir) / LOG_NAME)

    def part(self, step: int) -> dict[str, bytes]:
        """What of the log is to be kept beside the checkpoint of a step, by its key."""
        return {} if self._kept is None else self._kept.part(step)

    @contextmanager
    def running(self, schedule: Schedule, *, step: int, position: int) -> Iterator[None]:
        """Begin after `step` finished steps, at this position of the schedule."""
        is_first = self._world.rank == 0
        output_dir = Path(self._args.output_dir)
        unit = "tokens" if schedule.counts_tokens else "step"
        settings = dataclasses.asdict(self._args)
        with ExitStack() as stack:
            if is_first:
                for report in open_reports(output_dir, self._args.report_to, first_step=step + 1, settings=settings):
                    stack.callback(report.close)
                    self._reports.append(report)
            self._progress = stack.enter_context(RunProgress(schedule.length, unit=unit, done=position, shown=is_first))
            self._profiler = stack.enter_context(
                StepProfiler(self._args.profile, output_dir=output_dir, rank=self._world.rank, step=step)
            )
            yield

    def watched(self, phases: Phases) -> Standstill:
        """Watches this rank's phases while it is entered."""
        args = self._args
        return Standstill(phases, output_dir=Path(args.output_dir), world=self._world, timeout_s=args.timeout_s)

    def end_step(self, position: int) -> None:
        self._profiler.step()
        self._progress.move(position)

    def write(self, record: Mapping[str, Any], *, position: int) -> None:
        """Report a record of all ranks; it has its "step"."""
        for report in self._reports:
            report.write(record)
        if self._kept is not None:
            self._kept.add(record)
        self._progress.tell(record, position)
