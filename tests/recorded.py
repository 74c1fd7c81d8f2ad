"""Record the files of the project whose functions run while tests run: `-p tests.recorded`, into the file RECORDED.

Processes that the tests fork, and those of processes.py, are recorded too; new interpreters are not.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from types import FrameType

import pytest

from .processes import PROCESSES, ROOT

RECORDED = "LMMS_STREAM_RECORDED"  # variable of the environment
IS_FUNCTION = 1  # CO_OPTIMIZED of a code's flags: lines of modules and classes run at an import, and are not recorded
_seen: set[str] = set()
_file = os.open(os.environ.get(RECORDED, os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def record(frame: FrameType, event: str, _: object) -> None:
    """Write the file of a function that is called, once in a process."""
    code = frame.f_code
    if event == "call" and code.co_filename not in _seen and code.co_flags & IS_FUNCTION:
        _seen.add(code.co_filename)
        if code.co_filename.startswith(f"{ROOT}/") and not code.co_filename.startswith(f"{ROOT}/."):
            os.write(_file, f"{os.path.relpath(code.co_filename, ROOT)}\n".encode())


def start() -> None:
    threading.setprofile(record)
    sys.setprofile(record)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, bool, bool]:
    """Record fixtures and tests, but not the collection: it imports all that a conftest.py imports."""
    start()
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if sys.argv[0] == "-c":  # in the server of processes
    start()
else:
    PROCESSES.set_forkserver_preload(["tests.preloaded", "tests.recorded"])
