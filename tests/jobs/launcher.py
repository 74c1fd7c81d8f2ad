"""Ranks of a job, started as torchrun starts them, but from a server that has imported torch and transformers.

torchrun and each of its ranks take some seconds to import these. Here the server of tests/processes.py forks the ranks:
processes of their own, each in a session of its own, with the environment that torchrun gives (test_launcher.py
compares the two) and a store that the process of the tests serves, as torchrun's does. A rank that fails ends the
others.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
from torch.distributed import TCPStore

from ..processes import ENVIRONMENT, PROCESSES, start_server

ROOT = Path(__file__).parent.parent.parent
GRACE_S = 30.0  # from SIGTERM to SIGKILL, as torchrun gives


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks of a job, and the files in which they speak."""

    ranks: Sequence[ForkServerProcess]
    stdout: Path
    stderr: Path

    def poll(self) -> int | None:
        """The exit status once all ranks have ended: 0, or that of the first rank whose is another (-9: killed)."""
        statuses = [rank.exitcode for rank in self.ranks]
        return None if None in statuses else next((status for status in statuses if status), 0)

    def wait(self, timeout_s: float) -> int:
        """The exit status. A rank that fails ends the others; a job that takes longer is a TimeoutExpired."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if any(rank.exitcode for rank in self.ranks):
                self._terminate()
            elif not self._wait_for_one(deadline - time.monotonic()):
                raise subprocess.TimeoutExpired("a job", timeout_s, self.stdout.read_bytes(), self.stderr.read_bytes())
        return status

    def send_signal(self, number: int) -> None:
        """To all ranks that run."""
        for rank in self.ranks:
            if rank.exitcode is None and rank.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Ranks that run, and what they have started: workers of the data loader."""
        found = []
        for rank in self.ranks:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def _terminate(self) -> None:
        """SIGTERM to all ranks, SIGKILL to those that have not ended GRACE_S later."""
        self.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self.poll() is None and self._wait_for_one(deadline - time.monotonic()):
            pass
        self.send_signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.join()

    def _wait_for_one(self, timeout_s: float) -> bool:
        """Until one more rank has ended; whether one has within the time."""
        running = [rank.sentinel for rank in self.ranks if rank.exitcode is None]
        return bool(connection.wait(running, max(0.0, timeout_s)))


@contextmanager
def start_job(nproc: int, module: str, *arguments: str) -> Iterator[Job]:
    """A job of `nproc` ranks that run a module with its arguments; nothing of it is left at the end."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="job-") as name:
        folder = Path(name)
        ranks = [_of_rank(rank, nproc, port=store.port, folder=folder) for rank in range(nproc)]
        with _start(module, arguments, ranks, folder) as job:
            yield job


def run_job(nproc: int, module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, whatever its exit status."""
    with start_job(nproc, module, *arguments) as job:
        return _complete(job, module, timeout_s)


def run_alone(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module in one process, as without torchrun, to its end."""
    with tempfile.TemporaryDirectory(prefix="job-") as name, _start(module, arguments, [{}], Path(name)) as job:
        return _complete(job, module, timeout_s)


def _complete(job: Job, module: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    status = job.wait(timeout_s)
    return subprocess.CompletedProcess(module, status, job.stdout.read_text(), job.stderr.read_text())


def _of_rank(rank: int, nproc: int, *, port: int, folder: Path) -> dict[str, str]:
    """What torchrun adds to the environment of a rank, on one node."""
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
        **{name: str(nproc) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": folder.name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def _start(module: str, arguments: Sequence[str], ranks: Sequence[dict[str, str]], folder: Path) -> Iterator[Job]:
    """A process for each of the ranks, which are what is added to the environment; all are killed at the end."""
    start_server()
    stdout, stderr = folder / "stdout", folder / "stderr"
    inherited = os.environ | ENVIRONMENT
    processes = []
    for own in ranks:
        arguments_of_rank = (module, arguments, inherited | own, stdout, stderr)
        processes.append(PROCESSES.Process(target=_be_rank, args=arguments_of_rank))
    stdout.touch()
    stderr.touch()
    job = Job(ranks=processes, stdout=stdout, stderr=stderr)
    try:
        for process in processes:
            process.start()
        yield job
    finally:
        for child in job.processes():
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process in processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # workers of a rank that ended before
                process.join()
            process.close()


def _be_rank(module: str, arguments: Sequence[str], environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Make a forked process like one that was started with `python -u -m module`, and run the module."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    multiprocessing.set_start_method(None, force=True)  # the platform's, where the server's would be inherited
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
