"""When the shards of a source are needed next on this machine, for its limited cache. blocks entered -> next uses.

Every loader worker of a machine follows the same packs, so each tells it for itself, from the blocks that it is at.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..mds.core import PackedDataset
from ..mds.shard_numbers import UNKNOWN, ShardNumbers
from ..plan.next_use import NEVER, NextUse, Places, place
from ..storage.locks import file_of


class CacheOutlook:
    """See storage/outlook.py. One thread enters blocks while others ask.

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
