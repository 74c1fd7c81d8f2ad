"""Nodes of equally many ranks, and a worker among them, as MosaicML's orders count them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualWorld:
    """worker: the number of this process among all workers; a rank without workers is one."""

    num_nodes: int
    ranks_per_node: int
    workers_per_rank: int = 1
    worker: int = 0

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        return self.worker // self.workers_per_rank

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        return self.rank % self.ranks_per_node

    @property
    def worker_of_rank(self) -> int:
        return self.worker % self.workers_per_rank

    def replicate(self, replication: int) -> EqualWorld:
        """The world in which as many consecutive ranks are one; on one node where they do not fit its nodes."""
        num_ranks = self.num_ranks // replication
        num_nodes = 1 if num_ranks % self.ranks_per_node else num_ranks // self.ranks_per_node
        worker = self.rank // replication * self.workers_per_rank + self.worker_of_rank
        return replace(self, num_nodes=num_nodes, ranks_per_node=num_ranks // num_nodes, worker=worker)

    def with_workers(self, info: Any) -> EqualWorld:
        """The world as a worker of a DataLoader sees it. info: torch's get_worker_info(), None outside of workers."""
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return replace(self, workers_per_rank=count, worker=self.rank * count + number)
