"""Batches of this rank, step by step, with a cursor. dataset + processor + collate -> [loader] -> batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_all_start_methods, get_start_method
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from ..errors import ConfigError, LmmsStreamError, WorkerError
from ..mds.core import HasCore, PackedDataset, core_of
from ..plan.assign import check_global_batch, num_steps
from ..plan.cursor import Cursor
from ..plan.lane_cursor import LaneCursor
from ..plan.lanes import check_lanes
from ..plan.mixture import Mixture
from ..plan.weights import Weights
from ..processors.base import PackFiller
from ..signals import outlive_stop_signal
from ..storage.tally import FetchCounts
from ..types import Batch, World
from .batch_maker import Collator, LoaderSettings, Work
from .collate import collate
from .delivery import LaneDelivery, PlanDelivery
from .wire import WireBatch, from_wire
from .worker import PREFETCH_PACKS, Item, LaneWorker, Made, PackWorker, PlanWorker
from .worker_counts import FetchMeter
from .worker_end import end_with, is_of_worker_code
from .worker_start import Running, iterate_running

SOURCE = "data"  # the name of a single source in the cursor
MAX_ITEMS_AHEAD = 32
FETCH_ERROR_S = 10.0  # waited beyond fetch.timeout_s, so that the fetch's own error comes first: it says more
TOKENS_PER_FILL = 1 << 17  # tokens of packs whose rows are one piece of memory: one call fills many short packs


class PackedLoader:
    """This rank's batches, each a pack: steps of global_batch / (world_size / replication) batches.

    dataset: one, or several by name; then weights and max_epochs are Mixture's. Iterating gives what is left of the
    current epoch, or, with weights, goes on until every source has had its max_epochs. The samples in the global
    batch of a step do not depend on world size or workers. `len` is the number of batches left.

    A dataset with packing_mode "lanes" is packed without end: then `len` raises ConfigError, and world size times
    workers must divide the number of lanes.

    state_dict() counts only steps whose batches have all been delivered; it can be loaded at another world
    size, worker count or global_batch, and with other weights or more sources (in lanes: after merge_states).
    drop_last drops a short last step (num_dropped_packs counts its packs), which is padded with label-free packs
    otherwise. pin_memory: batches are page-locked where there is a GPU. start_method: how workers are started
    (default: the program's). timeout_s: a worker that gives nothing for as long is an error; where shards are copied
    to this node, no sooner than their own timeout_s (FetchConfig) and some seconds. persistent_workers: they are kept
    from one iteration to the next. Raises ConfigError when global_batch cannot be shared equally.
    """

    def __init__(
        self,
        dataset: PackedDataset | HasCore | Mapping[str, PackedDataset | HasCore],
        *,
        global_batch: int,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
        world: World | None = None,
        num_workers: int = 0,
        pad_to: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        start_method: Literal["fork", "spawn", "forkserver"] | None = None,
        timeout_s: float = 600.0,
        collator: Collator = collate,
    ):
        named = dataset if isinstance(dataset, Mapping) else {SOURCE: dataset}
        if not named:
            raise ConfigError("a PackedLoader needs at least one dataset")
        datasets = {name: core_of(each) for name, each in named.items()}
        for name, each in datasets.items():
            if each.processor is None:
                raise ConfigError(f"a PackedLoader needs a processor: give dataset {name!r} one")
        self.world = world or next(iter(datasets.values())).world
        check_global_batch(global_batch, self.world.num_groups)
        settings = LoaderSettings(
            global_batch=global_batch, world=self.world, pad_to=pad_to, drop_last=drop_last, collator=collator
        )
        self.settings = _with_items(settings, datasets)
        persistent = persistent_workers and num_workers > 0
        self._delivery: PlanDelivery | LaneDelivery
        if any(each.mode == "lanes" for each in datasets.values()):
            _check_lanes(datasets, weights, self.world, num_workers)
            self._worker: PackWorker = LaneWorker(
                datasets, self.settings, num_workers=num_workers, persistent=persistent
            )
            self._delivery = LaneDelivery(datasets[next(iter(datasets))], self.settings)
        else:
            planned = PlanWorker(
                datasets,
                self.settings,
                weights=weights,
                max_epochs=max_epochs,
                num_workers=num_workers,
                persistent=persistent,
            )
            self._worker, self._delivery = planned, PlanDelivery(planned.mixture, self.settings)
        self.sources = tuple(datasets)
        self.num_workers = num_workers
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.persistent_workers = persistent
        self.start_method = start_method
        copied = [each.fetch.timeout_s for each in datasets.values() if each.one.is_copied]
        self.timeout_s = max([timeout_s, *(fetch_s + FETCH_ERROR_S for fetch_s in copied)])
        self._batches: DataLoader[Item] | None = None
        of_worker = PREFETCH_PACKS + (self._items_ahead + 1) * self.settings.packs_per_item
        packs_ahead = of_worker * max(1, num_workers) * self.world.num_groups // self.world.num_group_nodes
        for name, each in datasets.items():
            each.check_cache_limit(samples_ahead=self._delivery.samples_ahead(name, packs_ahead))
        self._fetched = FetchMeter([each.one.cache.tally for each in datasets.values()], self._worker.counts)

    @property
    def packing_lengths(self) -> dict[str, int]:
        """Tokens that a pack of each source can hold."""
        return {name: each.needed_packing.packing_length for name, each in self._worker.datasets.items()}

    @property
    def fetched(self) -> FetchCounts:
        """What this rank's loader and its workers fetched so far: each worker as of the last item it made."""
        return self._fetched.total

    @property
    def epochs(self) -> dict[str, float]:
        """How many epochs of each source were delivered; empty in lanes, which have no end."""
        if isinstance(self._delivery, LaneDelivery):
            return {}
        plans = self._delivery.mixture.plans
        return {
            name: at.epoch + (at.packs / plans[name].num_packs(at.epoch) if at.packs else 0)
            for name, at in self.cursor.sources.items()
        }

    @property
    def global_batch(self) -> int:
        return self.settings.global_batch

    @property
    def micro_batches(self) -> int:
        """Batches of this rank in one step."""
        return self.settings.micro_batches

    @property
    def num_dropped_packs(self) -> int:
        """Packs of short last steps that drop_last dropped."""
        return self._delivery.num_dropped_packs

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last step that was delivered whole; ConfigError in lanes."""
        return self._planned.cursor

    @property
    def step(self) -> int:
        """Steps that were delivered whole, or passed over, since the beginning of the run."""
        return self._delivery.cursor.step

    @property
    def mixture(self) -> Mixture:
        """Which packs of which source make a step; ConfigError in lanes, where that is not known beforehand."""
        return self._planned.mixture

    @property
    def _planned(self) -> PlanDelivery:
        if isinstance(self._delivery, LaneDelivery):
            raise ConfigError("packs of lanes are not known beforehand: write a lengths index with lmms-stream index")
        return self._delivery

    @property
    def packs_left(self) -> int | None:
        """Packs left in the epoch; with weights, until all max_epochs, or None when there is no end (as in lanes)."""
        return self._delivery.packs_left

    @property
    def steps_left(self) -> int:
        """Steps left in the epoch (with weights: until all max_epochs); ConfigError when there is no end."""
        packs_left = self.packs_left
        if packs_left is None:
            raise ConfigError(
                "lanes, and sources with weights and without max_epochs, have no end: count steps instead (max_steps)"
            )
        return num_steps(global_batch=self.global_batch, num_packs=packs_left, drop_last=self.settings.drop_last)

    def steps_to_epoch(self, num_epochs: int) -> int:
        """Steps from the cursor to the end of `num_epochs` epochs; without weights, where each holds every source once.

        The epochs of a source that was added later are fewer: those of the first sources count.
        """
        plans, sources = self.mixture.plans, self.cursor.sources
        num_left = num_epochs - max(sources[name].epoch for name in plans)
        if num_left <= 0:
            return 0
        packs = [self.packs_left or 0]
        for later in range(1, num_left):
            packs.append(sum(plan.num_packs(sources[name].epoch + later) for name, plan in plans.items()))
        return sum(
            num_steps(global_batch=self.global_batch, num_packs=count, drop_last=self.settings.drop_last)
            for count in packs
        )

    def __len__(self) -> int:
        return self.steps_left * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        self._worker.start_at(self._delivery.begin())
        for item in self._until_a_worker_dies():
            for made in item:
                for batch in self._batches_of(made):
                    self._delivery.deliver(batch, made)  # a step counts once its last batch is handed out
                    yield batch.pin_memory() if self.pin_memory else batch
        self._delivery.end()

    def _batches_of(self, made: Made) -> Iterable[Batch]:
        if isinstance(made.batch, Work):
            return self._worker.batches.make(made.batch)
        return [from_wire(made.batch) if isinstance(made.batch, WireBatch) else made.batch]

    def _until_a_worker_dies(self) -> Iterator[list[Made]]:
        """What workers make, as it comes; a worker's error, its death and its silence are errors of ours."""
        if self.num_workers == 0:
            for made in self._worker:
                if isinstance(made, LmmsStreamError):
                    raise made
                yield made
            return
        waiting = self._start_workers()
        keep = False
        try:
            while (item := next(waiting, None)) is not None:
                if isinstance(item, LmmsStreamError):
                    raise item
                yield item
            keep = self.persistent_workers
        except GeneratorExit:
            keep = self.persistent_workers
            raise
        except (RuntimeError, ConnectionError, EOFError) as error:  # a worker has died, or gave nothing in time
            if is_of_worker_code(error):
                raise
            raise self.worker_error(error) from error
        finally:
            if not keep:
                self._batches = None
                self._end_workers()

    def worker_error(self, cause: BaseException) -> WorkerError:
        """What to raise where torch says that a worker is dead or silent."""
        return WorkerError(
            f"a loader worker died or gave nothing within {self.timeout_s:.0f} s ({cause}): "
            "look for an out-of-memory kill, or set num_workers to 0 to see what happens"
        )

    def _start_workers(self) -> Any:
        """An iterator over what they make; kept ones go on."""
        if self._batches is not None and self.persistent_workers:
            return iter(self._batches)
        self._batches, waiting = iterate_running(self._make_workers)
        self._end_workers = end_with(self, waiting)
        return waiting

    @property
    def _items_ahead(self) -> int:
        """Items that each worker has ready: a step's, which are taken at once, or MAX_ITEMS_AHEAD."""
        of_step = self.micro_batches // self.settings.packs_per_item
        return min(MAX_ITEMS_AHEAD, max(2, -(-of_step // max(1, self.num_workers))))

    def _make_workers(self) -> tuple[DataLoader[Item], Running | None]:
        # get_start_method() without allow_none would set the program's start method for good, and so would torch.
        start_method = self.start_method or get_start_method(allow_none=True) or get_all_start_methods()[0]
        running = Running(self.num_workers) if start_method == "fork" else None
        batches = DataLoader(
            self._worker,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            prefetch_factor=self._items_ahead,
            multiprocessing_context=start_method,
            persistent_workers=self.persistent_workers,
            timeout=self.timeout_s,
            worker_init_fn=running.begin if running is not None else outlive_stop_signal,
        )
        return batches, running

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was delivered whole: plain ints, strings and lists."""
        return self._delivery.cursor.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved cursor; CursorError when it belongs to another plan or lies beyond this one."""
        self._delivery.load(state)

    @property
    def state_is_per_rank(self) -> bool:
        """Whether ranks have states of their own, which merge_states makes one of: in lanes, but not with a plan."""
        return isinstance(self._delivery, LaneDelivery)

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state of the states of all ranks at one step, for any number of ranks."""
        first, *others = [LaneCursor.from_dict(state) for state in states]
        return first.merge(others).to_dict()

    def skip_steps(self, num_steps: int) -> None:
        """Pass over the next steps without reading them; ConfigError in lanes."""
        self._delivery.skip(num_steps)


def _with_items(settings: LoaderSettings, datasets: Mapping[str, PackedDataset]) -> LoaderSettings:
    """The settings with what workers hand over at once: whole steps where packs are only fetched, else single packs."""
    fast = settings.collator is collate and all(isinstance(each.processor, PackFiller) for each in datasets.values())
    if not fast or any(each.mode == "lanes" for each in datasets.values()):
        return settings
    longest = max(each.needed_packing.packing_length for each in datasets.values())
    return replace(settings, packs_per_item=settings.micro_batches, packs_per_fill=max(1, TOKENS_PER_FILL // longest))


def _as_it_is(made: Any) -> Any:
    return made


def _check_lanes(datasets: Mapping[str, PackedDataset], weights: object, world: World, num_workers: int) -> None:
    if len(datasets) > 1 or weights is not None:
        lacking = [name for name, each in datasets.items() if each.mode == "lanes"]
        raise ConfigError(
            f"a mixture needs lengths indexes, and {', '.join(map(repr, lacking))} has none: "
            "write it with lmms-stream index"
        )
    (dataset,) = datasets.values()
    check_lanes(int(dataset.lane_order.num_canonical_nodes or 1), world.num_groups, max(1, num_workers))
