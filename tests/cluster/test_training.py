"""Training on nodes that share nothing but a store: torchrun over links, nodes that die, links that are cut.

Each run is compared, step by step, with one on a single machine that was never interrupted, by the samples of each
global batch and their losses.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.train.report.train_log import History, history, read_log

from ..conftest import S3_BUCKET, write_tokens
from ..jobs.runs import differences, last_step, train
from ..rounds import LONG, in_long_rounds
from ..train.runs import write_run
from .machines import STORE_NAME, Machines, machines
from .namespaces import what_is_missing

MISSING = what_is_missing() if LONG else None
pytestmark = [in_long_rounds, pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.timeout(1800)]

NUM_SAMPLES, NUM_EPOCHS = 400, 4
LIMIT_S = 600.0  # of every wait
CUT_S = 20.0
OTHER_RANKS = 1e-3  # sums of gradients are of other parts
MOST_AGAIN = 3  # steps that are done twice where each step is saved: one, and those while it is written
STOPPED = "told to stop by a signal"
DATA = f"s3://{S3_BUCKET}/data"
HOLD = """
import signal
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
print("ready")
signal.pause()
"""
# Dead nodes are noticed after 10 s, and nodes that may yet come are waited for as long.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=10"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder, num_samples=NUM_SAMPLES)
    return folder


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of two ranks on one machine that was never interrupted, which deals packs as to two nodes."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_run(folder / "run.yaml", dataset, num_train_epochs=NUM_EPOCHS)
    train(config, folder / "out", nproc=2, num_nodes=2)
    assert_each_sample_is_read_once_an_epoch(folder / "out")
    return folder / "out"


@pytest.fixture
def cluster(dataset: Path, tmp_path: Path) -> Iterator[Machines]:
    """Two nodes on links that are slow enough for runs to be interrupted, with the dataset in their store."""
    with machines(2, tmp_path, rate="8mbit") as made:
        made.upload(dataset, DATA)
        yield made


def assert_each_sample_is_read_once_an_epoch(output: Path) -> None:
    """By the records of a log that count: every step is there, and each epoch has every sample, once."""
    steps = kept(output).steps
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    of_epochs: dict[int, Counter[int]] = {}
    for record in steps:
        of_epochs.setdefault(math.ceil(record["epoch"] - 1e-9), Counter()).update(record["sample_ids"])
    assert of_epochs == {epoch + 1: Counter(range(NUM_SAMPLES)) for epoch in range(NUM_EPOCHS)}


def kept(output: Path) -> History:
    return history(read_log(output))


def write_settings(cluster: Machines, name: str, **train: Any) -> Path:
    """The config of a run that saves nothing but to the store."""
    settings = {"num_train_epochs": NUM_EPOCHS, "save_steps": 4, "save_total_limit": 3, "timeout_s": 60}
    saved = {"checkpoint_dir": f"s3://{S3_BUCKET}/runs/{name}"}
    return write_run(cluster.folder / f"{name}.yaml", DATA, **(settings | saved | train))


def start(
    cluster: Machines, config: Path, *overrides: str, nodes: Sequence[int] = (0, 1), nnodes: str = "2",
    nproc: int = 1, endpoint: str = "node0:29400", more: str = "", options: Sequence[str] = (),
) -> None:  # fmt: skip
    """The same command on some nodes, as docs/nodes.md has it."""
    command = [
        sys.executable, "-m", "lmms_stream.train.torchrun", "--nnodes", nnodes, "--nproc-per-node", str(nproc),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", config.stem,
        "--rdzv-conf", f"{RENDEZVOUS}{more}", *options,
        "-m", "lmms_stream.train", str(config), f"train.output_dir={cluster.disk / 'out'}",
        f"dataset.local={cluster.disk / 'cache'}", *overrides,
    ]  # fmt: skip
    for number in nodes:
        cluster.start(number, command)


def start_elastic(cluster: Machines, config: Path, *, nodes: Sequence[int] = (0, 1)) -> None:
    """The same for one node or two, which meet at the machine of the store."""
    start(
        cluster, config, nodes=nodes, nnodes="1:2", endpoint=f"{STORE_NAME}:29400", more=",is_host=0",
        options=["--max-restarts=3"],
    )  # fmt: skip


def reached(cluster: Machines, step: int, *, nodes: Sequence[int] = (0, 1)) -> None:
    """Wait until a node has logged a step."""
    cluster.wait_until(lambda: steps_of(cluster, nodes) >= step, limit_s=LIMIT_S)


def steps_of(cluster: Machines, nodes: Sequence[int] = (0, 1)) -> int:
    """The last step that any of some nodes has logged."""
    return max(last_step(cluster.disk_of(number) / "out") for number in nodes)


def shards_of(downloads: Counter[str]) -> set[str]:
    return {name for name in downloads if name.endswith(".mds")}


def world_sizes(output: Path) -> list[int]:
    """The ranks of each step."""
    return [round(record["num_tokens"] / record["perf/global_seq_len_avg"]) for record in kept(output).steps]


def num_again(output: Path) -> int:
    """Steps that a node has done more than once."""
    steps = [record["step"] for record in read_log(output)]
    return len(steps) - len({*steps})


def hold_rendezvous(cluster: Machines) -> None:
    """Have the machine of the store hold the rendezvous, as docs/nodes.md has it."""
    log = cluster.folder / "rendezvous.log"
    cluster.beside.append(cluster.network.store.start([sys.executable, "-u", "-c", HOLD], {}, log=log))
    cluster.wait_until(lambda: "ready" in log.read_text(), limit_s=LIMIT_S)


@pytest.mark.parametrize("nproc", [1, 2])
def test_two_nodes_train_as_one_machine_does(cluster: Machines, whole: Path, nproc: int) -> None:
    """Those of one rank each are named as Debian writes /etc/hosts: the node's own name is 127.0.1.1."""
    cluster.named_on_loopback = nproc == 1
    config = write_settings(cluster, "two", save_steps=12, num_workers=1 if nproc == 1 else 0)
    start(cluster, config, nproc=nproc)
    assert cluster.end(limit_s=LIMIT_S) == [0, 0], cluster.said()
    output = cluster.disk_of(0) / "out"
    assert_each_sample_is_read_once_an_epoch(output)
    assert differences(whole, output, tolerance=0 if nproc == 1 else OTHER_RANKS) == []
    for number in range(2):
        assert {cluster.downloads(number, "data")[name] for name in shards_of(cluster.downloads(number, "data"))} == {1}
    assert read_log(cluster.disk_of(1) / "out") == []
    assert not [*cluster.folder.glob("node?/out/**/*.distcp")]
    told = "which no other node reaches: gloo takes eth0 (GLOO_SOCKET_IFNAME)" in cluster.log_of(1)
    assert told == cluster.named_on_loopback


def test_nodes_that_lost_all_they_had_go_on_from_the_store(cluster: Machines, dataset: Path, whole: Path) -> None:
    """One begins with a full cache. Killed twice: then the other has nothing again; then neither has anything."""
    config = write_settings(cluster, "lost")
    cache = cluster.disk_of(0) / "cache"
    cache.mkdir(parents=True)
    for shard in dataset.glob("*.mds"):
        shutil.copy(shard, cache)
    start(cluster, config)
    reached(cluster, 10)
    cluster.kill(0, 1)
    before = [cluster.downloads(number, "data") for number in range(2)]
    shutil.rmtree(cluster.disk_of(0) / "out")
    shutil.rmtree(cluster.disk_of(1))

    start(cluster, config)
    reached(cluster, 20)
    cluster.kill(0, 1)
    new = [cluster.downloads(number, "data") - before[number] for number in range(2)]
    assert not shards_of(new[0]) | shards_of(before[0])
    assert shards_of(new[1]) & shards_of(before[1])
    output = cluster.disk_of(0) / "out"
    assert differences(whole, output, last_step=last_step(output)) == []

    for number in range(2):
        shutil.rmtree(cluster.disk_of(number))
    start(cluster, config)
    assert cluster.end(limit_s=LIMIT_S) == [0, 0], cluster.said()
    assert shards_of(cluster.downloads(0, "data"))
    assert_each_sample_is_read_once_an_epoch(output)
    assert differences(whole, output) == []


def test_one_node_goes_on_where_two_lost_all_they_had(cluster: Machines, whole: Path) -> None:
    """Without restarts, the other ends when a node dies, also where that held the rendezvous."""
    config = write_settings(cluster, "fewer")
    start(cluster, config)
    reached(cluster, 10)
    cluster.kill(0)
    assert cluster.end(limit_s=LIMIT_S) == [1], cluster.said()
    assert "error: rank 1 waited for another rank, which ended or was silent for 60 s" in cluster.log_of(1)
    for number in range(2):
        shutil.rmtree(cluster.disk_of(number))
    start(cluster, config, nodes=[1], nnodes="1", endpoint="node1:29400")
    assert cluster.end(limit_s=LIMIT_S) == [0], cluster.said()
    output = cluster.disk_of(1) / "out"
    assert_each_sample_is_read_once_an_epoch(output)
    assert differences(whole, output, tolerance=OTHER_RANKS) == []


@pytest.mark.parametrize(
    ("victim", "goodbye"), [(1, True), (0, True), (1, False)], ids=["other", "first", "other behind a cut link"]
)
def test_a_node_that_dies_is_done_without_and_taken_back(
    cluster: Machines, whole: Path, victim: int, goodbye: bool
) -> None:
    """Two nodes, one, and two again; the rendezvous is held by a machine that stays.

    Behind a cut link its kernel closes no connection, as with a node that loses its power.
    """
    hold_rendezvous(cluster)
    for node in cluster.network.nodes:
        cluster.network.set_rate(node, "4mbit")
    # What is saved takes a second a step over this link, so the run is not over when the node comes back.
    config = write_settings(cluster, "elastic", timeout_s=20, save_steps=1)
    start_elastic(cluster, config)
    reached(cluster, 10)
    other, lost = 1 - victim, "waited for another rank, which ended or was silent for 20 s"
    outputs = [cluster.disk_of(number) / "out" for number in range(2)]
    cluster.wait_until(lambda: world_sizes(outputs[0])[-1:] == [2], limit_s=LIMIT_S)  # one may have begun alone
    killed_after = steps_of(cluster)
    if goodbye:
        cluster.kill(victim)
    else:
        with cluster.network.cut(cluster.network.nodes[victim]):
            cluster.kill(victim)
            cluster.wait_until(lambda: lost in cluster.log_of(other), limit_s=LIMIT_S)
    reached(cluster, killed_after + 2, nodes=[other])
    stops = cluster.log_of(other).count(STOPPED)
    start_elastic(cluster, config, nodes=[victim])
    assert cluster.end(limit_s=LIMIT_S) == [0, 0], cluster.said()
    assert cluster.log_of(other).count(lost) == 1
    assert cluster.log_of(other).count(STOPPED) == stops + 1  # to begin again with both
    output = max(outputs, key=last_step)
    assert_each_sample_is_read_once_an_epoch(output)
    assert differences(whole, output, tolerance=OTHER_RANKS) == []
    assert [size for size, _ in groupby(world_sizes(output))][-3:] == [2, 1, 2]
    assert all(num_again(each) <= MOST_AGAIN for each in outputs)  # from the last checkpoint on


def test_a_link_that_is_cut_for_a_while_is_waited_for(cluster: Machines, whole: Path) -> None:
    """Nothing is started again, and no step is done twice."""
    start(cluster, write_settings(cluster, "cut"))
    reached(cluster, 10)
    with cluster.network.cut(cluster.network.nodes[1]):
        time.sleep(CUT_S)
    assert cluster.end(limit_s=LIMIT_S) == [0, 0], cluster.said()
    output = cluster.disk_of(0) / "out"
    assert_each_sample_is_read_once_an_epoch(output)
    assert differences(whole, output) == []
    assert len(read_log(output)) == last_step(output)
