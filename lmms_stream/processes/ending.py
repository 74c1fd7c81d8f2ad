"""The end of a process whose work is done."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


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
