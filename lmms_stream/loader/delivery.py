"""Where a loader stands: what its cursor becomes when a batch is delivered, with a plan and in lanes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import ConfigError, LmmsStreamError, WorkerError
from ..mds.core import PackedDataset
from ..plan.cursor import Cursor
from ..plan.lane_cursor import LaneCursor
from ..plan.lanes import LaneState
from ..plan.mixture import Mixture
from ..plan.pack_plan import plan_fingerprint
from ..processors.base import processor_fingerprint
from ..storage.threads import start_thread
from ..types import Batch
from .batch_maker import LoaderSettings, processor_of
from .worker import Made

LANES_VERSION = "lanes2"  # changes when the same inputs give other packs


class PlanDelivery:
    """The cursor of a loader over a mixture of plans."""

    def __init__(self, mixture: Mixture, settings: LoaderSettings):
        self.mixture = mixture
        self.settings = settings
        self.cursor = mixture.start()
        self.num_dropped_packs = 0
        self._counted: set[tuple[str, int]] = set()  # sources and epochs, by a thread ahead of the workers

    @property
    def packs_left(self) -> int | None:
        return self.mixture.packs_left(self.cursor)

    def samples_ahead(self, name: str, num_packs: int) -> int:
        """Samples that the workers of a node look ahead, by how many packs they do."""
        plan = self.mixture.plans[name]
        return num_packs * plan.num_samples // plan.num_packs(self.cursor.sources[name].epoch)

    def begin(self) -> dict[str, Any]:
        """What workers are told; the packs of the epoch that they begin with are counted."""
        for name, epoch in self.mixture.epochs_at(self.cursor):
            self.mixture.plans[name].num_packs(epoch)
        return self.cursor.to_dict()

    def deliver(self, batch: Batch, made: Made) -> None:
        if batch.micro_batch == self.settings.micro_batches - 1:
            self.cursor = self.mixture.step(self.cursor, global_batch=self.settings.global_batch).after
            self._count_ahead()

    def _count_ahead(self) -> None:
        """Have epochs that workers come to by themselves, and will soon, counted by a thread."""
        for name, epoch in self.mixture.epochs_ahead(self.cursor):
            if (name, epoch) not in self._counted:
                self._counted.add((name, epoch))
                start_thread(partial(_count, self.mixture, name, epoch), name="lmms-count")

    def end(self) -> None:
        """Pass over a short last step that was dropped."""
        if not self.settings.drop_last:
            return
        step = self.mixture.step(self.cursor, global_batch=self.settings.global_batch)
        if step.ends_epoch and 0 < step.num_packs < self.settings.global_batch:
            self.num_dropped_packs += step.num_packs
            self.cursor = step.after

    def load(self, state: Mapping[str, Any]) -> None:
        self.cursor = self.mixture.adopt(Cursor.from_dict(state))

    def skip(self, num_steps: int) -> None:
        self.cursor = self.mixture.skip(self.cursor, num_steps, global_batch=self.settings.global_batch)


def _count(mixture: Mixture, name: str, epoch: int) -> None:
    with suppress(LmmsStreamError):  # it is raised by the worker that needs the counts
        mixture.plans[name].count(epoch)


class LaneDelivery:
    """The cursor of a loader over the lanes of a dataset: the states of those that this rank reads."""

    packs_left = None
    num_dropped_packs = 0

    def __init__(self, dataset: PackedDataset, settings: LoaderSettings):
        self.settings = settings
        self._plan = plan_fingerprint(
            LANES_VERSION,
            processor_fingerprint(processor_of(dataset)),
            dataset.samples_per_shard,
            order=dataset.lane_order,
            packing=dataset.needed_packing,
        )
        num_lanes = int(dataset.lane_order.num_canonical_nodes or 1)
        self._samples_ahead = 2 * dataset.needed_packing.window * num_lanes
        self.cursor = LaneCursor(plan=self._plan, num_lanes=num_lanes)
        self._pending: dict[int, LaneState] = {}

    def samples_ahead(self, name: str, num_packs: int) -> int:
        """Lanes read ahead a window each, and keep what waits in their bins."""
        return self._samples_ahead

    def begin(self) -> dict[str, Any]:
        self._pending = {}
        return self.cursor.to_dict()

    def deliver(self, batch: Batch, made: Made) -> None:
        assert made.state is not None
        self._pending[made.lane] = made.state
        if batch.micro_batch == self.settings.micro_batches - 1:
            self.cursor = LaneCursor(
                plan=self._plan,
                num_lanes=self.cursor.num_lanes,
                step=self.cursor.step + 1,
                packs=self.cursor.packs + self.settings.global_batch,
                states={**self.cursor.states, **self._pending},
            )
            self._pending = {}

    def end(self) -> None:
        raise WorkerError("lanes have no end, and the workers ended: this is a defect of the loader; please report it")

    def load(self, state: Mapping[str, Any]) -> None:
        cursor = LaneCursor.from_dict(state)
        cursor.check(self._plan)
        self.cursor = cursor

    def skip(self, num_steps: int) -> None:
        raise ConfigError("skip_steps needs a lengths index: write it with lmms-stream index")
