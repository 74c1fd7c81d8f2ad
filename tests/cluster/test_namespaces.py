"""The nodes of a cluster are what they say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..processes import ROOT
from ..rounds import in_long_rounds
from .namespaces import STORE_ADDRESS, STORE_PORT, network, what_is_missing

pytestmark = [in_long_rounds, pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))]

FETCH = """
import boto3, os
client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
client.put_object(Bucket="lmms-stream-demo", Key="a", Body=bytes(5_000_000))
print(len(client.get_object(Bucket="lmms-stream-demo", Key="a")["Body"].read()))
"""

HOLD = """
import sys, time
from pathlib import Path
from tests.cluster.namespaces import network
with network(1, log=Path(sys.argv[1])) as cluster:
    cluster.nodes[0].start(["sleep", "500"], {}, log=Path(sys.argv[1]))
    print(cluster.store.name, cluster.nodes[0].name, flush=True)
    time.sleep(500)
"""


def test_a_node_reads_over_its_link_alone_and_no_faster(tmp_path: Path) -> None:
    with network(2, rate="20mbit", log=tmp_path / "store.log") as cluster:
        one, other = cluster.nodes
        before, begun = cluster.received_bytes(one), time.monotonic()
        job = one.start([sys.executable, "-c", FETCH], cluster.environment, log=tmp_path / "one.log")
        assert job.wait(60) == 0, (tmp_path / "one.log").read_text()
        assert time.monotonic() - begun >= 2 * 5_000_000 * 8 / 20e6
        assert (tmp_path / "one.log").read_text() == "5000000\n"
        assert 5_000_000 < cluster.received_bytes(one) - before < 5_600_000
        assert cluster.received_bytes(other) < 100_000


def test_a_cut_link_passes_nothing_until_it_is_mended(tmp_path: Path) -> None:
    knock = f"import socket; socket.create_connection(({STORE_ADDRESS!r}, {STORE_PORT}), timeout=15).close()"
    with network(1, log=tmp_path / "store.log") as cluster:
        (node,) = cluster.nodes
        with cluster.cut(node):
            assert node.start([sys.executable, "-c", knock], {}, log=tmp_path / "cut.log").wait(30) != 0
        assert node.start([sys.executable, "-c", knock], {}, log=tmp_path / "mended.log").wait(30) == 0


def test_nothing_is_left_of_a_network_whose_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        names = process.stdout.readline().split()
        process.kill()
    assert len(names) == 2
    deadline = time.monotonic() + 60
    while left := [each.name for each in Path("/run/netns").iterdir() if each.name in names]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
