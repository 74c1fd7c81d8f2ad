"""All that a run reports: its records, its progress, its traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...types import World
from ..run.phases import Phases
from ..run.schedules import Schedule
from ..run.settings import TrainConfig
from .profiling import StepProfiler
from .progress import RunProgress
from .reporters import Report, check_reporters, open_reports
from .standstill import Standstill


class RunLog:
    """Takes the steps and records of a run while `running`: rank 0 writes and shows, every rank traces."""

    def __init__(self, args: TrainConfig, *, world: World):
        check_reporters(args.report_to)
        self._args = args
        self._world = world
        self._reports: list[Report] = []

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
        self._progress.tell(record, position)
