"""Training jobs of the demo: watched through their log, killed, and resumed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import TrainingError
from ..processors.parallelism import ONE_THREAD
from ..train.launch import train_command, without_rank
from ..train.report.train_log import read_log

JOB_TIMEOUT_S = 600.0


def run_job(
    config: Path,
    output: Path,
    *,
    nproc: int,
    on_step: Callable[[int], None],
    kill_at: int | None = None,
    timeout_s: float = JOB_TIMEOUT_S,
) -> int:
    """Train to the end, or until step `kill_at` is logged and all processes are killed; the highest step logged.

    TrainingError when the job fails, when it ends before `kill_at`, and when it takes longer than timeout_s.
    """
    output.mkdir(parents=True, exist_ok=True)
    overrides = [f"train.output_dir={output}", f"dataset.local={output / 'cache'}"]
    environment = without_rank(os.environ) | {"OMP_NUM_THREADS": "1"} | ONE_THREAD
    deadline = time.monotonic() + timeout_s
    with (output / "output.txt").open("ab") as text:
        job = subprocess.Popen(
            train_command(config, overrides, nproc=nproc),
            stdout=text,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while job.poll() is None:
                step = _last_step(output)
                on_step(step)
                if kill_at is not None and step >= kill_at:
                    _kill(job)
                    return _last_step(output)
                if time.monotonic() > deadline:
                    raise TrainingError(f"the job took more than {timeout_s:.0f} s: see {text.name}")
                time.sleep(0.1)
        finally:
            _kill(job)
    if job.returncode != 0 or kill_at is not None:
        raise TrainingError(f"the job ended with status {job.returncode}: {_last_words(output / 'output.txt')}")
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


def _kill(job: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a job and all its descendants, workers of the data loader among them."""
    import psutil

    try:
        processes = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
    job.wait(timeout=10)
