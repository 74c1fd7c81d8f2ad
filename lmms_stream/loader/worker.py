"""The half of the loader that runs in worker processes: planned -> [worker] -> ready."""

from __future__ import annotations

import json
import operator
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import DataError, LmmsStreamError
from ..mds.core import PackedDataset
from ..mds.mixed import plans_of
from ..plan.cursor import Cursor
from ..plan.lane_cursor import LaneCursor
from ..plan.lanes import UNMEASURED, LanePlanner
from ..plan.left_out import LeftOut
from ..plan.planner import PREFETCH_PACKS, Planned, StepPlanner, Work, steps_ahead
from ..plan.source_ranges import Weights
from ..plan.windows import WindowedMixture
from ..processes.shared_tensors import SharesTensors, shared_zeros
from ..processors.base import Measured, Processor
from ..processors.lengths import checked, groups, measured_with_media, measures_media, sample_bytes
from ..processors.tokenizers import tokenize_in_one_thread
from ..storage.fetch_config import FetchTally
from ..types import Batch, Sample
from .bad_samples import SampleClock
from .batch_maker import BatchMaker, LoaderSettings, Ready, name_sample, naming, processor_that_packs
from .blocks_ahead import BlocksAhead
from .collate import collate
from .counts import MakeTally, WorkerCounts
from .media_memory import SharedBlocks
from .wire import to_wire

START_BYTES = 1 << 20  # memory that persistent workers share for a start, unless a longer start comes

Item = list[Ready] | LmmsStreamError


class PackWorker(SharesTensors, IterableDataset[Item]):
    """Worker w of n makes the items w, w + n, … of this rank's batches, from a start set by the loader.

    An error of ours is the last item: the consumer raises the error unchanged, without a worker's traceback.
    persistent: workers outlive an iteration, and read the next start from shared memory.
    """

    def __init__(
        self,
        datasets: Mapping[str, PackedDataset],
        settings: LoaderSettings,
        *,
        num_workers: int = 0,
        persistent: bool = False,
    ):
        self.datasets = datasets
        self.counts = WorkerCounts(num_workers, len(datasets), len(self.tallies))
        self.settings = settings
        self.batches = BatchMaker(datasets, settings)
        if settings.bad.sample_timeout_s is not None:
            self.batches.clock = SampleClock(
                num_workers, sources=tuple(datasets), timeout_s=settings.bad.sample_timeout_s
            )
        self._blocks = SharedBlocks()
        self._start = b""
        self._shared = shared_zeros(START_BYTES, dtype=torch.uint8) if persistent else None

    @property
    def tallies(self) -> list[FetchTally]:
        """Counts of fetched files of this process, of each stream of each source."""
        return [stored.cache.tally for each in self.datasets.values() for stored in each.stored]

    @property
    def urls(self) -> dict[str, str]:
        """URL of each source, and instead of a source of several streams of each stream: in the order of tallies."""
        found: dict[str, str] = {}
        for source, each in self.datasets.items():
            prefix = f"{source}/" if len(self.datasets) > 1 else ""
            names = [prefix + name for name in each.names] if len(each.stored) > 1 else [source]
            found |= zip(names, [stored.url for stored in each.stored], strict=True)
        return found

    def start_at(self, cursor: Mapping[str, Any], *, end_workers: Callable[[], None]) -> None:
        """Let the next iteration begin at a cursor (a result of to_dict), without the batch maker's left-out samples.

        end_workers: ends persistent workers, which cannot read a start longer than the shared memory. The workers end
        before new memory is made: after an interrupt no worker reads an earlier start.
        """
        text = json.dumps({"cursor": cursor, "left_out": self.batches.left_out.state_dict()}).encode()
        self.batches.begin(cursor["step"])
        self._count_packs(worker=-1)
        if self._shared is None:
            self._start = text
            return
        framed = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
        if len(framed) > len(self._shared):
            end_workers()
            self._shared = shared_zeros(2 * len(framed), dtype=torch.uint8)
        self._shared[: len(framed)] = torch.from_numpy(framed.copy())

    def _count_packs(self, *, worker: int) -> None:
        """Count packs made by this process. worker: its number, -1: of the loader's process."""
        self.batches.tally = MakeTally([*self.datasets], self.counts.made_by(worker))
        for dataset in self.datasets.values():
            dataset.pack_reader.waiting = self.batches.tally.pausing

    def _told(self, *, worker: int) -> dict[str, Any]:
        """Return the cursor to begin at. worker: the number of this process."""
        text = self._start
        if self._shared is not None:
            size = int.from_bytes(self._shared[:8].numpy().tobytes(), "little")
            text = self._shared[8 : 8 + size].numpy().tobytes()
        told = json.loads(text)
        cursor: dict[str, Any] = told["cursor"]
        if get_worker_info() is not None:
            self.batches.left_out = LeftOut.load(told["left_out"])
            self.batches.begin(cursor["step"], worker=worker)
        return cursor

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        for dataset in self.datasets.values():
            dataset.pack_reader.pass_over()  # requests of an iteration that ended early
        if worker is None:
            yield from self._items(self._planned(self._told(worker=0), worker=0, num_workers=1), is_sent=False)
            return
        tokenize_in_one_thread()
        self._count_packs(worker=worker.id)
        tell = self.counts.teller(worker.id, self.tallies)
        planned = self._planned(self._told(worker=worker.id), worker=worker.id, num_workers=worker.num_workers)
        for item in self._items(planned, is_sent=True):
            tell()
            yield item

    def _items(self, planned: Iterator[Planned], *, is_sent: bool) -> Iterator[Item]:
        """Make planned work ready. is_sent: to another process, packs_per_item batches per item; else singly."""
        packs_per_item = self.settings.steps.packs_per_item if is_sent else 1
        item: list[Ready] = []
        try:
            for each in planned:
                first = each.work.step * self.settings.steps.micro_batches
                for ready, micro_batch in self._make_ready(each, is_sent=is_sent):
                    item.append(ready)
                    if (first + micro_batch + 1) % packs_per_item == 0:
                        yield item
                        item = []
            if item:
                yield item
        except LmmsStreamError as error:
            if item:
                yield item
            yield error

    def _make_ready(self, planned: Planned, *, is_sent: bool) -> Iterator[tuple[Ready, int]]:
        """Yield Ready values of planned work, with the number of the last micro-batch of each."""
        work = planned.work
        if planned.num_dropped_packs:
            yield Ready(None, planned.after, planned.num_dropped_packs), -1
            return
        if is_sent and self.batches.fills(work.source) and not self.batches.has_news:
            self.datasets[work.source].pack_reader.wait_for(work.segments.shard_ids)
            yield Ready(work, planned.after), work.micro_batches[-1]
            return
        on_wire = is_sent and self.settings.collator is collate
        for ready in self.batches.ready(work, planned.after, self._blocks if on_wire else None):
            assert isinstance(ready.made, Batch)
            yield ready._replace(made=to_wire(ready.made, self._blocks)) if on_wire else ready, ready.made.micro_batch

    def _planned(self, start: dict[str, Any], *, worker: int, num_workers: int) -> Iterator[Planned]:
        """Yield the work of a worker from the start, with its shards requested."""
        raise NotImplementedError


class SentWorker(IterableDataset[Item]):
    """A worker for a started (not forked) process, unpickled at the first iteration.

    The loader then receives errors of unpickling like other errors. A process that fails during the start only dies.
    """

    def __init__(self, worker: IterableDataset[Item]):
        self._worker: IterableDataset[Item] | None = worker
        self._pickled = b""

    def __getstate__(self) -> bytes:
        return bytes(ForkingPickler.dumps(self._worker))

    def __setstate__(self, state: bytes) -> None:
        self._worker, self._pickled = None, state

    def __iter__(self) -> Iterator[Item]:
        if self._worker is None:
            try:
                self._worker = pickle.loads(self._pickled)
            except LmmsStreamError as error:
                return iter([error])
            self._pickled = b""
        assert self._worker is not None
        return iter(self._worker)


class PlanWorker(PackWorker):
    """Packs of plans: the samples are known beforehand, and the shards are fetched ahead."""

    def __init__(
        self,
        datasets: Mapping[str, PackedDataset],
        settings: LoaderSettings,
        *,
        weights: Weights | Mapping[int, Weights] | None,
        max_epochs: Mapping[str, int] | None,
        balance: str | int,
        num_workers: int = 0,
        persistent: bool = False,
    ):
        super().__init__(datasets, settings, num_workers=num_workers, persistent=persistent)
        self.weights, self.max_epochs, self.balance = weights, max_epochs, balance

    @cached_property
    def mixture(self) -> WindowedMixture:
        weights, max_epochs = self.weights, self.max_epochs
        return WindowedMixture(plans_of(self.datasets), weights=weights, max_epochs=max_epochs, balance=self.balance)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "mixture"}

    def _planned(self, start: dict[str, Any], *, worker: int, num_workers: int) -> Iterator[Planned]:
        cursor, steps = self.mixture.adopt(Cursor.from_dict(start)), self.settings.steps
        planner = StepPlanner(self.mixture, steps, worker=worker, num_workers=num_workers)
        num_steps = self.mixture.steps_of_window(cursor, global_batch=steps.global_batch)
        ahead = BlocksAhead(
            self.datasets,
            self.mixture.plans,
            steps.world,
            margin_steps=steps_ahead(steps, num_workers=num_workers) + num_steps,
            mixes_blocks=num_steps > 0,
            epochs={name: at.epoch for name, at in cursor.sources.items()},
        )
        waiting: deque[Planned] = deque()
        num_waiting = 0
        for planned in planner.plan(cursor):
            ahead.look(planned.entered, step=planned.work.step)
            self._ask_for(planned.work)
            if planned.entered:
                ahead.enter(planned.entered)
            waiting.append(planned)
            num_waiting += len(planned.work.micro_batches)
            if num_waiting > PREFETCH_PACKS:
                num_waiting -= len(waiting[0].work.micro_batches)
                yield waiting.popleft()
        yield from waiting

    def _ask_for(self, work: Work) -> None:
        if work.source:
            self.datasets[work.source].pack_reader.prefetch(work.segments.shard_ids)


class LaneWorker(PackWorker):
    """Packs of lanes: pack g comes from lane g mod M, and this worker owns whole lanes."""

    def _planned(self, start: dict[str, Any], *, worker: int, num_workers: int) -> Iterator[Planned]:
        ((source, dataset),) = self.datasets.items()
        planner = LanePlanner(
            dataset.samples_per_shard,
            self.settings.steps,
            source=source,
            order=dataset.lane_order,
            packing=dataset.needed_packing,
            measure=partial(measure, dataset, pass_over=partial(self.batches.passes_over, source)),
            worker=worker,
            num_workers=num_workers,
        )
        for planned in planner.plan(LaneCursor.from_dict(start)):
            self.batches.list_unmeasured(planned.work)
            yield planned


# Lengths of samples of a lane, measured during iteration. sample ids -> [measure] -> tokens and patches.

PassOver = Callable[[int, Exception], bool]  # sample id and error of measuring -> whether to pass over the sample


def measure(dataset: PackedDataset, sample_ids: NDArray[np.int64], *, pass_over: PassOver) -> NDArray[np.int64]:
    """Lengths of samples by the dataset's processor: tokens, int64[n], or tokens and patches, int64[n, 2].

    A sample that cannot be measured is UNMEASURED if pass_over returns True; otherwise the error is raised.
    """
    processor = processor_that_packs(dataset)
    has_media = measures_media(processor)
    measured = np.zeros((len(sample_ids), 2), np.int64)
    for at, found in enumerate(_found(dataset, processor, sample_ids, has_media=has_media)):
        error = _error_of(found)
        if error is None:
            measured[at] = found[:2]  # type: ignore[index]
        elif pass_over(int(sample_ids[at]), error):
            measured[at] = UNMEASURED, 0
        elif isinstance(error, DataError):
            raise naming(dataset, int(sample_ids[at]), error) from error
        else:
            name_sample(error, dataset.name_of(int(sample_ids[at])))
            raise error
    return measured if has_media else measured[:, 0]


def _error_of(found: Measured | Exception) -> Exception | None:
    """Return the error of measuring a sample; None for a sample with a length."""
    if isinstance(found, Exception):
        return found
    try:
        checked(found, what="it")
    except DataError as error:
        return error
    return None


def _found(
    dataset: PackedDataset, processor: Processor, sample_ids: NDArray[np.int64], *, has_media: bool
) -> Iterator[Measured | Exception]:
    """Yield the length of each sample, or the error of measuring."""
    if not has_media:
        for sample in dataset.pack_reader.samples(sample_ids):
            try:
                yield Measured(operator.index(processor.measure(sample)))
            except Exception as error:  # noqa: BLE001 - the caller raises the error, or passes over the sample
                yield error
        return
    first = 0
    for group in groups(dataset.measure_reader.samples(sample_ids), num_bytes=sample_bytes):
        yield from _found_of_group(dataset, processor, sample_ids[first : first + len(group)], group)
        first += len(group)


def _found_of_group(
    dataset: PackedDataset, processor: Processor, sample_ids: NDArray[np.int64], group: Sequence[Sample]
) -> Iterator[Measured | Exception]:
    """Measure samples together; bytes of media are read only for samples without facts."""
    first = 0
    while first < len(group):
        whole = partial(lambda ids, index: dataset.pack_reader[int(ids[index])], sample_ids[first:])
        try:
            for found in measured_with_media(processor, group[first:], whole=whole):
                first += 1
                yield found
        except Exception as error:  # noqa: BLE001 - see above; measuring restarts after the sample
            first += 1
            yield error
