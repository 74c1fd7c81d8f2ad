"""Nodes as machines of their own: besides a link, each has a name that the others know, and a disk.

Its disk is the same path on each node (`disk`), and a folder of its own behind it, so that the same command can run on
all nodes, and nothing is shared by accident.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..conftest import S3_BUCKET, last_words
from .namespaces import STORE_ADDRESS, Network, Node, network

COMMAND_S = 60.0
STORE_NAME = "store"
TEMPORARY = "/var/tmp"  # of each node a folder of its disk; sockets need a path that is short, wherever tests write
_BE_A_MACHINE = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" "$4" && mkdir -p "$4/tmp" '
    f'&& mount --bind "$4/tmp" {TEMPORARY} && shift 4 '
    '&& exec "$@"'
)


@dataclass(kw_only=True)
class Machines:
    """Machines of a network. folder: what they write; those with a name on loopback know themselves as 127.0.1.1."""

    network: Network
    folder: Path
    named_on_loopback: bool = False
    beside: list[subprocess.Popen[bytes]] = field(default_factory=list)  # what serves the nodes to the end
    running: list[tuple[int, subprocess.Popen[bytes]]] = field(default_factory=list)  # with the number of their node

    @property
    def disk(self) -> Path:
        """The path of the disk, on each node."""
        return self.folder / "disk"

    def disk_of(self, number: int) -> Path:
        """The same disk, as it is seen from outside."""
        return self.folder / f"node{number}"

    def log_of(self, number: int) -> str:
        """All that processes of a node have said."""
        path = self.folder / f"node{number}.log"
        return path.read_text() if path.exists() else ""

    def start(
        self, number: int, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process of a node."""
        hosts = self.folder / f"hosts{number}"
        hosts.write_text(self._hosts(number))
        for folder in (self.disk, self.disk_of(number)):
            folder.mkdir(exist_ok=True)
        arguments = [_name(number), str(hosts), str(self.disk_of(number)), str(self.disk)]
        started = self.network.nodes[number].start(
            ["unshare", "--uts", "--mount", "sh", "-c", _BE_A_MACHINE, "sh", *arguments, *command],
            {**self.network.environment, "TMPDIR": TEMPORARY, "OMP_NUM_THREADS": "1"}
            | dict(environment or {}),
            log=self.folder / f"node{number}.log",
        )  # fmt: skip
        self.running.append((number, started))
        return started

    def kill(self, *numbers: int) -> None:
        """SIGKILL to all processes of these nodes."""
        for number in numbers:
            kill_all(self.network.nodes[number])
        for number, process in self.running:
            if number in numbers:
                process.wait(COMMAND_S)
        self.running = [each for each in self.running if each[0] not in numbers]

    def upload(self, folder: Path, url: str) -> None:
        """Put the files of a folder into the store."""
        log = self.folder / "upload.log"
        command = [sys.executable, "-m", "tests.cluster.upload", str(folder), url]
        upload = self.network.store.start(command, self.network.environment, log=log)
        assert upload.wait(COMMAND_S) == 0, log.read_text()

    def downloads(self, number: int, prefix: str) -> Counter[str]:
        """How often a node has fetched each object below a prefix, by what the store has logged."""
        address = re.escape(self.network.nodes[number].address)
        found = re.compile(rf'^{address} .*"GET /{S3_BUCKET}/{re.escape(prefix)}/([^ ?]+) ', re.MULTILINE)
        return Counter(found.findall((self.folder / "store.log").read_text()))

    def wait_until(self, condition: Callable[[], bool], *, limit_s: float) -> None:
        """Poll, for as long as all that was started here runs."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert all(process.poll() is None for _, process in self.running), self.said()
            assert time.monotonic() < deadline, f"not within {limit_s:.0f} s:\n{self.said()}"
            time.sleep(0.1)

    def end(self, *, limit_s: float) -> list[int]:
        """Wait for all that was started; their exit statuses."""
        deadline = time.monotonic() + limit_s
        try:
            statuses = [each.wait(max(0.1, deadline - time.monotonic())) for _, each in self.running]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {limit_s:.0f} s:\n{self.said()}") from None
        self.running.clear()
        return statuses

    def said(self) -> str:
        return "\n".join(
            f"node {number}:\n{last_words(self.log_of(number))}" for number in range(len(self.network.nodes))
        )

    def _hosts(self, number: int) -> str:
        lines = ["127.0.0.1 localhost"]
        if self.named_on_loopback:
            lines.append(f"127.0.1.1 {_name(number)}")
        lines += [f"{node.address} {_name(other)}" for other, node in enumerate(self.network.nodes)]
        return "\n".join([*lines, f"{STORE_ADDRESS} {STORE_NAME}", ""])


@contextmanager
def machines(
    num_nodes: int, folder: Path, *, rate: str = "100mbit", named_on_loopback: bool = False
) -> Iterator[Machines]:
    """Machines with a store; nothing of them runs at the end."""
    with network(num_nodes, rate=rate, log=folder / "store.log") as made:
        found = Machines(network=made, folder=folder, named_on_loopback=named_on_loopback)
        try:
            yield found
        finally:
            for node in (*made.nodes, made.store):
                kill_all(node)
            for process in (*found.beside, *(process for _, process in found.running)):
                process.wait(COMMAND_S)


def kill_all(node: Node) -> None:
    """SIGKILL to all processes of a namespace."""
    listed = subprocess.run(
        ["ip", "netns", "pids", node.name], capture_output=True, text=True, timeout=COMMAND_S, check=True
    )
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _name(number: int) -> str:
    return f"node{number}"
