"""Conversions on the nodes of a cluster: the same bytes as on one machine, also where a node is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..conftest import S3_BUCKET
from ..converters.held import chat
from ..converters.test_convert_runs import written
from ..rounds import in_long_rounds
from .namespaces import Network, network, what_is_missing
from .ray_cluster import LIMIT_S, RayCluster, ray_cluster

pytestmark = [in_long_rounds, pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))]

STORE = f"s3://{S3_BUCKET}"
NUM_BYTES = 80_000_000  # of the sources, about: enough that no node does it all before others have started
CONVERT = (sys.executable, "-m", "lmms_stream", "convert", f"{STORE}/sources/*.jsonl")
OPTIONS = ("--shard-size", "2mb", "--dedup", "exact", "--shuffle-seed", "3")
PUT = """
import sys
from pathlib import Path
from lmms_stream.storage.storage import open_storage
for path in sys.argv[2:]:
    open_storage(sys.argv[1]).upload(Path(path), Path(path).name)
"""
GET = """
import sys
from pathlib import Path
from lmms_stream.storage.storage import open_storage
store = open_storage(sys.argv[1])
for each in store.list_objects(""):
    path = Path(sys.argv[2]) / each.key
    path.parent.mkdir(parents=True, exist_ok=True)
    store.download(each.key, path)
"""


@dataclass(frozen=True)
class Cluster:
    network: Network
    folder: Path
    of_one_machine: dict[str, bytes]

    def stored(self, prefix: str) -> dict[str, bytes]:
        """Every file at a prefix of the store, which only nodes can reach."""
        folder = self.folder / prefix
        folder.mkdir()
        _done(self.network, 0, [sys.executable, "-c", GET, f"{STORE}/{prefix}", str(folder)], self.folder)
        return written(str(folder))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, two sources in the store, and what one node alone makes of them."""
    folder = tmp_path_factory.mktemp("cluster")
    lines = [json.dumps(chat(number) | {"id": number // 2}) + "\n" for number in range(NUM_BYTES // 480)]
    paths = [folder / f"{number}.jsonl" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_text("".join(lines[number::2]))
    with network(3, rate="500mbit", log=folder / "store.log") as found:
        _done(found, 0, [sys.executable, "-c", PUT, f"{STORE}/sources", *map(str, paths)], folder)
        _done(found, 0, [*CONVERT, str(folder / "one"), *OPTIONS, "--workers", "2"], folder)
        yield Cluster(found, folder, written(str(folder / "one")))


def _done(network: Network, number: int, command: list[str], folder: Path) -> None:
    log = folder / "command.log"
    assert network.nodes[number].start(command, network.environment, log=log).wait(LIMIT_S) == 0, log.read_text()


def _wait_until(happens: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happens():
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _again(ray: RayCluster, command: list[str], *, log: Path) -> None:
    """The same command, to its end: Ray finds out later that a node is gone, and may yet begin a worker there."""
    deadline = time.monotonic() + LIMIT_S
    while (status := ray.start(0, command, log=log).wait(LIMIT_S)) != 0:
        said = log.read_text().splitlines()[-1]
        assert (status, said.startswith("error: a Ray worker was lost at its start: run the same")) == (1, True), said
        assert time.monotonic() < deadline


def test_workers_on_three_nodes_share_a_folder_and_one_node_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "convert.log"
    with ray_cluster(cluster.network, log=tmp_path) as ray:
        command = [*CONVERT, str(target), *OPTIONS, "--work", str(tmp_path / "work")]
        command += ["--engine", "ray", "--ray-address", ray.address]
        before = [cluster.network.received_bytes(node) for node in cluster.network.nodes]
        job = ray.start(0, command, log=log)
        _wait_until(lambda: cluster.network.received_bytes(cluster.network.nodes[2]) - before[2] > NUM_BYTES / 10, job)
        ray.kill(2)
        assert job.wait(LIMIT_S) == 1
        assert "error: a Ray worker was lost at " in log.read_text()
        assert list((tmp_path / "work").rglob("*.npz"))  # which the same command does not make again
        _again(ray, command, log=log)
        after = [cluster.network.received_bytes(node) for node in cluster.network.nodes]
    assert written(str(target)) == cluster.of_one_machine
    # Each read some of the sources, by ranges, and none all of them.
    read = [new - old for old, new in zip(before, after, strict=True)]
    assert min(read) > NUM_BYTES / 10
    assert max(read) < NUM_BYTES


def test_workers_on_three_nodes_share_the_store_alone(cluster: Cluster, tmp_path: Path) -> None:
    target, log = f"{STORE}/alone", tmp_path / "convert.log"
    with ray_cluster(cluster.network, log=tmp_path) as ray:
        command = [*CONVERT, target, *OPTIONS, "--part", "0/1", "--engine", "ray", "--ray-address", ray.address]
        before = [cluster.network.received_bytes(node) for node in cluster.network.nodes]
        job = ray.start(0, command, log=log)
        _wait_until(lambda: cluster.network.received_bytes(cluster.network.nodes[1]) - before[1] > NUM_BYTES / 10, job)
        ray.kill(1)
        assert job.wait(LIMIT_S) == 1
        assert "error: a Ray worker was lost at " in log.read_text()
        _again(ray, command, log=log)
        after = [cluster.network.received_bytes(node) for node in cluster.network.nodes]
    read = [new - old for old, new in zip(before, after, strict=True)]
    assert min(read) > NUM_BYTES / 10
    last = [*CONVERT, target, *OPTIONS, "--workers", "2"]
    assert cluster.network.nodes[2].start(last, cluster.network.environment, log=log).wait(LIMIT_S) == 0, (
        log.read_text()
    )
    assert cluster.stored("alone") == cluster.of_one_machine


def test_parts_of_three_nodes_share_the_store_alone_and_one_node_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    nodes, target = cluster.network.nodes, f"{STORE}/parts"
    folders = [tmp_path / str(number) for number in range(3)]

    def start(number: int) -> subprocess.Popen[bytes]:
        folders[number].mkdir(exist_ok=True)
        command = [*CONVERT, target, *OPTIONS, "--workers", "1", "--part", f"{number}/3"]
        environment = {**cluster.network.environment, "TMPDIR": str(folders[number])}
        return nodes[number].start(command, environment, log=tmp_path / f"{number}.log")

    before = cluster.network.received_bytes(nodes[1])
    jobs = [start(number) for number in range(3)]
    _wait_until(lambda: cluster.network.received_bytes(nodes[1]) - before > NUM_BYTES / 5, jobs[1])
    os.killpg(jobs[1].pid, signal.SIGKILL)
    jobs[1].wait(LIMIT_S)
    for number in (0, 2):
        assert jobs[number].wait(LIMIT_S) == 0, (tmp_path / f"{number}.log").read_text()
    last = [*CONVERT, target, *OPTIONS, "--workers", "2"]
    log = tmp_path / "last.log"
    assert nodes[2].start(last, cluster.network.environment, log=log).wait(LIMIT_S) == 1
    assert "in 3 parts, of which 1 is not whole: 1/3; run the same command with --part 1/3" in " ".join(
        log.read_text().split()
    )
    assert start(1).wait(LIMIT_S) == 0, (tmp_path / "1.log").read_text()
    assert nodes[2].start(last, cluster.network.environment, log=log).wait(LIMIT_S) == 0, log.read_text()
    assert cluster.stored("parts") == cluster.of_one_machine
