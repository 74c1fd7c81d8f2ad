"""A run that is simulated, and done by real loaders. What both take of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.tools.simulate.cluster import Cluster

PACKING_LENGTH = 2048
NUM_SAMPLES = 16000  # of the dataset: 50 shards of 1 MiB
LATENCY_S = 0.01  # of the store: the time that its server takes for a request


@dataclass(frozen=True, kw_only=True)
class Case:
    """Epochs of a dataset on a cluster. shuffle_block_size: samples. cache, peers: as Cluster's.

    store_rate: of the link that all nodes share to the store, which the simulation does not know.
    """

    name: str
    num_nodes: int
    rate: str
    step_time_s: float
    epochs: int = 1
    cache: int | None = None
    num_canonical_nodes: int = 4
    shuffle_block_size: int = 600
    global_batch: int = 64
    ranks: int = 2
    num_workers: int = 2
    peers: bool = False
    store_rate: str = "10gbit"

    @property
    def order(self) -> OrderConfig:
        return OrderConfig(
            seed=5, num_canonical_nodes=self.num_canonical_nodes, shuffle_block_size=self.shuffle_block_size
        )

    @property
    def packing(self) -> PackingConfig:
        return PackingConfig(packing_length=PACKING_LENGTH)

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            num_nodes=self.num_nodes, gpus_per_node=self.ranks, num_workers=self.num_workers, bandwidth=self.rate,
            cache=self.cache, step_time_s=self.step_time_s, latency_s=LATENCY_S,
            peers=self.peers,
        )  # fmt: skip

    def open(self, folder: Path) -> PackedDataset:
        """The dataset as it is simulated, in a folder."""
        return PackedDataset([StreamConfig(remote=folder)], packing=self.packing, order=self.order)


CASES = (
    Case(name="2 nodes", num_nodes=2, rate="6mbit", step_time_s=0.1),
    Case(name="4 nodes, 2 epochs", num_nodes=4, rate="4mbit", step_time_s=0.1, epochs=2),
    Case(
        name="2 nodes, 2 epochs, 15 MiB of cache", num_nodes=2, rate="10mbit", step_time_s=0.1, epochs=2, cache=15 << 20
    ),
    Case(name="4 nodes, 2 epochs, 8 MiB of cache", num_nodes=4, rate="8mbit", step_time_s=0.1, epochs=2, cache=8 << 20),
)

PEERS = Case(
    name="4 nodes, one shuffle", num_nodes=4, rate="1gbit", store_rate="24mbit", step_time_s=0.1, num_canonical_nodes=1,
    ranks=1, num_workers=1, peers=True,
)  # fmt: skip
