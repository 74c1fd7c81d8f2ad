"""A switch with a store and nodes, each a network namespace behind a link of its own rate.

The machine's own network is left as it is: the switch lies in the store's namespace. Processes of all nodes share the
files of the machine, so what nodes must not share (caches, outputs) gets a folder a node.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from ..conftest import S3_BUCKET
from ..processes import ENVIRONMENT, ROOT
from .bucket import START_S

STORE_ADDRESS = "10.77.0.1"
STORE_PORT = 9000
COMMAND_S = 30.0
# Outlives this process, however that ends: when its input ends, all in these namespaces is killed, and they go.
WARDEN = """
trap '' HUP INT TERM
read -r _
for name; do
    for _ in $(seq 100); do
        pids=$(ip netns pids "$name") && [ -n "$pids" ] || break
        kill -9 $pids
        sleep 0.1
    done
    ip netns delete "$name"
done
"""
CLONE_NEWNET = 0x40000000  # of setns(2), which Python has from 3.12 on
_numbers = count()


@cache
def what_is_missing() -> str | None:
    """Why this machine cannot have namespaces with links of a rate, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"lmms-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run(*_inside(name), "ip", "link", "add", "one", "type", "veth", "peer", "name", "two")
            _run(*_inside(name), "ip", "link", "add", "switch", "type", "bridge")
            _run(*_inside(name), "tc", "qdisc", "add", "dev", "one", "root", *_rate("10mbit"))
        finally:
            _run("ip", "netns", "delete", name)
    except (FileNotFoundError, RuntimeError) as error:
        return f"no network namespaces here: {error} (Debian's package iproute2 has ip and tc)"
    return None


@dataclass(frozen=True)
class Node:
    """A namespace with one link to the switch."""

    name: str
    address: str
    port: str  # the switch's end of its link

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, log: Path) -> subprocess.Popen[bytes]:
        """A process of this node, in a session of its own; all it says goes to the end of `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [*_inside(self.name), *command],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **environment}, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def enter(self) -> None:
        """Have this process, which has no threads yet, and what it starts be of the node."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")


@dataclass(frozen=True)
class Network:
    """Nodes, and an S3 server that each of them reaches over its link."""

    store: Node
    nodes: tuple[Node, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What a process of a node needs in order to reach the S3 server."""
        return {
            "S3_ENDPOINT_URL": f"http://{STORE_ADDRESS}:{STORE_PORT}",
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def set_rate(self, node: Node, rate: str) -> None:
        """Bytes to the node, and from it, at most at this rate, such as "50mbit"."""
        _run(*_inside(self.store.name), "tc", "qdisc", "replace", "dev", node.port, "root", *_rate(rate))
        _run(*_inside(node.name), "tc", "qdisc", "replace", "dev", "eth0", "root", *_rate(rate))

    def set_store_rate(self, rate: str) -> None:
        """Bytes from the store, to all nodes together, at most at this rate; what nodes send each other passes by."""
        _run(*_inside(self.store.name), "tc", "qdisc", "replace", "dev", "switch", "root", *_rate(rate))

    def received_bytes(self, node: Node) -> int:
        """What has gone to the node over its link, with the headers of packets."""
        file = f"/sys/class/net/{node.port}/statistics/tx_bytes"
        return int(_run(*_inside(self.store.name), "cat", file))

    @contextmanager
    def cut(self, node: Node) -> Iterator[None]:
        """Nothing passes the node's link, as if its cable were out."""
        _run(*_inside(self.store.name), "ip", "link", "set", node.port, "down")
        try:
            yield
        finally:
            _run(*_inside(self.store.name), "ip", "link", "set", node.port, "up")


@contextmanager
def network(num_nodes: int, *, rate: str = "1gbit", log: Path) -> Iterator[Network]:
    """`num_nodes` nodes and an S3 server with a bucket (S3_BUCKET); nothing of them is left at the end.

    Not when this process is killed either.
    """
    prefix = f"lmms-{os.getpid()}-{next(_numbers)}"
    store = Node(f"{prefix}-store", STORE_ADDRESS, "")
    nodes = tuple(Node(f"{prefix}-{number}", f"10.77.0.{number + 10}", f"port{number}") for number in range(num_nodes))
    with _warden([each.name for each in (store, *nodes)]):
        for each in (store, *nodes):
            _run("ip", "netns", "add", each.name)
            _run(*_inside(each.name), "ip", "link", "set", "lo", "up")
        _run(*_inside(store.name), "ip", "link", "add", "switch", "type", "bridge")
        _run(*_inside(store.name), "ip", "address", "add", f"{STORE_ADDRESS}/24", "dev", "switch")
        _run(*_inside(store.name), "ip", "link", "set", "switch", "up")
        found = Network(store, nodes)
        for node in nodes:
            _connect(store, node)
            found.set_rate(node, rate)
        command = [sys.executable, "-m", "moto.server", "-H", STORE_ADDRESS, "-p", str(STORE_PORT)]
        server = store.start(command, {}, log=log)
        try:
            _run(
                *_inside(store.name),
                sys.executable,
                "-m",
                "tests.cluster.bucket",
                S3_BUCKET,
                environment=found.environment,
            )
            yield found
        finally:
            server.kill()
            server.wait(COMMAND_S)


@contextmanager
def _warden(names: Sequence[str]) -> Iterator[None]:
    """Namespaces of these names that are made inside go at the end, with all that runs in them."""
    warden = subprocess.Popen(
        ["sh", "-c", WARDEN, "sh", *names],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert warden.stdin is not None
    try:
        yield
    finally:
        warden.stdin.close()
        warden.wait(COMMAND_S * len(names))


def _connect(store: Node, node: Node) -> None:
    """A link between the node and the switch."""
    inside = _inside(node.name)
    _run(*inside, "ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", node.port, "netns", store.name)
    _run(*inside, "ip", "address", "add", f"{node.address}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*_inside(store.name), "ip", "link", "set", node.port, "master", "switch", "up")


def _inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


def _rate(rate: str) -> tuple[str, ...]:
    """A token bucket: 64 kB may pass at once, and a fifth of a second's worth may wait."""
    return ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")


def _run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S + START_S, check=False, cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
