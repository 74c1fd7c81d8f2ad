"""Descendants of a process."""

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
    """Yield the ids of all running descendants, from the kernel's lists."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, listed.read_text().split()):
                yield child
                yield from descendants(child)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; without a handler, the signal ends the process."""
    with suppress(OSError):  # the process has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def first_number(worker: int) -> int:
    """Number of worker 0 among its program's processes, computed in worker number `worker`.

    multiprocessing numbers the children of a process. 0 if this process has no number.
    """
    number = _NUMBER.search(current_process().name)
    return int(number[1]) - worker if number else 0


def is_running(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


# The end of a process: after its work, or after the end of its parent.

_LOST_STATUS = 1  # of a process without its parent


def end_with_parent() -> None:
    """End this process when its multiprocessing parent ends, for any reason."""
    threading.Thread(target=_wait_for_parent, name="lmms-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(_LOST_STATUS)


def end_process(status: int) -> NoReturn:
    """End this process like sys.exit(status), but without freeing imported modules and objects.

    Freeing a million objects of torch and transformers takes a second, and the system frees their memory anyway. The
    function waits for non-daemon threads and calls functions of atexit, like multiprocessing in its children
    (BaseProcess._bootstrap).
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # for example a pipe without a reader: the interpreter reports the error
        sys.exit(status)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
