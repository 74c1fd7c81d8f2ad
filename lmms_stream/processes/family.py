"""The processes that a process has started, and that they have."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import connection, current_process
from pathlib import Path
from typing import NoReturn

_NUMBER = re.compile(r"-(?:\d+:)*(\d+)$")  # in the name of a process


def descendants(pid: int) -> Iterator[int]:
    """The ids of those that live, as the kernel tells."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, listed.read_text().split()):
                yield child
                yield from descendants(child)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def first_number(worker: int) -> int:
    """The number of worker 0 among the processes of its program, told by worker number `worker` of the same row.

    multiprocessing numbers the processes that a process starts. 0 where this process has no number.
    """
    number = _NUMBER.search(current_process().name)
    return int(number[1]) - worker if number else 0


def is_running(pid: int) -> bool:
    """Whether there is a process of this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


# The end of a process: when its work is done, or when the process that started it has ended.

_LOST_STATUS = 1  # of a process whose parent is gone


def end_with_parent() -> None:
    """End this process as soon as the process that started it by multiprocessing ends, for any reason."""
    threading.Thread(target=_wait_for_parent, name="lmms-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(_LOST_STATUS)


def end_process(status: int) -> NoReturn:
    """End this process as sys.exit(status) would, but without freeing what it has imported and built.

    To find and free a million objects of torch and transformers takes a second, and the system frees their memory
    anyway. Threads that are not daemons are waited for, and functions of atexit are called, as multiprocessing does for
    the processes that it starts (BaseProcess._bootstrap).
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # such as a pipe that nobody reads: the interpreter says so
        sys.exit(status)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
