"""The nodes of a cluster are what they say."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ..rounds import in_long_rounds
from .namespaces import STORE_ADDRESS, STORE_PORT, network, what_is_missing

pytestmark = [in_long_rounds, pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))]

FETCH = """
import boto3, os
client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
client.put_object(Bucket="lmms-stream-demo", Key="a", Body=bytes(5_000_000))
print(len(client.get_object(Bucket="lmms-stream-demo", Key="a")["Body"].read()))
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
