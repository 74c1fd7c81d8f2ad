"""The server from which workers of the trainer are forked: a single-threaded process with the needed imports.

A rank has threads of gloo and of C libraries, and a fork copies the locks held by other threads; the server has no
other threads. The server is multiprocessing's forkserver; a process has at most one. A rank forks the server before
starting threads and importing models; a user's own program starts the server as an interpreter.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from ..processes.family import end_with_parent
from ..processes.fork_server import address_obstacle, start_fork_server
from ..signals import outlive_stop_signal

NEEDED = ("tokenizers", "torch.utils.data", "lmms_stream.loader.worker", "lmms_stream.processors.chat")
_LOST_STATUS = 1
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def without_blas_threads() -> Iterator[None]:
    """Keep NumPy from starting threads at the first import inside; see fork_worker_server."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]
        if before is not None:
            os.environ[_BLAS_THREADS] = before


def start_worker_server() -> None:
    """Start the server in a separate interpreter if no server runs, and return at once."""
    start_fork_server(NEEDED)


def fork_worker_server() -> None:
    """Fork the server from this process, after imports needed by workers and by this process.

    The fork costs no time, and the server shares this process's memory. A process with other threads, or with a
    server, calls only start_worker_server. Without a place for the server's socket no server is started.
    """
    if address_obstacle():
        return
    for name in NEEDED:
        importlib.import_module(name)
    resource_tracker.ensure_running()
    start_interpreter = util.spawnv_passfds
    if len(list(Path("/proc/self/task").iterdir())) == 1:
        util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        start_worker_server()
    finally:
        util.spawnv_passfds = start_interpreter


def _fork(path: bytes, arguments: Sequence[Any], passed: Sequence[int]) -> int:
    """Run the code of the last argument in a fork of this interpreter, instead of starting an interpreter.

    passed: the server's socket, and the end of a pipe that reports the end of the server's last client.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        pipe = os.fstat(passed[1]).st_ino
        for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            with suppress(OSError):
                if number not in passed and os.fstat(number).st_ino == pipe:
                    os.close(number)  # the other end, which would hide the last client's end
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # this thread holds it
        exec(arguments[-1], {})  # multiprocessing's own line
    finally:
        os._exit(_LOST_STATUS)


@contextmanager
def without_main() -> Iterator[None]:
    """Keep processes started inside from running the program's main module again.

    By default a process runs the main module, to find objects defined in the module; a program without a `__main__`
    guard would train again in each process. multiprocessing does not run a main module with the spec name `__main__`.
    """
    main = sys.modules["__main__"]
    spec = main.__spec__
    main.__spec__ = ModuleSpec("__main__", None)
    try:
        yield
    finally:
        main.__spec__ = spec


class BeginFromServer:
    """Initialise a worker of the server.

    The worker takes the environment of this process, because the server's may be out of date. The worker ends with
    this process: torch's workers watch for the end of the forking process, and the server ends after the workers.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)

    def __call__(self, worker: int) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        end_with_parent()
        outlive_stop_signal(worker)
