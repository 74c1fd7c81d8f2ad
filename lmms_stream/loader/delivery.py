"""Position of a loader: the cursor after the last completely delivered step, with a plan and in lanes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from ..errors import ConfigError, CursorError, LmmsStreamError, WorkerError
from ..mds.core import PackedDataset
from ..plan.cursor import Cursor
from ..plan.lane_cursor import LaneAfter, LaneCursor
from ..plan.pack_plan import PackPlan, plan_fingerprint
from ..plan.planner import After, StepConfig
from ..plan.windows import WindowedMixture
from ..processors.base import processor_fingerprint
from ..storage.retry import start_thread
from ..types import World
from .agreement import gather_over_ranks
from .batch_maker import processor_that_packs

LANES_VERSION = "lanes2"  # changes when the same inputs give other packs
LANES_WINDOW_VERSION = "lanes4"  # the same for window_N


class PlanDelivery:
    """Cursor of a loader over a mixture of plans."""

    def __init__(self, mixture: WindowedMixture, config: StepConfig):
        self.mixture = mixture
        self.config = config
        self.cursor = mixture.start()
        self._counted: set[tuple[str, int]] = set()  # sources and epochs, counted by a thread ahead of the workers

    @property
    def packs_left(self) -> int | None:
        return self.mixture.packs_left(self.cursor, global_batch=self.config.global_batch)

    @property
    def epochs(self) -> dict[str, float]:
        """Epochs of the mixed sources; the cursor also keeps removed sources."""
        found = {name: self.cursor.sources[name] for name in self.mixture.plans}
        return {
            name: at.epoch + (at.packs / self.mixture.plan_of(name, at).num_packs(at.epoch) if at.packs else 0)
            for name, at in found.items()
        }

    @property
    def deal_settings(self) -> dict[str, Any]:
        """See PackedLoader."""
        mixture = self.mixture
        return {
            "plans": {name: plan.fingerprint for name, plan in mixture.plans.items()},
            "weights": mixture.listed_weights,
            "max_epochs": dict(mixture.max_epochs),
            "balance": mixture.balance,
            "later_lengths": {name: plan.packing.later_lengths for name, plan in mixture.plans.items()},
            "cursor": self.cursor.to_dict(),
        }

    def packs_of_epochs(self, num_epochs: int) -> list[int]:
        """Return the packs of each epoch from the cursor to the end of `num_epochs` epochs, without weights."""
        return self.mixture.packs_of_epochs(self.cursor, num_epochs, global_batch=self.config.global_batch)

    def samples_ahead(self, name: str, num_packs: int) -> int:
        """Return the samples that the workers of a node read ahead. num_packs: packs that they read ahead."""
        epoch = self.cursor.sources[name].epoch
        return self.mixture.samples_ahead(name, num_packs, epoch=epoch, global_batch=self.config.global_batch)

    def begin(self) -> dict[str, Any]:
        """Return settings for workers, after counting the packs of their first epoch."""
        for name, epoch in self.mixture.epochs_at(self.cursor):
            self.mixture.plan_of(name, self.cursor.sources[name]).num_packs(epoch)
        return self.cursor.to_dict()

    def deliver(self, after: After) -> None:
        """Take the position sent by a worker with the last batch of a step, when the batch is handed out or dropped."""
        assert isinstance(after, Cursor)
        self.cursor = after
        for name, epoch in self.mixture.epochs_ahead(self.cursor):
            if (name, epoch) not in self._counted:
                self._counted.add((name, epoch))
                plan = self.mixture.plan_of(name, self.cursor.sources[name])
                start_thread(partial(_count, plan, epoch), name="lmms-count")  # of the next epochs of workers

    def end(self) -> None:
        """Accept the end of the workers, at the end of the packs."""

    def load(self, state: Mapping[str, Any]) -> None:
        try:
            self.cursor = self.mixture.adopt(Cursor.from_dict(state))
        except LmmsStreamError:
            self.mixture.adopt(self.cursor)  # a refused state leaves nothing of its seeds and shares
            raise

    def skip(self, num_steps: int) -> None:
        self.cursor = self.mixture.skip(self.cursor, num_steps, global_batch=self.config.global_batch)


def _count(plan: PackPlan, epoch: int) -> None:
    with suppress(LmmsStreamError):  # raised by the worker that needs the counts
        plan.count(epoch)


class LaneDelivery:
    """Cursor of a loader over the lanes of a dataset: the states of this rank's lanes."""

    packs_left = None
    epochs: Mapping[str, float] = {}

    def __init__(self, dataset: PackedDataset, config: StepConfig):
        self.config = config
        self._plan = plan_fingerprint(
            LANES_WINDOW_VERSION if dataset.needed_packing.is_window_n else LANES_VERSION,
            processor_fingerprint(processor_that_packs(dataset)),
            dataset.samples_per_shard,
            order=dataset.lane_order,
            packing=dataset.needed_packing,
        )
        num_lanes = int(dataset.lane_order.num_canonical_nodes or 1)
        self._samples_ahead = 2 * dataset.needed_packing.window * num_lanes
        self.cursor = LaneCursor(plan=self._plan, num_lanes=num_lanes)
        self._of_step: list[LaneAfter] = []  # of the partly delivered step

    @property
    def deal_settings(self) -> dict[str, Any]:
        """See PackedLoader; ranks have their own cursors."""
        return {"lanes": self._plan, "num_lanes": self.cursor.num_lanes, "step": self.cursor.step}

    def samples_ahead(self, name: str, num_packs: int) -> int:
        """Return the samples read ahead: each lane reads a window, and keeps the samples in its bins."""
        return self._samples_ahead

    def begin(self) -> dict[str, Any]:
        self._of_step = []
        return self.cursor.to_dict()

    def deliver(self, after: After) -> None:
        """Note that a pack of a lane is handed out."""
        assert isinstance(after, LaneAfter)
        self._of_step.append(after)
        if len(self._of_step) == self.config.micro_batches:
            self.cursor = self.cursor.after_step(self._of_step, num_packs=self.config.global_batch)
            self._of_step = []

    def end(self) -> None:
        raise WorkerError("lanes have no end, and the workers ended: this is a defect of the loader; please report it")

    def load(self, state: Mapping[str, Any]) -> None:
        cursor = LaneCursor.from_dict(state)
        cursor.check(self._plan, self.cursor.num_lanes)
        self.cursor = cursor

    def skip(self, num_steps: int) -> None:
        raise ConfigError("skip_steps needs a lengths index: write it with lmms-stream index")


# The state of a loader for any number of ranks.


class SavesState(Protocol):
    """A loader whose state continues on any number of ranks, see PackedLoader."""

    world: World

    @property
    def state_is_per_rank(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]: ...


def joined_state(loader: SavesState, gather: Callable[[Any], Sequence[Any]]) -> dict[str, Any]:
    """Return a loader's state for any number of ranks; in lanes all ranks call this together.

    gather: returns the values of all ranks, in order.
    """
    state = loader.state_dict()
    return loader.merge_states(gather(state)[:: loader.world.replication]) if loader.state_is_per_rank else state


def refuse_lanes(loader: SavesState) -> None:
    """Raise ConfigError for a loader whose state differs from rank to rank."""
    if loader.state_is_per_rank:
        raise ConfigError("packs of lanes have a state on each rank: write a lengths index with lmms-stream index")


class LoaderState:
    """A Stateful of torch.distributed.checkpoint with the state of a loader, see PackedLoader.stateful."""

    def __init__(self, loader: SavesState):
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return {"cursor": JSON}; in lanes all ranks call this together."""
        return {"cursor": json.dumps(joined_state(self._loader, partial(gather_over_ranks, world=self._loader.world)))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; CursorError for a cursor of another plan, and for a damaged state."""
        try:
            cursor = json.loads(state["cursor"])
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(f"the saved state is damaged ({error!r}): use another checkpoint") from error
        self._loader.load_state_dict(cursor)
