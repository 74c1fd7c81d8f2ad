"""What real loaders of a case download, and how long they take, in the namespaces of nodes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.simulate.measured import Simulation
from lmms_stream.tools.simulate.run import simulate

from ..conftest import S3_BUCKET, write_samples
from ..processes import PROCESSES, start_module
from .case import NUM_SAMPLES, Case
from .lock_step import serve_barrier
from .namespaces import Network, Node, network
from .reading import BARRIER, RESULT

SHARD_BYTES = 1 << 20
LIMIT_S = 280.0
_LINE = re.compile(rf'^(10\.77\.0\.\d+) .*"GET /{S3_BUCKET}/[^/ ]+/(\S+\.mds) HTTP', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What nodes downloaded, and how long they took.

    sizes: of shards by their names. downloads: of each shard, of each node. received_bytes: over its link, headers too.
    waits_s: before each step. total_s: from the beginning of the first epoch to the end of the last step. idle: the
    part of the machine's CPU time that nobody used meanwhile.
    """

    sizes: Mapping[str, int]
    downloads: Sequence[Counter[str]]
    received_bytes: Sequence[int]
    waits_s: Sequence[float]
    total_s: float
    idle: float

    @property
    def num_bytes(self) -> list[int]:
        """Of the shards that each node downloaded."""
        return [sum(self.sizes[name] * count for name, count in each.items()) for each in self.downloads]

    @property
    def wait_s(self) -> float:
        return sum(self.waits_s)


@contextmanager
def store_of(num_nodes: int, folder: Path) -> Iterator[Callable[[Case], tuple[Simulation, Measured]]]:
    """A network of nodes whose store has a dataset; what does cases there: foretold and measured."""
    dataset, log = folder / "dataset", folder / "store.log"
    write_dataset(dataset, num_samples=NUM_SAMPLES)
    numbers = count()
    with network(num_nodes, log=log) as found:
        url = upload(found, dataset, "tokens")

        def do(case: Case) -> tuple[Simulation, Measured]:
            opened = case.open(dataset)
            sizes = {info.name: info.size for info in opened.shard_infos}
            told = simulate(opened, case.cluster, global_batch=case.global_batch, epochs=case.epochs)
            return told, measure(found, case, url, sizes=sizes, folder=folder / f"case-{next(numbers)}", log=log)

        yield do


def write_dataset(folder: Path, *, num_samples: int) -> None:
    """Samples of 200 to 1400 tokens in shards of 1 MiB, with a lengths index."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(200, 1400, num_samples).tolist()
    tokens = rng.integers(0, 32000, 1400, np.int32)
    samples = ((tokens[:length], np.array([[0, length]], np.int32)) for length in lengths)
    write_samples(folder, samples, shard_bytes=SHARD_BYTES)


def upload(network: Network, folder: Path, name: str) -> str:
    """Put a dataset into the network's store, past all links; its URL."""
    url = f"s3://{S3_BUCKET}/{name}"
    process = PROCESSES.Process(target=_upload, args=(network.store, network.environment, folder, url))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    return url


def _upload(store: Node, environment: dict[str, str], folder: Path, url: str) -> None:
    store.enter()
    os.environ.update(environment)
    storage = open_storage(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.upload(path, str(path.relative_to(folder)))


def measure(network: Network, case: Case, url: str, *, sizes: Mapping[str, int], folder: Path, log: Path) -> Measured:
    """Have real loaders do a case.

    sizes: of shards by their names. folder: for caches and results, made. log: the store's.
    """
    folder.mkdir()
    nodes = network.nodes[: case.num_nodes]
    for node in nodes:
        network.set_rate(node, case.rate)
    network.set_store_rate(case.store_rate)
    start = log.stat().st_size
    before = [network.received_bytes(node) for node in nodes]
    ranks = [
        network.environment | {
            "RANK": str(rank), "WORLD_SIZE": str(case.num_nodes * case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks),
            "LOCAL_RANK": str(rank % case.ranks), "NAMESPACE": nodes[rank // case.ranks].name, "OMP_NUM_THREADS": "1",
            "NODE_ADDRESS": nodes[rank // case.ranks].address,
        }
        for rank in range(case.num_nodes * case.ranks)
    ]  # fmt: skip
    arguments = json.dumps(dataclasses.asdict(case)), url, str(folder)
    idle_before, all_before = _cpu_times()
    with serve_barrier(folder / BARRIER, len(ranks)), start_module("tests.cluster.reading", arguments, ranks) as job:
        done = job.complete(LIMIT_S)
    assert done.returncode == 0, done.stderr
    idle, everything = _cpu_times()
    told = json.loads((folder / RESULT).read_text())
    lines = _LINE.findall(log.read_text(errors="replace")[start:])
    return Measured(
        sizes=sizes,
        downloads=[Counter(name for address, name in lines if address == node.address) for node in nodes],
        received_bytes=[network.received_bytes(node) - had for node, had in zip(nodes, before, strict=True)],
        waits_s=told["waits_s"],
        total_s=told["total_s"],
        idle=(idle - idle_before) / (everything - all_before),
    )


def _cpu_times() -> tuple[int, int]:
    """Time of all CPUs since the machine was started, in ticks: idle, and all."""
    times = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return times[3] + times[4], sum(times)
