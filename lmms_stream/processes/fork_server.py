"""multiprocessing's forkserver: a process of one thread that has imported what others come to need, and is forked.

A process has one, which whoever needs it first starts; it ends with the last process that may ask it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

_UNTOLD = ["__main__"]  # what a server imports where nobody has said it
_ADDRESS_BYTES = 107  # of the path of a socket
_SOCKET = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # of the server, in the folder for temporary files


def start_fork_server(needed: Iterable[str]) -> None:
    """Have it running, or about to: this does not wait for it.

    needed: modules that it imports first, where it does not run yet and the program has not named others.
    """
    if forkserver._forkserver._preload_modules == _UNTOLD:  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload([f"{__package__}.preloaded", *needed])
    forkserver.ensure_running()


def has_address() -> bool:
    """Whether the server can be reached: a socket's path is short, and TMPDIR may be long."""
    return len(os.fsencode(tempfile.gettempdir() + _SOCKET)) <= _ADDRESS_BYTES


def start_context(needed: Iterable[str]) -> ForkServerContext | SpawnContext:
    """What starts processes: the server, started as above, or interpreters of their own where it has no address."""
    if not has_address():
        return multiprocessing.get_context("spawn")
    start_fork_server(needed)
    return multiprocessing.get_context("forkserver")
