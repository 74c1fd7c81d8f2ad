"""One process that runs the Python of a page, block after block, in one namespace and one folder."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from ..processes import ENVIRONMENT, PROCESSES

BLOCK_S = 240.0


class Session:
    """Takes blocks of code. AssertionError with the traceback for one that fails or takes longer than BLOCK_S."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, code: str, *, source: str, line: int) -> None:
        """source, line: what tracebacks call the block, and where in the page it begins."""
        self._connection.send((code, source, line))
        assert self._connection.poll(BLOCK_S), f"{source}:{line}: nothing after {BLOCK_S:.0f} s"
        failure = self._connection.recv()
        assert failure is None, f"{source}:{line}\n{failure}"


@contextmanager
def session(folder: Path) -> Iterator[Session]:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(theirs, folder, os.environ | ENVIRONMENT))
    process.start()
    theirs.close()
    try:
        yield Session(ours)
        ours.send(None)
        process.join(BLOCK_S)
        assert process.exitcode == 0, f"the page's process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, folder: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    namespace: dict[str, object] = {"__name__": "__main__"}
    while (block := connection.recv()) is not None:
        code, source, line = block
        text = "\n" * (line - 1) + code
        linecache.cache[source] = (len(text), None, text.splitlines(keepends=True), source)
        try:
            exec(compile(text, source, "exec"), namespace)
        except BaseException:  # noqa: BLE001 - it is told to the process that asked
            connection.send(traceback.format_exc())
        else:
            connection.send(None)
