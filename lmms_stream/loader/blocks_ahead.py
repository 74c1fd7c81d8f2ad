"""Which shards to fetch ahead: those of the shuffle blocks that the packs are in, and of the blocks that follow.

And which a limited cache can do without for longest: it is told what blocks the packs are in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..mds.core import PackedDataset
from ..mds.shard_list import UNKNOWN, ShardNumbers
from ..plan.assign import home_nodes
from ..plan.next_use import NEVER, NextUse, Places, place, served_nodes
from ..plan.source_ranges import SourceBlock
from ..storage.locks import file_of
from ..types import World


class BlocksAhead:
    """Follows packs through shuffle blocks, for the canonical nodes served by this machine.

    The packs of a block read all shards of the block soon after the first pack. Then the shards of the next block are
    requested, and arrive while the block is read; not with a cache_limit. The second block waits for all shards of the
    first block: no pack can be read before, and downloads share a link. Later most shards of a block have arrived when
    the block begins, and a thread waiting for the rest would be idle.

    margin_steps, epochs: see CacheOutlook; epochs of each source.
    """

    def __init__(
        self,
        datasets: Mapping[str, PackedDataset],
        world: World,
        *,
        margin_steps: int,
        epochs: Mapping[str, int],
    ):
        self._datasets = datasets
        self._world = world
        self._outlooks: dict[str, CacheOutlook] = {}
        for source, dataset in datasets.items():
            quota = dataset.one.cache.quota
            if quota is not None:
                outlook = CacheOutlook(
                    dataset, self._needed(source), margin_steps=margin_steps, epoch=epochs.get(source, 0)
                )
                quota.outlook = self._outlooks[source] = outlook
        self._at: dict[tuple[str, int], tuple[int, int]] = {}  # source and canonical node -> epoch and block

    def look(self, blocks: Sequence[SourceBlock], *, step: int) -> None:
        """Tell limited caches that a step is planned, whose packs are the first of these blocks, before it is fetched.

        step: counted from where planning began.
        """
        for outlook in self._outlooks.values():
            outlook.advance(step)
        for source, epoch, node, block in blocks:
            if source in self._outlooks:
                self._outlooks[source].enter(epoch, node, block)

    def enter(self, blocks: Sequence[SourceBlock]) -> None:
        """Packs of these blocks are about to be read."""
        entered: list[SourceBlock] = []
        firsts: set[SourceBlock] = set()
        for source, epoch, node, block in blocks:
            before = self._at.get((source, node))
            if not self._serves(source, node) or (before is not None and before >= (epoch, block)):
                continue
            self._at[source, node] = epoch, block
            entered.append(SourceBlock(source, epoch, node, block))
            if before is None:
                firsts.add(entered[-1])
            else:
                passed = self._shards(SourceBlock(source, before[0], node, before[1]))
                self._datasets[source].pack_reader.pass_over(np.setdiff1d(passed, self._shards(entered[-1])))
        for each in entered:
            self._datasets[each.source].pack_reader.prefetch(self._shards(each))
        for each in entered:
            if self._datasets[each.source].fetch.cache_limit is None:  # the least cache_limit has room for two blocks
                following = self._shards(each._replace(block=each.block + 1))
                self._datasets[each.source].pack_reader.prefetch(following, later=each in firsts)

    def _shards(self, block: SourceBlock) -> NDArray[np.int64]:
        return self._datasets[block.source].plan.shards_of_block(block.epoch, block.node, block.block)

    def _serves(self, source: str, node: int) -> bool:
        """Whether packs of a canonical node are read here, if a step has room."""
        world, num_canonical_nodes = self._world, self._datasets[source].plan.num_canonical_nodes
        home = home_nodes(np.array(node), nodes=world.group_nodes, num_canonical_nodes=num_canonical_nodes)
        return bool(home == world.group_node)

    def _needed(self, source: str) -> NDArray[np.bool_]:
        """The canonical nodes that packs are read of here, bool[num_canonical_nodes]; see served_nodes."""
        world = self._world
        return served_nodes(
            world.group_node,
            nodes=world.group_nodes,
            num_canonical_nodes=self._datasets[source].plan.num_canonical_nodes,
        )


# When the shards of a source are needed next on this machine, for its limited cache. blocks entered -> next uses.
#
# Every loader worker of a machine follows the same packs, so each tells it for itself, from the blocks that it is at.


class CacheOutlook:
    """See storage/record.py. One thread enters blocks while others ask.

    serves: see NextUse. margin_steps: how far this worker plans ahead of the slowest of the machine: a block that was
    left counts as in use for as many steps. epoch: in which it begins.
    """

    def __init__(self, dataset: PackedDataset, serves: NDArray[np.bool_], *, margin_steps: int, epoch: int):
        shards = dataset.one.shards
        self._next_use = NextUse(dataset.plan, serves=serves, sizes=shards.sizes, limit_bytes=dataset.fetch.limit_bytes)
        self._numbers = ShardNumbers(shards)
        self._folder = dataset.one.cache.folder
        self._margin = margin_steps
        self._step = 0
        self._places = Places(len(serves), epoch=epoch)
        self._times: tuple[int, NDArray[np.float32]] = -1, np.empty(0, np.float32)
        self.version = 0
        self.since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def enter(self, epoch: int, node: int, block: int) -> None:
        """A canonical node has come to a block; called in the step that advance was told."""
        self._places.enter(node, place(epoch, block), until=self._step + self._margin)
        self.version += 1

    def advance(self, step: int) -> None:
        """The worker plans this step now."""
        self._step = step
        if self._places.pass_to(step):
            self.since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self.version += 1

    def next_uses(self, folder: Path, names: list[str]) -> list[float]:
        prefix = os.path.relpath(folder, self._folder)
        below = "" if prefix == "." else f"{prefix}/"
        numbers = self._numbers.of([below + str(file_of(Path(name))) for name in names])
        times = self._known_times()
        found: list[float] = np.where(numbers == UNKNOWN, np.float32(NEVER), times[numbers]).tolist()
        return found

    def _known_times(self) -> NDArray[np.float32]:
        version, times = self._times
        if version != self.version:
            version = self.version
            times = self._next_use.times(self._places.held, self._places.now)
            self._times = version, times
        return times
