"""Training jobs of the demo: watched through their log, killed, and resumed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...errors import TrainingError
from ...processors.tokenizers import ONE_THREAD
from ...train.report.train_log import read_log
from ...train.torchrun import train_command, without_rank

JOB_TIMEOUT_S = 600.0


class DemoJob(Protocol):
    """A job that runs. poll: its exit status once it has ended; kill: SIGKILL to all its processes, once or again."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


class StartJob(Protocol):
    """Starts a job of `nproc` ranks, which appends what it says to a file."""

    def __call__(self, config: Path, overrides: Sequence[str], *, nproc: int, text: Path) -> DemoJob: ...


class Torchrun:
    """`lmms-stream train`, as users start it."""

    def __init__(self, config: Path, overrides: Sequence[str], *, nproc: int, text: Path):
        environment = without_rank(os.environ) | {"OMP_NUM_THREADS": "1"} | ONE_THREAD
        with text.open("ab") as file:
            self._process = subprocess.Popen(
                train_command(config, overrides, nproc=nproc), stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL to torchrun and all its descendants, workers of the data loader among them."""
        import psutil

        try:
            root = psutil.Process(self._process.pid)
            processes = [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=10)
        self._process.wait(timeout=10)


def run_job(
    config: Path,
    output: Path,
    *,
    nproc: int,
    on_step: Callable[[int], None],
    kill_at: int | None = None,
    timeout_s: float = JOB_TIMEOUT_S,
    start: StartJob = Torchrun,
) -> int:
    """Train to the end, or until step `kill_at` is logged and all processes are killed; the highest step logged.

    TrainingError when the job fails, when it ends before `kill_at`, and when it takes longer than timeout_s.
    """
    output.mkdir(parents=True, exist_ok=True)
    overrides = [f"train.output_dir={output}", f"dataset.local={output / 'cache'}"]
    deadline = time.monotonic() + timeout_s
    text = output / "output.txt"
    text.touch()
    job = start(config, overrides, nproc=nproc, text=text)
    try:
        while (status := job.poll()) is None:
            step = _last_step(output)
            on_step(step)
            if kill_at is not None and step >= kill_at:
                job.kill()
                return _last_step(output)
            if time.monotonic() > deadline:
                raise TrainingError(f"the job took more than {timeout_s:.0f} s: see {text}")
            time.sleep(0.1)
    finally:
        job.kill()
    if status != 0 or kill_at is not None:
        raise TrainingError(f"the job ended with status {status}: {_last_words(text)}")
    step = _last_step(output)
    on_step(step)
    return step


def _last_words(path: Path) -> str:
    """The error a job printed in one line, or the end of its output."""
    lines = path.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else "\n".join(lines[-15:])


def _last_step(output: Path) -> int:
    return max((record["step"] for record in read_log(output)), default=0)


# Whether resumed runs are the uninterrupted one, step by step, computed from their logs.


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """A run's records by step, and how far its losses may lie from the reference's."""

    name: str
    records: dict[int, dict[str, Any]]
    tolerance: float


def read_run(output: Path, *, name: str, tolerance: float) -> RunRecords:
    """The records of the run in `output`; of a step that was logged twice, the later."""
    return RunRecords(name=name, records={record["step"]: record for record in read_log(output)}, tolerance=tolerance)


def compare_runs(
    reference: RunRecords, resumed: Sequence[RunRecords], *, first_step: int, last_step: int
) -> tuple[Table, list[str]]:
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
