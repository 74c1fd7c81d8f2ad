"""Processes that tests start often, forked from a server that has imported what they use (preloaded.py).

They are processes of their own, with exit statuses, signals and memory of their own; only the seconds are saved that an
interpreter takes to import torch, transformers and streaming. The server has one thread, so that no fork copies a lock
that is held.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import multiprocessing.process
import multiprocessing.util
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
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import psutil

from .guard.collective_log import FOLDER, begin, latest

ROOT = Path(__file__).parent.parent
GRACE_S = 30.0  # from SIGTERM to SIGKILL, as torchrun gives
TOGETHER_S = 1.0  # from the end of one rank, with an error, to SIGTERM for the others
PROCESSES: ForkServerContext = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.preloaded"])
multiprocessing.util.get_temp_dir()  # the server's for good, before a test has a folder of its own for temporary files
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}  # of child processes


@dataclass(frozen=True, kw_only=True)
class Job:
    """Processes that run one module, such as the ranks of a job, and the files that hold what they say."""

    processes: Sequence[ForkServerProcess]
    stdout: Path
    stderr: Path

    def poll(self) -> int | None:
        """The exit status once all have ended: 0, or that of the first whose is another (-9: killed)."""
        statuses = [process.exitcode for process in self.processes]
        return None if None in statuses else next((status for status in statuses if status), 0)

    def wait(self, timeout_s: float) -> int:
        """The exit status. One that fails ends the others; what takes longer is a TimeoutExpired."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if any(process.exitcode for process in self.processes):
                # Others may be about to end by themselves with the same status, as those do that were told to stop.
                if not self._wait_for_one(TOGETHER_S):
                    self._terminate()
            elif not self._wait_for_one(deadline - time.monotonic()):
                states = "\n".join([*self._states(), latest(Path(os.environ.get(FOLDER, os.devnull)))])
                self.send_signal(signal.SIGUSR2)  # faulthandler writes to stderr where each of its threads stands
                time.sleep(5)
                said = self.stderr.read_bytes()
                command = f"a job; {states}\nit said: {said.decode(errors='replace')[-8000:]}"
                raise subprocess.TimeoutExpired(command, timeout_s, self.stdout.read_bytes(), said)
        return status

    def send_signal(self, number: int) -> None:
        """To all that run."""
        for process in self.processes:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def family(self) -> list[psutil.Process]:
        """Those that run, and what they have started: workers of the data loader."""
        found = []
        for pid in [process.pid for process in self.processes if process.exitcode is None]:
            with suppress(psutil.NoSuchProcess):
                if pid is not None:  # psutil takes None for the process that asks
                    found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return found

    def complete(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Wait, and what was said."""
        status = self.wait(timeout_s)
        return subprocess.CompletedProcess("job", status, self.stdout.read_text(), self.stderr.read_text())

    def kill(self) -> None:
        """SIGKILL to all that is left, workers of processes that have ended among them."""
        for child in self.family():
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process in self.processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
            process.close()

    def _terminate(self) -> None:
        """SIGTERM to all, SIGKILL to those that have not ended GRACE_S later."""
        self.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self.poll() is None and self._wait_for_one(deadline - time.monotonic()):
            pass
        self.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def _states(self) -> Iterator[str]:
        """What the kernel says of each process and of the server that forked them: a line for each of their threads."""
        for process in self.processes:
            yield f"process {process.pid}: exit status {process.exitcode}"
        for each in (*self.family(), *psutil.Process().children()):
            for task in Path("/proc", str(each.pid), "task").glob("*"):
                with suppress(OSError):
                    status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
                    told = " ".join(f"{name} {status[name]}" for name in ("State", "PPid", "SigBlk", "SigCgt"))
                    yield f"{each.pid}/{task.name} {status['Name']}: {told}, in {(task / 'wchan').read_text()}"

    def _wait_for_one(self, timeout_s: float) -> bool:
        """Until one more has ended; whether one has within the time."""
        running = [process.sentinel for process in self.processes if process.exitcode is None]
        return not running or bool(connection.wait(running, max(0.0, timeout_s)))  # of none it would wait all the time


def running_after(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Processes that have not ended after some seconds. A zombie has ended: its parent may never ask for its status."""
    deadline = time.monotonic() + timeout_s
    while (running := [each for each in processes if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_module(module: str, *arguments: str, timeout_s: float, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python -m module`, or `python module.py`, in one process, to its end, whatever its exit status."""
    with start_module(module, arguments, [{}], cwd=cwd) as job:
        return job.complete(timeout_s)


@contextmanager
def start_module(
    module: str, arguments: Sequence[str], additions: Sequence[dict[str, str]], *, cwd: Path = ROOT
) -> Iterator[Job]:
    """A process for each of the additions to this one's environment; nothing of them is left at the end."""
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        environments = [os.environ | ENVIRONMENT | addition for addition in additions]
        processes = [
            PROCESSES.Process(target=_be_module, args=(module, arguments, environment, files, cwd))
            for environment in environments
        ]
        for file in files:
            file.touch()
        job = Job(processes=processes, stdout=files[0], stderr=files[1])
        try:
            for process in processes:
                process.start()
            yield job
        finally:
            job.kill()


def _be_module(
    module: str, arguments: Sequence[str], environment: dict[str, str], files: tuple[Path, Path], cwd: Path
) -> None:
    """Make a forked process like one that was started with `python -u -m module`, and run the module."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(files, start=1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.register(signal.SIGUSR2)  # see Job.wait
    multiprocessing.set_start_method(None, force=True)  # the platform's, where the server's would be inherited
    multiprocessing.set_forkserver_preload(["__main__"])  # what an interpreter begins with
    tempfile.tempdir = None  # of the environment, and not the server's
    multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    if c10d := sys.modules.get("torch.distributed.distributed_c10d"):
        begin(c10d)
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
