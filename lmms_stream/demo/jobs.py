"""Training jobs of the demo: watched through their log, killed, and resumed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import TrainingError
from ..processors.parallelism import ONE_THREAD
from ..train.launch import train_command, without_rank
from ..train.report.train_log import read_log

JOB_TIMEOUT_S = 600.0


class Job(Protocol):
    """A job that runs. poll: its exit status once it has ended; kill: SIGKILL to all its processes, once or again."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


class StartJob(Protocol):
    """Starts a job of `nproc` ranks, which appends what it says to a file."""

    def __call__(self, config: Path, overrides: Sequence[str], *, nproc: int, text: Path) -> Job: ...


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
