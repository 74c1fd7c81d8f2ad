"""Real Ray nodes on this machine, for tests."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

LIMIT_S = 120.0
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's way to keep a cluster to 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


HEAD = """
import sys
from ray.scripts.scripts import cli
cli(["start", "--block", "--head", "--port", "0", "--num-cpus", "2", "--include-dashboard", "false",
     "--disable-usage-stats", "--object-store-memory", "100000000", "--temp-dir", sys.argv[1]])
"""
JOINING = """
import sys, time
from ray._private.node import Node
from ray._private.parameter import RayParams
Node(RayParams(gcs_address=sys.argv[1], num_cpus=1, object_store_memory=100_000_000, include_log_monitor=False,
               node_manager_port=0, dashboard_agent_listen_port=None), head=False, shutdown_at_exit=False)
time.sleep(600)
"""  # `ray start` lets none join a cluster that keeps to 127.0.0.1


@contextmanager
def ray_node(script: str, argument: str, *, inside: tuple[str, ...] = ()) -> Iterator[psutil.Process]:
    """A node of a cluster until the end of the block. inside: a command to run it in."""
    with subprocess.Popen(
        [*inside, sys.executable, "-c", script, argument],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        node = psutil.Process(process.pid)
        try:
            yield node
        finally:
            started = node.children(recursive=True)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            wait_until(lambda: not any(map(is_alive, started)))


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers_of(process: psutil.Process, name: str = "ray::_Worker") -> list[psutil.Process]:
    """Processes that a cluster or a command has started, by the start of their names."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            if any(Path(word).name.startswith(name) for word in child.cmdline()[:1]):
                found.append(child)
    return found


def is_alive(process: psutil.Process) -> bool:
    """A process that ended, and that nobody has asked for its status, is not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
