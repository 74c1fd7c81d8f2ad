"""multiprocessing's forkserver: a process of one thread that has imported what others come to need, and is forked.

A process has one, which whoever needs it first starts; it ends with the last process that may ask it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, SpawnContext

_UNTOLD = ["__main__"]  # what a server imports where nobody has said it
_ADDRESS_BYTES = 107  # of the path of a socket
_SOCKET = "/listener-xxxxxxxx"  # in multiprocessing's own folder for temporary files


def start_fork_server(needed: Iterable[str]) -> None:
    """Have it running, or about to: this does not wait for it.

    needed: modules that it imports first, where it does not run yet and the program has not named others.
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
