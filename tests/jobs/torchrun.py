"""Jobs by real torchrun, as users start them: it and its ranks are interpreters that start anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ..processes import ENVIRONMENT, ROOT


def train_command(config: Path, output: Path, *overrides: str, nproc: int) -> list[str]:
    """`lmms-stream train`, which becomes torchrun."""
    train = [sys.executable, "-m", "lmms_stream", "train", str(config), f"train.output_dir={output}", *overrides]
    return [*train, "--nproc", str(nproc)]


@contextmanager
def start(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A command that runs, with all that it says in its stdout; nothing of it is left at the end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRONMENT, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            kill(family(process))


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process that runs, and all that it has started."""
    try:
        return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
