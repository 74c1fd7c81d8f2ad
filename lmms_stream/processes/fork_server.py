"""multiprocessing's forkserver: a process of one thread that has imported what others come to need, and is forked.

A process has one, which whoever needs it first starts; it ends with the last process that may ask it.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
from collections.abc import Iterable
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import FrameType, ModuleType

from ..errors import ConfigError

_UNTOLD = ["__main__"]  # what a server imports where nobody has said it
_ADDRESS_BYTES = 107  # of the path of a socket
_SOCKET = "/listener-xxxxxxxx"  # in multiprocessing's own folder for temporary files


def start_fork_server(needed: Iterable[str]) -> None:
    """Start the server without waiting for it. needed: modules that it imports first, unless it runs already or the
    program has named others.
    """
    if forkserver._forkserver._preload_modules == _UNTOLD:  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload([f"{__package__}.preloaded", *needed])
    forkserver.ensure_running()


def address_obstacle() -> str | None:
    """Why there can be no socket through which processes find the server, and send each other memory."""
    path = util.get_temp_dir() + _SOCKET
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        return None
    return f"the path of a socket, {path}, would be longer than {_ADDRESS_BYTES} bytes: set TMPDIR to another folder"


def start_context(needed: Iterable[str]) -> ForkServerContext | SpawnContext:
    """What starts processes: the server, started as above, or interpreters of their own where it has no address."""
    if address_obstacle():
        return multiprocessing.get_context("spawn")
    start_fork_server(needed)
    return multiprocessing.get_context("forkserver")


# Check of the program's main module before processes are started that import it.
#
# Processes of "spawn" and "forkserver" import the main module, to find what they are sent of it. A script that starts
# them outside of `if __name__ == "__main__":` runs again in each of them, and starts processes again.

_OTHER_GUARD = "current_process"  # its name tells a child from its parent; parent_process() is None in both by then


def check_main_guard() -> None:
    """Raise ConfigError if the line of the main module that runs now would run again in a process that imports it."""
    main = sys.modules["__main__"]
    frame = _frame_of(main) if _is_imported(main) else None
    if frame is None:
        return
    path = Path(frame.f_code.co_filename)
    statement = _statement(path, frame.f_lineno)
    if statement is not None and not _is_guarded(statement):
        raise ConfigError(
            f"{path}, line {frame.f_lineno}, starts worker processes; they import this script and would run the line "
            "again: move it below `if __name__ == '__main__':`, or start no workers"
        )


def _is_imported(main: ModuleType) -> bool:
    """Whether multiprocessing imports a main module in the processes that it starts (multiprocessing.spawn)."""
    name = getattr(main.__spec__, "name", None)
    if name is not None:
        return not f".{name}".endswith(".__main__")
    return getattr(main, "__file__", None) is not None


def _frame_of(main: ModuleType) -> FrameType | None:
    """The frame of the main module's own code, if it is running: not in a prompt or in another thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals is vars(main) and Path(code.co_filename).is_file():
            return frame
        frame = frame.f_back
    return None


def _statement(path: Path, line: int) -> ast.stmt | None:
    """The outermost statement at a line; None if the file cannot be read as Python."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    return next((each for each in body if each.lineno <= line <= (each.end_lineno or each.lineno)), None)


def _is_guarded(statement: ast.stmt) -> bool:
    """Whether a statement asks if it runs in the program itself: it compares __name__, or calls multiprocessing."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Compare) and any(getattr(each, "id", None) == "__name__" for each in ast.walk(node)):
            return True
        if _OTHER_GUARD in (getattr(node, "id", None), getattr(node, "attr", None)):
            return True
    return False
