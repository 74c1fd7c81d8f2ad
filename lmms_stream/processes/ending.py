"""The end of a process: when its work is done, or when the process that started it has ended."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from multiprocessing import connection
from typing import NoReturn

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
