"""What a reader does in lanes. order + measure + cursor -> [lane planner] -> (work, lane after it); arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from ..types import Segments
from .lane_cursor import LaneAfter, LaneCursor
from .lanes import Lane
from .measured_block import Measure
from .order import OrderConfig, shards_of
from .packing import PackingConfig
from .planner import Planned, StepConfig, Work


class LanePlanner:
    """The works of worker `worker` of num_workers in the group that config.world names: each is one pack, without end.

    The worker owns whole lanes (see check_lanes). order: its canonical nodes are the lanes.
    """

    def __init__(
        self,
        samples_per_shard: Sequence[int] | NDArray[np.int64],
        config: StepConfig,
        *,
        source: str,
        order: OrderConfig,
        packing: PackingConfig,
        measure: Measure,
        worker: int = 0,
        num_workers: int = 1,
    ):
        self._samples_per_shard = np.asarray(samples_per_shard, np.int64)
        self._first_ids = np.cumsum(self._samples_per_shard) - self._samples_per_shard
        self._config = config
        self._source = source
        self._order = order
        self._packing = packing
        self._measure = measure
        self._worker = worker
        self._num_workers = num_workers

    def plan(self, cursor: LaneCursor) -> Iterator[Planned]:
        """What there is to do from a cursor on, pack by pack."""
        world, num_lanes = self._config.world, int(self._order.num_canonical_nodes or 1)
        lanes: dict[int, Lane] = {}
        begin = cursor.packs + (world.group - cursor.packs) % world.num_groups
        for batch_number in count(self._worker, self._num_workers):
            number = (begin + batch_number * world.num_groups) % num_lanes
            if number not in lanes:
                lanes[number] = Lane(
                    self._samples_per_shard,
                    order=self._order,
                    packing=self._packing,
                    lane=number,
                    measure=self._measure,
                    state=cursor.states.get(number),
                )
            epoch, pack = lanes[number].state.epoch, lanes[number].next_pack()
            shard_ids = shards_of(pack.sample_ids, self._first_ids)
            indices = pack.sample_ids - self._first_ids[shard_ids]
            segments = Segments(pack.sample_ids, pack.starts, pack.lengths, shard_ids, indices, pack.expected)
            step, micro_batch = divmod(batch_number, self._config.micro_batches)
            bounds = np.array([0, len(pack.sample_ids)])
            patches = [int(pack.patches.sum())] if pack.patches.any() else ()
            work = Work(self._source, step, [micro_batch], bounds, segments, patches, [epoch])
            yield Planned(work, LaneAfter(number, lanes[number].state))
