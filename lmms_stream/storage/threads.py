"""Threads that a fork does not catch while they end: a process asks for an index, then forks its loader workers.

A thread that Python has joined may yet be taking down what C libraries keep for it; OpenSSL 3 does that under a lock
of the whole process. A fork at that moment copies the lock as held by a thread that the child does not have, and the
child's first connection waits for ever. So a fork waits for threads that are ending.

It waits, too, until torch's own threads sleep. At the end of a collective gloo's come into Python for a moment, under a
lock that Python 3.11 takes in the child before it makes a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LONGEST_WAIT_S = 5.0
LONGEST_TORCH_WAIT_S = 0.5
_POLL_S = 0.0005
_ending: set[int] = set()  # the kernel's ids of threads whose target has returned, until they are found gone


def start_thread(target: Callable[[], None], *, name: str) -> threading.Thread:
    """A running daemon thread; once `target` has returned, forks of this process wait until the thread is gone.

    They wait LONGEST_WAIT_S at most, and not for threads whose target is running.
    """

    def run() -> None:
        try:
            target()
        finally:
            _ending.add(threading.get_native_id())

    _forget_those_gone()
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _forget_those_gone() -> None:
    for native_id in tuple(_ending):
        if not Path(f"/proc/self/task/{native_id}").exists():
            _ending.discard(native_id)


def _wait_for_those_ending() -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    _forget_those_gone()
    while _ending and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        _forget_those_gone()


def _wait_for_torch() -> None:
    deadline = time.monotonic() + LONGEST_TORCH_WAIT_S
    while _torch_runs() and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # which lets the ending threads have the GIL


def _torch_runs() -> bool:
    """Whether a thread that torch named, and not Python, is anything but asleep."""
    for task in os.scandir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            name, _, state = Path(task.path, "stat").read_text().partition("(")[2].rpartition(") ")
            if name.startswith("pt_") and not state.startswith("S"):
                return True
    return False


os.register_at_fork(before=_wait_for_torch)
os.register_at_fork(before=_wait_for_those_ending, after_in_child=_ending.clear)
