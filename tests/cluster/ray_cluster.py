"""A Ray cluster over the nodes of a network: each with a folder that no other node sees."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from .namespaces import Network, Node

LIMIT_S = 180.0
_PORT = 6379
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True)
class RayCluster:
    """Ray's processes by node, the head's first."""

    network: Network
    folders: tuple[Path, ...]
    processes: tuple[subprocess.Popen[bytes], ...]
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return f"{self.network.nodes[0].address}:{_PORT}"

    def start(self, number: int, command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
        """A process of a node that sees the node's own folder, which is its TMPDIR, and not those of others."""
        hidden = " && ".join(f"mount -t tmpfs none {folder}" for n, folder in enumerate(self.folders) if n != number)
        return self.network.nodes[number].start(
            ["sh", "-c", f'{hidden} && exec "$@"', "sh", *command],
            {**self.environment, "TMPDIR": str(self.folders[number])},
            log=log,
        )

    def kill(self, number: int) -> None:
        """All of Ray's processes of a node, at once."""
        _kill(self.processes[number])


@contextmanager
def ray_cluster(network: Network, *, num_cpus: int = 1, log: Path) -> Iterator[RayCluster]:
    """Ray on all nodes of a network, each with so many CPUs and 100 MB for objects. log: a folder."""
    environment = {
        **network.environment,
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as base:
        folders = tuple(Path(base) / str(number) for number in range(len(network.nodes)))  # short: sockets' names
        for folder in folders:
            folder.mkdir()
        processes: list[subprocess.Popen[bytes]] = []
        cluster = RayCluster(network, folders, (), environment)
        try:
            for number, node in enumerate(network.nodes):
                command = node_command(node, cluster.address, number, folders[number], num_cpus)
                processes.append(cluster.start(number, command, log=log / f"ray-{number}.log"))
                if number == 0:
                    _wait_for_nodes(cluster, 1, log=log)
            cluster = RayCluster(network, folders, tuple(processes), environment)
            _wait_for_nodes(cluster, len(network.nodes), log=log)
            yield cluster
        finally:
            for process in processes:
                _kill(process)


def node_command(node: Node, address: str, number: int, folder: Path, num_cpus: int) -> list[str]:
    """The command that keeps a node in a cluster, number 0 as its head. folder: Ray's own, on the node."""
    where = ["--address", address] if number else ["--head", "--port", str(_PORT), "--include-dashboard", "false"]
    return [
        *_RAY, "start", "--block", *where, "--node-ip-address", node.address, "--num-cpus", str(num_cpus),
        "--object-store-memory", "100000000", "--disable-usage-stats", "--temp-dir", str(folder),
    ]  # fmt: skip


def _wait_for_nodes(cluster: RayCluster, count: int, *, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        said = log / "status.log"
        said.unlink(missing_ok=True)
        cluster.start(0, [*_RAY, "status", "--address", cluster.address], log=said).wait(LIMIT_S)
        if said.read_text().count(" 1 node_") == count:
            return
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.5)


def _kill(process: subprocess.Popen[bytes]) -> None:
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(LIMIT_S)
    psutil.wait_procs(started, timeout=LIMIT_S)
