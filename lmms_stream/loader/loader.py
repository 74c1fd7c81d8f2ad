"""Batches of this rank, step by step, with a cursor. dataset + processor + collate -> [loader] -> batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..checks import check_arguments, whole_number
from ..errors import ConfigError, WorkerError
from ..mds.core import HasCore, PackedDataset, core_of
from ..mds.mixed import Mixing, check_mixing, check_order, described_streams, mixed, order_of_streams, warn_of_shared
from ..mds.provenance import SourceRow
from ..plan.assign import check_global_batch, num_steps
from ..plan.cursor import SOURCE, Cursor
from ..plan.lane_cursor import LaneCursor
from ..plan.lanes import check_lanes
from ..plan.left_out import LeftOut
from ..plan.planner import StepConfig, Work, in_whole_steps, items_ahead, packs_ahead
from ..plan.source_ranges import Weights
from ..plan.windows import DEAL, WindowedMixture
from ..processors.base import PackFiller, processor_fingerprint
from ..storage.fetch_config import FetchCounts
from ..types import Batch, World
from .agreement import Agreement, sum_over_ranks
from .bad_samples import BadSamples, check_padded
from .batch_maker import Collator, LoaderSettings, Ready, processor_that_packs
from .collate import collate
from .counts import FetchMeter, LoaderCounts
from .delivery import LaneDelivery, LoaderState, PlanDelivery, refuse_lanes
from .drop_list import Drop, dropped, located
from .wire import WireBatch, from_wire
from .worker import LaneWorker, PackWorker, PlanWorker
from .workers import StartMethod, Workers

FETCH_ERROR_S = 10.0  # wait beyond fetch.timeout_s: the more precise error of the fetch comes first


class GlobalStep(NamedTuple):
    """Batches of this rank in a step. num_loss_tokens: labels other than -100 in the step's batches of all ranks."""

    batches: Sequence[Batch]
    num_loss_tokens: int


class PackedLoader:
    """This rank's batches, each a pack: steps of global_batch / (world_size / replication) batches.

    dataset: a single dataset, or several by name with weights and max_epochs of a Mixture. mixing: "packs", or
    "samples" for packs that hold samples of several datasets, see mixed. balance: "deal", or "window" for steps of
    packs with similar work, or "across_sources", see WindowedMixture. An iteration yields the rest of the current
    epoch, or, with weights, runs until every source has reached max_epochs. The samples in the global batch of a step
    do not depend on world size or workers. `len` is the number of batches left.

    A dataset with packing_mode "lanes" is packed without end: then `len` raises ConfigError, and world size times
    workers must divide the number of lanes.

    state_dict() counts only completely delivered steps. The state can be loaded at another world size, worker count or
    global_batch, and with other weights or more sources (in lanes: after merge_states). drop_last: drop a short last
    step (num_dropped_packs counts the packs) instead of padding the step with label-free packs. pin_memory: page-lock
    batches if a GPU is available. start_method: how workers are started (default: the program's); "server" forks
    workers from a process with the needed imports, or from this process if workers refer to the main module or cannot
    be pickled. timeout_s: limit for a silent worker; for shards copied to this node at least timeout_s of FetchConfig
    plus some seconds. persistent_workers: keep workers between iterations; they serve only the latest. bad: treatment
    of samples that cannot be processed. drop: a file of samples to leave out, or several files with the first step of
    each. Raises ConfigError when global_batch cannot be shared equally.
    """

    def __init__(
        self,
        dataset: PackedDataset | HasCore | Mapping[str, PackedDataset | HasCore],
        *,
        global_batch: int,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
        balance: str | int = "deal",
        mixing: Mixing = "packs",
        world: World | None = None,
        num_workers: int = 0,
        pad_to: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        start_method: StartMethod | None = None,
        timeout_s: float = 600.0,
        collator: Collator = collate,
        bad: BadSamples | None = None,
        drop: Drop | None = None,
    ):
        check_arguments(PackedLoader.__init__, locals())
        named = dataset if isinstance(dataset, Mapping) else {SOURCE: dataset}
        if not named:
            raise ConfigError("a PackedLoader needs at least one dataset")
        datasets = {name: core_of(each) for name, each in named.items()}
        self.world = world or next(iter(datasets.values())).world
        warn_of_shared(datasets, rank=self.world.rank)
        if mixing == "samples":
            check_mixing(weights, max_epochs)
            datasets, weights = {SOURCE: mixed(datasets, weights=weights)}, None  # type: ignore[arg-type]  # checked
        for name, each in datasets.items():
            if each.processor is None:
                raise ConfigError(f"a PackedLoader needs a processor: give dataset {name!r} one")
        global_batch = whole_number("global_batch", global_batch, least=1)
        num_workers = whole_number("num_workers", num_workers, least=0)
        pad_to = None if pad_to is None else whole_number("pad_to", pad_to, least=1)
        check_global_batch(global_batch, self.world.num_groups)
        steps = _with_items(
            StepConfig(global_batch=global_batch, world=self.world, drop_last=drop_last), datasets, collator
        )
        bad = bad or BadSamples()
        if bad.on_bad_sample == "quarantine" or drop is not None:
            check_padded(datasets, collator)
        self.settings = LoaderSettings(steps=steps, pad_to=pad_to, collator=collator, bad=bad)
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers and num_workers > 0
        self._worker, self._delivery = self._open(datasets, weights=weights, max_epochs=max_epochs, balance=balance)
        self.agreement = Agreement()
        self.num_dropped_packs = 0  # of short last steps that drop_last dropped
        self.sources = tuple(datasets)
        self.pin_memory = pin_memory and torch.cuda.is_available()
        stored = [stored for each in datasets.values() for stored in each.stored]
        copied = [each.cache.retry.timeout_s for each in stored if each.is_copied]
        self._workers = Workers(
            self._worker,
            num_workers=num_workers,
            items_ahead=self._items_ahead,
            persistent=self.persistent_workers,
            start_method=start_method,
            timeout_s=max([timeout_s, *(fetch_s + FETCH_ERROR_S for fetch_s in copied)]),
        )
        num_packs = packs_ahead(steps, num_workers=num_workers, num_items=self._items_ahead)
        for name, each in datasets.items():
            each.check_cache_limit(samples_ahead=self._delivery.samples_ahead(name, num_packs))
        self._dropped = dropped(drop, datasets)
        self.leave_out(LeftOut())
        self._fetched = FetchMeter(self._worker.tallies, self._worker.counts)

    def _open(
        self,
        datasets: Mapping[str, PackedDataset],
        *,
        weights: Weights | Mapping[int, Weights] | None,
        max_epochs: Mapping[str, int] | None,
        balance: str | int,
    ) -> tuple[PackWorker, PlanDelivery | LaneDelivery]:
        """Return the part for workers, and the part for the position of this loader."""
        settings, num_workers, persistent = self.settings, self.num_workers, self.persistent_workers
        if any(each.mode == "lanes" for each in datasets.values()):
            _check_lanes(datasets, weights, balance, self.world, num_workers)
            lanes = LaneWorker(datasets, settings, num_workers=num_workers, persistent=persistent)
            return lanes, LaneDelivery(datasets[next(iter(datasets))], settings.steps)
        planned = PlanWorker(
            datasets, settings, weights=weights, max_epochs=max_epochs, balance=balance, num_workers=num_workers,
            persistent=persistent,
        )  # fmt: skip
        return planned, PlanDelivery(planned.mixture, settings.steps)

    def packing_lengths(self, step: int) -> dict[str, int]:
        """Return the maximum tokens per pack of each source in a step."""
        return {name: each.needed_packing.length_at(step) for name, each in self._worker.datasets.items()}

    @property
    def urls(self) -> dict[str, str]:
        """The folder or URL of each source, and instead of a source of several streams of each stream."""
        return self._worker.urls

    @property
    def identities(self) -> dict[str, str]:
        """The identity of the dataset of each source, see StoredDataset."""
        return {name: each.identity for name, each in self._worker.datasets.items()}

    @property
    def lengths(self) -> dict[str, str]:
        """Fingerprint of each source's processor: the name of the lengths index."""
        return {name: processor_fingerprint(processor_that_packs(each)) for name, each in self._worker.datasets.items()}

    @property
    def fetched(self) -> FetchCounts:
        """Counts of fetched files of this rank's loader and its workers, up to each worker's last item."""
        return self._fetched.total

    @property
    def counts(self) -> LoaderCounts:
        """Counts of this rank's loader and its workers, by source; may be read in any thread, during an iteration."""
        made = [dict(zip(self.sources, each, strict=True)) for each in self._worker.counts.made()]
        fetched = dict(zip(self.urls, self._fetched.by_stream(), strict=True))
        return LoaderCounts(fetched, made, self._workers.num_ready)

    @property
    def epochs(self) -> dict[str, float]:
        """Delivered epochs of each source; empty in endless lanes."""
        return dict(self._delivery.epochs)

    @property
    def global_batch(self) -> int:
        return self.settings.steps.global_batch

    @property
    def micro_batches(self) -> int:
        """Batches of this rank in one step."""
        return self.settings.steps.micro_batches

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last completely delivered step; ConfigError in lanes."""
        return self._planned.cursor

    @property
    def step(self) -> int:
        """Steps completely delivered, or passed over, since the beginning of the run.

        Until the last batch of a step is delivered, equal to batch.step.
        """
        return self._delivery.cursor.step

    @property
    def mixture(self) -> WindowedMixture:
        """The sources and packs of each step; ConfigError in lanes, whose packs are not known beforehand."""
        return self._planned.mixture

    @property
    def _planned(self) -> PlanDelivery:
        if isinstance(self._delivery, LaneDelivery):
            raise ConfigError("packs of lanes are not known beforehand: write a lengths index with lmms-stream index")
        return self._delivery

    @property
    def packs_left(self) -> int | None:
        """Packs left in the epoch; with weights, until all max_epochs; None without an end (in lanes, for example)."""
        return self._delivery.packs_left

    @property
    def steps_left(self) -> int:
        """Steps left in the epoch (with weights: until all max_epochs); ConfigError without an end."""
        packs_left = self.packs_left
        if packs_left is None:
            raise ConfigError(
                "lanes, and sources with weights and without max_epochs, have no end: count steps instead (max_steps)"
            )
        return self._num_steps(packs_left)

    def steps_to_epoch(self, num_epochs: int) -> int:
        """Steps from the cursor to the end of `num_epochs` epochs; only without weights: each epoch holds every source.

        The epochs of the first sources count: a source added later has fewer epochs.
        """
        return sum(self._num_steps(packs) for packs in self._planned.packs_of_epochs(num_epochs))

    def _num_steps(self, num_packs: int) -> int:
        steps = self.settings.steps
        return num_steps(global_batch=steps.global_batch, num_packs=num_packs, drop_last=steps.drop_last)

    def __len__(self) -> int:
        return self.steps_left * self.micro_batches

    @property
    def deal_settings(self) -> dict[str, Any]:
        """JSON values of the settings that decide the packs of a rank; ranks must agree on all values."""
        lanes = {"num_workers": self.num_workers} if self.state_is_per_rank else {}
        return {
            "global_batch": self.global_batch,
            "drop_last": self.settings.steps.drop_last,
            **lanes,
            **self._delivery.deal_settings,
        }

    def __iter__(self) -> Iterator[Batch]:
        self.agreement.compare(self.deal_settings, self.world)
        self.agreement.begin(self.step)
        self._worker.start_at(self._delivery.begin(), end_workers=self._workers.end)
        for item in self._workers.items():
            for ready in item:
                for each in self._made(ready):
                    if each.after is not None:  # a step counts once its last batch is handed out
                        self._delivery.deliver(each.after)
                        self.num_dropped_packs += each.num_dropped_packs
                    if isinstance(each.made, WireBatch):
                        each = each._replace(made=from_wire(each.made))
                    if isinstance(each.made, Batch):
                        for sample in each.made.left_out:
                            self.left_out.add(sample)
                        yield each.made.pin_memory() if self.pin_memory else each.made
        self._delivery.end()
        self.agreement.end(self.world)

    def steps(self, *, until: int | None = None) -> LoaderSteps:
        """Return the batches a step at a time, as an iterable of GlobalStep.

        until: stop before this step of the run, after as many epochs as necessary; default: at the end of the epoch.
        """
        return LoaderSteps(self, until)

    def _made(self, ready: Ready) -> Iterable[Ready]:
        """Return a worker's batches, or make batches of the worker's work."""
        return self._worker.batches.ready(ready.made, ready.after) if isinstance(ready.made, Work) else (ready,)

    def origin_of(self, source: str, sample_id: int) -> SourceRow | None:
        """The original row of a sample of a source or stream; None if the dataset does not record rows."""
        if source not in self.sources:
            source, sample_id = next(located(self._worker.datasets, source, sample_id))
        return self._worker.datasets[source].origin_of(sample_id)

    def name_of(self, source: str, sample_id: int) -> str:
        """The name of a sample for the log, SOURCE:ID, or STREAM:NUMBER for a source of several streams."""
        return self._worker.datasets[source].listed_name(source, sample_id)

    @property
    def left_out(self) -> LeftOut:
        """Samples left out by this rank: by drop lists, by leave_out, and quarantined in batches."""
        return self._worker.batches.left_out

    def leave_out(self, samples: LeftOut) -> None:
        """Leave more samples out, for example samples left out by another rank or an earlier start.

        Effective from the next iteration on. Samples of drop lists missing in `samples` are left out from the loader's
        current step on. ConfigError if batches cannot leave samples out (see `bad`).
        """
        if samples:
            check_padded(self._worker.datasets, self.settings.collator)
        known = self.left_out.of_kind("quarantined").merge([samples])
        new = [each for each in self._dropped.samples if known.get(each.source, each.sample_id) is None]
        since = [replace(each, since_step=max(each.since_step, self.step)) for each in new]
        self._worker.batches.left_out = known.merge([LeftOut(since)])

    def worker_error(self, cause: BaseException) -> WorkerError:
        """Return the error for a worker that torch reports dead or silent."""
        return self._workers.error(cause)

    @property
    def _items_ahead(self) -> int:
        """Items that each worker has ready."""
        reads_media = any(getattr(each.processor, "family", None) for each in self._worker.datasets.values())
        return items_ahead(self.settings.steps, num_workers=self.num_workers, reads_media=reads_media)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last completely delivered step: plain ints, strings and lists."""
        return self._delivery.cursor.to_dict() | order_of_streams(self._worker.datasets.values())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved cursor; CursorError for a cursor of another plan, or beyond the end of the plan."""
        check_order(self._worker.datasets.values(), state)
        self._delivery.load(state)
        self.agreement.renew()

    def stateful(self) -> LoaderState:
        """Return the loader's state as an entry of a checkpoint of torch.distributed.checkpoint (DCP).

        dcp.save({"model": model, "data": loader.stateful()}); all ranks save, and load, together. Unlike state_dict(),
        its entry has the same name for any sources and, in lanes, holds the states of all ranks.
        """
        return LoaderState(self)

    @property
    def state_is_per_rank(self) -> bool:
        """Whether each rank has a separate state, to be joined by merge_states: in lanes, but not with a plan."""
        return isinstance(self._delivery, LaneDelivery)

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks at a step; the result can be loaded by any number of ranks."""
        first, *others = [LaneCursor.from_dict(state) for state in states]
        return first.merge(others).to_dict()

    def skip_steps(self, num_steps: int) -> None:
        """Pass over the next steps without reading them; ConfigError in lanes."""
        self._delivery.skip(num_steps)


class LoaderSteps:
    """Steps of a loader, see PackedLoader.steps; all ranks iterate together, and sum their loss tokens.

    With `until` it can be the dataloader of a trainer that saves the state of its dataloader, such as Lightning: len
    counts all steps of the run. Iterating raises ConfigError if there are several ranks and no process group yet.
    """

    def __init__(self, loader: PackedLoader, until: int | None):
        self.loader, self._until = loader, until

    def __iter__(self) -> Iterator[GlobalStep]:
        loader, until = self.loader, self._until
        while until is None or loader.step < until:
            first = loader.step
            for batches in by_step(loader, loader.micro_batches):
                num_loss_tokens = sum(each.num_loss_tokens for each in batches)
                yield GlobalStep(batches, sum_over_ranks(num_loss_tokens, loader.world))
                if loader.step == until:
                    return
            if until is None or loader.step == first:
                return

    def __len__(self) -> int:
        if self._until is None:
            raise TypeError("steps of an epoch have no len: name the steps of the run, loader.steps(until=…)")
        return self._until

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state; ConfigError without `until`, and in lanes."""
        if self._until is None:  # a trainer that knows no len reads a step ahead of what it trained on
            raise ConfigError("a trainer can save the steps of a whole run only: write loader.steps(until=…)")
        refuse_lanes(self.loader)
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)


def by_step(batches: Iterable[Batch], micro_batches: int) -> Iterator[list[Batch]]:
    """Yield the batches of whole steps."""
    step: list[Batch] = []
    for batch in batches:
        step.append(batch)
        if len(step) == micro_batches:
            yield step
            step = []


def _with_items(steps: StepConfig, datasets: Mapping[str, PackedDataset], collator: Collator) -> StepConfig:
    """Return the config with the size of a worker's item: whole steps if packs are only fetched, else single packs."""
    fast = collator is collate and all(isinstance(each.processor, PackFiller) for each in datasets.values())
    if not fast or any(each.mode == "lanes" for each in datasets.values()):
        return steps
    longest = max(length for each in datasets.values() for length in each.needed_packing.lengths)
    is_limited = any(each.fetch.cache_limit is not None for each in datasets.values())
    return in_whole_steps(steps, packing_length=longest, is_limited=is_limited)


def _check_lanes(
    datasets: Mapping[str, PackedDataset], weights: object, balance: object, world: World, num_workers: int
) -> None:
    if balance != DEAL:
        raise ConfigError(
            f"balance {balance!r} needs lengths in advance, and packs of lanes have none: write a lengths index with "
            f"lmms-stream index, or set balance to {DEAL}"
        )
    if len(datasets) > 1 or weights is not None:
        lacking = [name for name, each in datasets.items() if each.mode == "lanes"]
        raise ConfigError(
            f"a mixture needs lengths indexes, and {', '.join(map(repr, lacking))} has no index: write it with "
            "lmms-stream index"
        )
    (dataset,) = datasets.values()
    if dataset.needed_packing.later_lengths:
        raise ConfigError(
            "packing_length changes at a step, which needs a lengths index: write it with lmms-stream index"
        )
    check_lanes(int(dataset.lane_order.num_canonical_nodes or 1), world.num_groups, max(1, num_workers))


# Settings that decide the packs of a loader's next steps, as JSON values in a checkpoint.


def stretch_of(loader: PackedLoader, *, skipped: Sequence[tuple[int, int]] = ()) -> dict[str, Any] | None:
    """Return the stretch of a run that begins at the loader's cursor, for tools/ledger/run.py. None in lanes.

    skipped: ranges [first, stop) of steps that nobody reads.
    """
    if not isinstance(loader, PackedLoader) or loader.state_is_per_rank:
        return None
    mixture, world, datasets = loader.mixture, loader.world, loader._worker.datasets
    sources = {
        name: {
            "url": datasets[name].url,
            "identity": loader.identities[name],
            "num_parts": sum(each.num_parts for each in datasets[name].stored),
            **described_streams(datasets[name]),
            "lengths": loader.lengths[name],
            "packing": dataclasses.asdict(plan.packing),
            "order": dataclasses.asdict(plan.order),
        }
        for name, plan in mixture.plans.items()
    }
    return {
        "cursor": loader.cursor.to_dict(),
        "sources": sources,
        "weights": mixture.listed_weights,
        "max_epochs": mixture.max_epochs,
        **({} if mixture.balance == DEAL else {"balance": mixture.balance}),
        "global_batch": loader.global_batch,
        "world": {name: getattr(world, name) for name in ("world_size", "num_nodes", "replication")},
        "skip_steps": [list(each) for each in skipped],
    }


def begin_stretch(history: list[dict[str, Any]], stretch: Mapping[str, Any] | None) -> None:
    """Add a stretch to a run's history; with unchanged settings the last stretch continues."""
    if stretch is not None:
        new = json.loads(json.dumps(stretch))  # lists for tuples, as in the history of a checkpoint
        if not history or _settings(history[-1]) != _settings(new):
            history.append(new)


def _settings(stretch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the steps; cursors of earlier releases have no order of the sources."""
    cursor, sources = Cursor.from_dict(stretch["cursor"]), stretch["sources"]
    order = [name for name in (cursor.sources if cursor.has_order else sources) if name in sources]
    return {name: value for name, value in stretch.items() if name != "cursor"} | {"order": order}
