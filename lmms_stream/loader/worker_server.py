"""The server that workers of the trainer are forked from: a process that has imported what they need, with one thread.

A rank has threads of gloo and of C libraries, and a fork copies the locks that they hold at that moment; the server has
none. It is multiprocessing's forkserver, of which a process has one. A rank forks it before it has threads and before
it imports models; a program of a user's own starts it as an interpreter.
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
    """Inside, NumPy starts no threads when it is imported for the first time; see fork_worker_server."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]
        if before is not None:
            os.environ[_BLAS_THREADS] = before


def start_worker_server() -> None:
    """Start the server in an interpreter of its own if none runs, and return at once."""
    start_fork_server(NEEDED)


def fork_worker_server() -> None:
    """Fork the server from this process, after imports that workers need and this process needs, too.

    That costs no time, and the server shares its memory. A process that has other threads, or has a server, gets one
    from start_worker_server. Without a place for the server's socket there is none.
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
    """Instead of starting an interpreter that runs the code of its last argument, run it in a fork of this one.

    passed: the server's socket, and the end of a pipe that tells it when the last process that may ask it has ended.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        pipe = os.fstat(passed[1]).st_ino
        for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            with suppress(OSError):
                if number not in passed and os.fstat(number).st_ino == pipe:
                    os.close(number)  # the other end, which would keep the server from that
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # this thread holds it
        exec(arguments[-1], {})  # multiprocessing's own line
    finally:
        os._exit(_LOST_STATUS)


@contextmanager
def without_main() -> Iterator[None]:
    """Inside, processes that are started do not run the program's main module again.

    They would, to find what they are given of it; a program that does not ask whether it is `__main__` would train
    again in each of them. multiprocessing leaves a main module of this name alone.
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

    It takes the environment of this process, which may have changed since the server began, and ends with this
    process: torch's workers look for the end of the process that forked them, and the server ends after them.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)

    def __call__(self, worker: int) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        end_with_parent()
        outlive_stop_signal(worker)
