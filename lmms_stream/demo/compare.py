"""Whether resumed runs are the uninterrupted one, step by step, computed from their logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import TrainingError
from ..train.report.train_log import read_log


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run's records by step, and how far its losses may lie from the reference's."""

    name: str
    records: dict[int, dict[str, Any]]
    tolerance: float


def read_run(output: Path, *, name: str, tolerance: float) -> Run:
    """The records of the run in `output`; of a step that was logged twice, the later."""
    return Run(name=name, records={record["step"]: record for record in read_log(output)}, tolerance=tolerance)


def compare_runs(reference: Run, resumed: Sequence[Run], *, first_step: int, last_step: int) -> tuple[Table, list[str]]:
    """A table of steps first_step to last_step, and each difference in words (none: the runs are equal).

    Sample ids of the global batch must be equal, losses within each run's tolerance (0: equal to the last bit).
    TrainingError when the reference lacks a step, so that nothing equal can be shown of nothing.
    """
    table = Table("step", "ids", f"{reference.name}\nloss", box=SIMPLE_HEAD)
    for run in resumed:
        for heading in (f"{run.name}\nids", "\nloss", "\ndiff"):
            table.add_column(heading)
    if last_step < first_step or any(step not in reference.records for step in range(first_step, last_step + 1)):
        raise TrainingError(f"the log of {reference.name} lacks steps {first_step} to {last_step}")
    differences = []
    for step in range(first_step, last_step + 1):
        expected = reference.records[step]
        row = [str(step), str(len(expected["sample_ids"])), f"{expected['loss']:.4f}"]
        for run in resumed:
            record = run.records.get(step)
            if record is None:
                differences.append(f"step {step}: {run.name} has no record")
                row += ["missing", "missing", "missing"]
                continue
            same_ids = record["sample_ids"] == expected["sample_ids"]
            gap = abs(record["loss"] - expected["loss"])
            if not same_ids:
                differences.append(f"step {step}: {run.name} read other samples")
            if not gap <= run.tolerance:
                differences.append(f"step {step}: the loss of {run.name} differs by {gap:.3g}")
            row += [
                "equal" if same_ids else "DIFFERENT",
                f"{record['loss']:.4f}",
                f"{gap:.1e}" if gap else "0",
            ]
        table.add_row(*row)
    return table, differences
