"""This rank's batches of sources, step by step, with the interface of PackedLoader. -> trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, Protocol, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ....checks import check_arguments, whole_number
from ....errors import ConfigError, LmmsStreamError, WorkerError
from ....loader.agreement import Agreement
from ....loader.batch_maker import Collator, Ready
from ....loader.collate import PackCollator, collate, for_checked
from ....loader.counts import LoaderCounts
from ....loader.worker import PackWorker
from ....loader.workers import StartMethod, Workers
from ....plan.assign import check_global_batch
from ....plan.cursor import SOURCE
from ....plan.lanes import check_lanes
from ....plan.windows import DEAL
from ....processors.tokenizers import tokenize_in_one_thread
from ....storage.fetch_config import FetchCounts
from ....types import Batch, Processed, World
from .source_reader import SourcePack, check_readers
from .source_state import LaneStep, SourcesState, merged_states
from .streaming_packs import StreamingPackConfig

ITEMS_AHEAD = 4  # finished packs per worker


class ReadsLanes(Protocol):
    """Interface of a MultiModalIterableDataset on sources."""

    @property
    def packing(self) -> StreamingPackConfig: ...

    def begun(self, num_readers: int) -> SourcesState: ...

    def checked(self, state: Mapping[str, Any]) -> SourcesState: ...

    def batches(
        self,
        state: SourcesState,
        *,
        world: World,
        worker: int,
        num_workers: int,
        endless: bool,
        collator: Collator,
        **options: Any,
    ) -> Iterator[StreamedBatch]: ...


class SourceLoader:
    """This rank's batches of a MultiModalIterableDataset, epoch after epoch without end.

    See PackedLoader for the parameters and for members with the same name. state_dict() counts only steps with all
    batches delivered; merge_states merges the states of all ranks, for any number of readers that divides the lanes.
    The number of readers changes only the grouping of packs into steps, not the set of rows read.
    """

    packs_left = None
    epochs: Mapping[str, float] = {}
    urls: Mapping[str, str] = {}  # sources are read in place
    state_is_per_rank = True
    num_dropped_packs = 0
    fetched = FetchCounts()
    sources = (SOURCE,)

    def __init__(
        self,
        dataset: ReadsLanes,
        *,
        global_batch: int,
        world: World | None = None,
        num_workers: int = 0,
        pad_to: int | None = None,
        pin_memory: bool = False,
        timeout_s: float = 600.0,
        start_method: StartMethod | None = None,
        collator: Collator = collate,
        weights: Any = None,
        max_epochs: Any = None,
        balance: str | int = DEAL,
    ):
        check_arguments(SourceLoader.__init__, locals())
        if weights is not None or max_epochs is not None:
            raise ConfigError(
                "weights and max_epochs are for datasets of shards: name all sources in one dataset, or convert them"
            )
        if balance != DEAL:
            raise ConfigError(
                f"balance {balance!r} is for datasets of shards: set it to {DEAL}, or convert the sources"
            )
        self.dataset = dataset
        self.world = world or World.detect()
        self.global_batch = global_batch = whole_number("global_batch", global_batch, least=1)
        num_workers = whole_number("num_workers", num_workers, least=0)
        check_global_batch(global_batch, self.world.num_groups)
        self.micro_batches = global_batch // self.world.num_groups
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.num_workers = num_workers
        self.agreement = Agreement()
        self._state = dataset.begun(self.world.num_groups * max(1, num_workers))
        check_lanes(self._state.num_lanes, self.world.num_groups, max(1, num_workers))
        self._worker = SourceWorker(dataset, world=self.world, collator=collator, pad_to=pad_to)
        self._workers = Workers(
            cast(PackWorker, self._worker),
            num_workers=num_workers,
            items_ahead=ITEMS_AHEAD,
            persistent=False,
            start_method=start_method,
            timeout_s=timeout_s,
        )

    @property
    def counts(self) -> LoaderCounts:
        """See PackedLoader; sources are not counted."""
        return LoaderCounts({}, [], self._workers.num_ready)

    @property
    def deal_settings(self) -> dict[str, Any]:
        """See PackedLoader."""
        return {
            "global_batch": self.global_batch,
            "num_workers": self.num_workers,
            "sources": self._state.fingerprint,
            "num_lanes": self._state.num_lanes,
            "step": self.step,
        }

    def __iter__(self) -> Iterator[Batch]:
        self.agreement.compare(self.deal_settings, self.world)
        self._worker.start = json.dumps(self.state_dict())
        of_step: list[LaneStep] = []
        micro_batch = 0
        for item in self._workers.items():
            for ready in item:
                batch = cast(StreamedBatch, ready.made)
                batch = replace(batch, step=self.step, micro_batch=micro_batch)
                of_step += batch.afters
                micro_batch += 1
                if micro_batch == self.micro_batches:  # a step counts when its last batch is handed out
                    for after in of_step:
                        self._state.deliver(after)
                    self._state.step += 1
                    of_step, micro_batch = [], 0
                yield batch.pin_memory() if self.pin_memory else batch
        raise WorkerError("packs of sources have no end, and the workers ended: this is a defect; please report it")

    @property
    def step(self) -> int:
        """Number of complete steps delivered since the beginning of the run."""
        return self._state.step

    def packing_lengths(self, step: int) -> dict[str, int]:
        return {SOURCE: self.dataset.packing.packing_length}

    def state_dict(self) -> dict[str, Any]:
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = self.dataset.checked(state)
        check_readers(loaded.num_lanes, self.world.num_groups * max(1, self.num_workers))
        self._state = loaded
        self.agreement.renew()

    merge_states = staticmethod(merged_states)

    def worker_error(self, cause: BaseException) -> WorkerError:
        return self._workers.error(cause)

    @property
    def steps_left(self) -> int:
        self._refuse("count steps instead (max_steps)")

    def steps_to_epoch(self, num_epochs: int) -> int:
        self._refuse("set max_steps instead of num_train_epochs")

    def skip_steps(self, num_steps: int) -> None:
        self._refuse("leave skip_steps out, or convert the sources")

    def _refuse(self, remedy: str) -> NoReturn:
        raise ConfigError(f"packs of sources that are read without conversion are not known beforehand: {remedy}")


class SourceWorker(IterableDataset[list[Ready] | LmmsStreamError]):
    """A worker process: reads its lanes from `start`, a state as JSON."""

    def __init__(self, dataset: ReadsLanes, *, world: World, collator: Collator, pad_to: int | None):
        self.dataset = dataset
        self.start = ""
        self._world = world
        self._collator = collator
        self._pad_to = pad_to

    def __iter__(self) -> Iterator[list[Ready] | LmmsStreamError]:
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if worker is not None:
            tokenize_in_one_thread()
        state = SourcesState.from_dict(json.loads(self.start))
        batches = self.dataset.batches(
            state,
            world=self._world,
            worker=number,
            num_workers=num_workers,
            endless=True,
            collator=self._collator,
            pad_to=self._pad_to,
            source=SOURCE,
        )
        try:
            for batch in batches:
                yield [Ready(batch)]
        except LmmsStreamError as error:
            yield error


# Packs of lanes -> batches with the positions of their lanes.


@dataclass(kw_only=True, slots=True)
class StreamedBatch(Batch):
    """A Batch with `afters`: the positions of lanes after its packs. See MultiModalIterableDataset.deliver."""

    afters: tuple[LaneStep, ...] = ()


def batch_of(pack: SourcePack, collator: Collator, **options: Any) -> StreamedBatch:
    """Return the batch of a pack."""
    batch = for_checked(collator)(pack.samples, pack.sample_ids, **options)
    return StreamedBatch(**{each.name: getattr(batch, each.name) for each in fields(Batch)}, afters=pack.afters)


class StreamedCollator(PackCollator):
    """A PackCollator whose batches keep the lane positions of all their packs."""

    def __call__(
        self, packs: Sequence[Batch] | Sequence[Processed], sample_ids: Sequence[int] | None = None, **options: Any
    ) -> Batch:
        batch = super().__call__(packs, sample_ids, **options)
        if sample_ids is not None or not isinstance(batch, StreamedBatch):
            return batch
        values = {each.name: getattr(batch, each.name) for each in fields(Batch)}
        return StreamedBatch(**values, afters=tuple(after for pack in packs for after in pack.afters))  # type: ignore[union-attr]
