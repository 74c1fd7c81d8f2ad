"""A barrier of ranks on a socket of the machine's files: it takes nothing of the links to the store.

So do the collectives of a cluster whose GPUs have a network of their own.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

LIMIT_S = 300.0  # that a rank waits for the others
CONNECT_S = 120.0


@contextmanager
def serve_barrier(path: Path, num_ranks: int) -> Iterator[None]:
    """Let go, again and again, of `num_ranks` ranks that connect to `path`, each time once all of them wait."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(num_ranks)
        thread = threading.Thread(target=_serve, args=(listener, num_ranks))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, num_ranks: int) -> None:
    with ExitStack() as stack:
        try:
            ranks = [stack.enter_context(listener.accept()[0]) for _ in range(num_ranks)]
        except OSError:  # it is over before all were there
            return
        while all(rank.recv(1) for rank in ranks):  # empty: one has ended
            for rank in ranks:
                rank.sendall(b"\0")


class Barrier:
    """A rank's end of it."""

    def __init__(self, path: Path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CONNECT_S)
        self._socket.connect(str(path))
        self._socket.settimeout(LIMIT_S)

    def wait(self) -> None:
        """Return once all ranks wait; ConnectionError where one has ended."""
        self._socket.sendall(b"\0")
        if not self._socket.recv(1):
            raise ConnectionError("a rank has ended before the others")

    def __enter__(self) -> Barrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()


def gather(mine: Any, folder: Path, others: Barrier, *, rank: int, num_ranks: int) -> list[Any]:
    """What all ranks give, as JSON through files of a folder, in their order."""
    (folder / f"told-{rank}").write_text(json.dumps(mine))
    others.wait()
    told = [json.loads((folder / f"told-{each}").read_text()) for each in range(num_ranks)]
    others.wait()
    return told
