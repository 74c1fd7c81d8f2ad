"""Shards to fetch ahead: the shards of the packs' shuffle blocks, and of the next blocks.

Also the next uses of shards, for a limited cache, from the entered blocks.
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
from ..plan.pack_plan import PackPlan
from ..plan.source_ranges import SourceBlock
from ..storage.locks import file_of
from ..types import World


class BlocksAhead:
    """Follows packs through shuffle blocks, for the canonical nodes served by this machine.

    The packs of a block read all shards of the block soon after the first pack. When a block is entered, its shards are
    requested, and then the shards of the next block, which arrive while the block is read; not with a cache_limit.
    Shards of a node's second block wait for all shards of first blocks: no pack can be read before, and downloads share
    a link. Later blocks need no such order: most of their shards have arrived when they begin, and a thread waiting for
    the rest would be idle. Requests for shards of a finished block are forgotten.

    margin_steps: see CacheOutlook. epochs: current epoch of each source. mixes_blocks: the packs of several blocks are
    read together, so that requests for a block stay when the next one is entered.
    """

    def __init__(
        self,
        datasets: Mapping[str, PackedDataset],
        plans: Mapping[str, PackPlan],
        world: World,
        *,
        margin_steps: int,
        epochs: Mapping[str, int],
        mixes_blocks: bool = False,
    ):
        self._datasets, self._plans, self._mixes_blocks = datasets, plans, mixes_blocks
        self._world = world
        self._outlooks: dict[str, CacheOutlook] = {}
        for source, dataset in datasets.items():
            quota = next((each.cache.quota for each in dataset.stored if each.cache.quota is not None), None)
            if quota is not None:
                needed, epoch = self._needed(source), epochs.get(source, 0)
                outlook = CacheOutlook(dataset, plans[source], needed, margin_steps=margin_steps, epoch=epoch)
                quota.outlook = self._outlooks[source] = outlook
        self._at: dict[tuple[str, int], tuple[int, int]] = {}  # source and canonical node -> epoch and block

    def look(self, blocks: Sequence[SourceBlock], *, step: int) -> None:
        """Tell limited caches of a planned step, before its shards are fetched. blocks: entered by the step's packs.

        step: counted from the start of planning.
        """
        for outlook in self._outlooks.values():
            outlook.advance(step)
        for source, epoch, node, block in blocks:
            if source in self._outlooks:
                self._outlooks[source].enter(epoch, node, block)

    def enter(self, blocks: Sequence[SourceBlock]) -> None:
        """Request the shards of blocks whose packs are read next."""
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
            elif not self._mixes_blocks:
                passed = self._shards(SourceBlock(source, before[0], node, before[1]))
                self._datasets[source].pack_reader.pass_over(np.setdiff1d(passed, self._shards(entered[-1])))
        for each in entered:
            self._datasets[each.source].pack_reader.prefetch(self._shards(each))
        for each in entered:
            if self._datasets[each.source].fetch.cache_limit is None:  # the minimum cache_limit has room for two blocks
                following = self._shards(each._replace(block=each.block + 1))
                self._datasets[each.source].pack_reader.prefetch(following, later=each in firsts)

    def _shards(self, block: SourceBlock) -> NDArray[np.int64]:
        return self._plans[block.source].shards_of_block(block.epoch, block.node, block.block)

    def _serves(self, source: str, node: int) -> bool:
        """Return whether packs of a canonical node are read here, if a step has room."""
        world, num_canonical_nodes = self._world, self._plans[source].num_canonical_nodes
        home = home_nodes(np.array(node), nodes=world.group_nodes, num_canonical_nodes=num_canonical_nodes)
        return bool(home == world.group_node)

    def _needed(self, source: str) -> NDArray[np.bool_]:
        """Return the canonical nodes with packs read here, bool[num_canonical_nodes]; see served_nodes."""
        world = self._world
        return served_nodes(
            world.group_node,
            nodes=world.group_nodes,
            num_canonical_nodes=self._plans[source].num_canonical_nodes,
        )


# Next uses of a source's shards on this machine, for its limited cache. entered blocks -> next uses.
#
# Every loader worker of a machine follows the same packs, and computes next uses from its own current blocks.


class CacheOutlook:
    """Outlook of a limited cache, see storage/record.py. One thread enters blocks while others ask.

    serves: see NextUse. margin_steps: steps that this worker plans ahead of the machine's slowest worker: a finished
    block counts as in use for this number of steps. epoch: first epoch.
    """

    def __init__(
        self, dataset: PackedDataset, plan: PackPlan, serves: NDArray[np.bool_], *, margin_steps: int, epoch: int
    ):
        sizes = np.concatenate([each.shards.sizes * each.is_copied for each in dataset.stored])
        self._next_use = NextUse(plan, serves=serves, sizes=sizes, limit_bytes=dataset.fetch.limit_bytes)
        # By folder of shards: folder, shards and first shard of the stream.
        self._streams: dict[Path, tuple[Path, ShardNumbers, int]] = {}
        first = 0
        for stored in dataset.stored:
            stream = stored.cache.folder, ShardNumbers(stored.shards), first
            self._streams |= dict.fromkeys(stored.shard_folders, stream)
            first += len(stored.shards)
        self._margin = margin_steps
        self._step = 0
        self._places = Places(len(serves), epoch=epoch)
        self._times: tuple[int, NDArray[np.float32]] = -1, np.empty(0, np.float32)
        self.version = 0
        self.since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def enter(self, epoch: int, node: int, block: int) -> None:
        """Move a canonical node to a block, in the step of the last call of advance."""
        self._places.enter(node, place(epoch, block), until=self._step + self._margin)
        self.version += 1

    def advance(self, step: int) -> None:
        """Set the step that the worker plans now."""
        self._step = step
        if self._places.pass_to(step):
            self.since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self.version += 1

    def next_uses(self, folder: Path, names: list[str]) -> list[float]:
        of_stream, shards, first = self._streams[folder]
        prefix = os.path.relpath(folder, of_stream)
        below = "" if prefix == "." else f"{prefix}/"
        numbers = shards.of([below + str(file_of(Path(name))) for name in names])
        times = self._known_times()
        found: list[float] = np.where(numbers == UNKNOWN, np.float32(NEVER), times[first + numbers]).tolist()
        return found

    def _known_times(self) -> NDArray[np.float32]:
        version, times = self._times
        if version != self.version:
            version = self.version
            times = self._next_use.times(self._places.held, self._places.now)
            self._times = version, times
        return times
