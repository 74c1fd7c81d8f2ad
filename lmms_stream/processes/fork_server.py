"""multiprocessing's forkserver: a single-threaded process with the workers' modules imported, forked for each worker.

Each process has at most one server, started at the first use; the server ends with its last possible client.
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

_UNTOLD = ["__main__"]  # multiprocessing's default imports of a server
_ADDRESS_BYTES = 107  # of the path of a socket
_SOCKET = "/listener-xxxxxxxx"  # in multiprocessing's own folder for temporary files


def start_fork_server(needed: Iterable[str]) -> None:
    """Start the server without waiting. needed: modules for the server to import first; ignored if the server is
    already running or the program has set other modules.
    """
    if forkserver._forkserver._preload_modules == _UNTOLD:  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload([f"{__package__}.preloaded", *needed])
    forkserver.ensure_running()


def address_obstacle() -> str | None:
    """Explain why the server's socket has no valid address; None for a valid address.

    Processes use the socket to reach the server and to share memory.
    """
    path = util.get_temp_dir() + _SOCKET
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        return None
    return f"the path of a socket, {path}, would be longer than {_ADDRESS_BYTES} bytes: set TMPDIR to another folder"


def start_context(needed: Iterable[str]) -> ForkServerContext | SpawnContext:
    """Context for new processes: the started fork server, or new interpreters if the server has no valid address."""
    if address_obstacle():
        return multiprocessing.get_context("spawn")
    start_fork_server(needed)
    return multiprocessing.get_context("forkserver")


# Check of the program's main module before the start of processes.
#
# Processes of "spawn" and "forkserver" import the main module, to unpickle its functions and classes. A script without
# `if __name__ == "__main__":` around the start runs again in each process, and starts processes again.

_OTHER_GUARD = "current_process"  # differs by name in a child; parent_process() is None in both at import


def check_main_guard() -> None:
    """Raise ConfigError if the current line of the main module would run again on import in a new process."""
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
    """Whether multiprocessing imports a main module in new processes (multiprocessing.spawn)."""
    name = getattr(main.__spec__, "name", None)
    if name is not None:
        return not f".{name}".endswith(".__main__")
    return getattr(main, "__file__", None) is not None


def _frame_of(main: ModuleType) -> FrameType | None:
    """Frame of the main module's own code; None if not running, in a prompt or in another thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals is vars(main) and Path(code.co_filename).is_file():
            return frame
        frame = frame.f_back
    return None


def _statement(path: Path, line: int) -> ast.stmt | None:
    """Outermost statement at a line; None for a file without valid Python."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    return next((each for each in body if each.lineno <= line <= (each.end_lineno or each.lineno)), None)


def _is_guarded(statement: ast.stmt) -> bool:
    """Whether a statement checks for the main program: by a comparison of __name__, or by multiprocessing's name."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Compare) and any(getattr(each, "id", None) == "__name__" for each in ast.walk(node)):
            return True
        if _OTHER_GUARD in (getattr(node, "id", None), getattr(node, "attr", None)):
            return True
    return False
