"""The half of the loader that runs in worker processes: which packs are this worker's, and their batches."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .ahead import BlocksAhead
from .assign import PAD, assign
from .batch_maker import BatchMaker, Ids, LoaderSettings, Work, naming, processor_of
from .collate import collate
from .cursor import Cursor
from .dataset import PackedStreamingDataset
from .errors import ConfigError, DataError, LmmsStreamError
from .lane_cursor import LaneCursor
from .lanes import Lane, LaneState
from .mixture import Mixture, Weights
from .plan import runs
from .types import Batch, PackRange
from .wire import WireBatch, to_wire

PREFETCH_PACKS = 32  # shards are fetched this many packs of a worker ahead
MAX_START_BYTES = 1 << 20  # of a place that persistent workers are told


class Made(NamedTuple):
    """What a worker hands over: a batch, or packs whose shards it fetched and that the loader fills faster than it
    could receive them. In lanes, also the number of the lane and its state after it.
    """

    batch: Batch | WireBatch | Work
    lane: int = -1
    state: LaneState | None = None


Item = list[Made] | LmmsStreamError


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Which of a rank's batches a worker makes: items of packs_per_item, every num_workers-th of them."""

    worker: int = 0
    num_workers: int = 1
    packs_per_item: int = 1
    is_sent: bool = False  # to another process

    def takes(self, number: int) -> bool:
        return number // self.packs_per_item % self.num_workers == self.worker

    def ends_item(self, number: int) -> bool:
        return (number + 1) % self.packs_per_item == 0


class PackWorker(IterableDataset[Item]):
    """Worker w of n makes the items w, w + n, … of this rank's batches, from a start that its loader tells.

    An error of ours is the last item, so that the consumer raises it as it is, without a worker's traceback.
    persistent: the workers outlive an iteration, so they read the next start from memory that they share.
    """

    def __init__(
        self, datasets: Mapping[str, PackedStreamingDataset], settings: LoaderSettings, *, persistent: bool = False
    ):
        self.datasets = datasets
        self.settings = settings
        self.batches = BatchMaker(datasets, settings)
        self._start = b""
        self._shared = torch.zeros(MAX_START_BYTES, dtype=torch.uint8).share_memory_() if persistent else None

    def start_at(self, place: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a place, as its cursor's to_dict gives it."""
        text = json.dumps(place).encode()
        if self._shared is None:
            self._start = text
        elif len(text) + 8 <= MAX_START_BYTES:
            framed = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
            self._shared[: len(framed)] = torch.from_numpy(framed.copy())
        else:
            raise ConfigError(
                f"persistent workers cannot be told a place of {len(text)} bytes: set persistent_workers to False"
            )

    def _told(self) -> dict[str, Any]:
        text = self._start
        if self._shared is not None:
            size = int.from_bytes(self._shared[:8].numpy().tobytes(), "little")
            text = self._shared[8 : 8 + size].numpy().tobytes()
        place: dict[str, Any] = json.loads(text)
        return place

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        turn = Turn(packs_per_item=self.settings.packs_per_item)
        if worker is not None:
            turn = replace(turn, worker=worker.id, num_workers=worker.num_workers, is_sent=True)
        on_wire = turn.is_sent and self.settings.collator is collate
        item: list[Made] = []
        try:
            for number, made in self._made(self._told(), turn):
                batch = made.batch
                item.append(made._replace(batch=to_wire(batch)) if on_wire and isinstance(batch, Batch) else made)
                if turn.ends_item(number):
                    yield item
                    item = []
            if item:
                yield item
        except LmmsStreamError as error:
            if item:
                yield item
            yield error

    def _make(self, work: Work, turn: Turn) -> Iterator[tuple[int, Made]]:
        """Batches with their numbers among this rank's; or the work, with the number of its last batch."""
        first = work.step * self.settings.micro_batches
        if turn.is_sent and self.batches.fills(work.source):
            self.datasets[work.source].pack_reader.wait_for(work.shard_ids)
            yield first + work.micro_batches[-1], Made(work)
            return
        for batch in self.batches.make(work):
            yield first + batch.micro_batch, Made(batch)

    def _made(self, place: dict[str, Any], turn: Turn) -> Iterator[tuple[int, Made]]:
        """The batches of a turn, each with its number among this rank's from the start on."""
        raise NotImplementedError


class PlanWorker(PackWorker):
    """Packs of plans: which samples they hold is known, so their shards are fetched ahead."""

    def __init__(
        self,
        datasets: Mapping[str, PackedStreamingDataset],
        settings: LoaderSettings,
        *,
        weights: Weights | Mapping[int, Weights] | None,
        max_epochs: Mapping[str, int] | None,
        persistent: bool = False,
    ):
        super().__init__(datasets, settings, persistent=persistent)
        self.weights = weights
        self.max_epochs = max_epochs

    @cached_property
    def mixture(self) -> Mixture:
        plans = {name: dataset.plan for name, dataset in self.datasets.items()}
        return Mixture(plans, weights=self.weights, max_epochs=self.max_epochs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "mixture"}

    def _made(self, place: dict[str, Any], turn: Turn) -> Iterator[tuple[int, Made]]:
        waiting: deque[Work] = deque()
        num_waiting = 0
        for work in self._assigned(Cursor.from_dict(place), turn):
            if work.source:
                self.datasets[work.source].pack_reader.prefetch(work.shard_ids)
            waiting.append(work)
            num_waiting += len(work.micro_batches)
            if num_waiting > PREFETCH_PACKS:
                num_waiting -= len(waiting[0].micro_batches)
                yield from self._make(waiting.popleft(), turn)
        while waiting:
            yield from self._make(waiting.popleft(), turn)

    def _assigned(self, cursor: Cursor, turn: Turn) -> Iterator[Work]:
        """What is to be made in a turn, to the end of the epoch."""
        settings = self.settings
        ahead = {name: BlocksAhead(dataset, settings.world) for name, dataset in self.datasets.items()}
        for step_number in count():
            step = self.mixture.step(cursor, global_batch=settings.global_batch)
            if not step.num_packs or (settings.drop_last and step.num_packs < settings.global_batch):
                return
            cursor = step.after
            first = step_number * settings.micro_batches
            mine = [batch for batch in range(settings.micro_batches) if turn.takes(first + batch)]
            if mine:
                yield from self._work(self.mixture.packs(step.ranges), step_number, mine)
                for part in step.ranges:
                    ahead[part.source].follow(part.epoch, part.first, part.stop)
            if step.ends_epoch:
                return

    def _work(self, packs: PackRange, step: int, micro_batches: Sequence[int]) -> Iterator[Work]:
        """What is to be done for these batches of this rank in a step: packs of one source, some at a time."""
        world = self.settings.world
        dealt = assign(
            packs,
            global_batch=self.settings.global_batch,
            world_size=world.num_groups,
            num_nodes=world.num_group_nodes,
            num_canonical_nodes=self.mixture.num_canonical_nodes,
        )[world.group, micro_batches]
        real = dealt[dealt != PAD]
        counts = np.diff(packs.offsets)[real]
        segments = runs(packs.offsets[real], counts)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        values = packs.sample_ids[segments], packs.starts[segments], packs.lengths[segments]
        located = self._locate(values[0], np.repeat(packs.sources[real], counts))
        sources = packs.sources[real].tolist()
        first = 0
        while first < len(real):
            stop = first + 1
            limit = min(len(real), first + self.settings.packs_per_fill)
            while stop < limit and sources[stop] == sources[first]:
                stop += 1
            at = slice(bounds[first], bounds[stop])
            yield Work(
                self.mixture.names[sources[first]],
                step,
                micro_batches[first:stop],
                bounds[first : stop + 1] - bounds[first],
                *(each[at] for each in (*values, *located)),
            )
            first = stop
        for micro_batch in micro_batches[len(real) :]:  # a rank's pad packs come last
            yield Work("", step, [micro_batch])

    def _locate(self, sample_ids: Ids, sources: Ids) -> tuple[Ids, Ids, Ids]:
        """Shard, place in it, and tokens of each sample, whose sources are given by number."""
        shard_ids, places, expected = (np.empty_like(sample_ids) for _ in range(3))
        for number, name in enumerate(self.mixture.names):
            here: Any = slice(None) if len(self.mixture.names) == 1 else sources == number
            shard_ids[here], places[here] = self.datasets[name].pack_reader.locate(sample_ids[here])
            expected[here] = self.mixture.plans[name].lengths[sample_ids[here]]
        return shard_ids, places, expected


class LaneWorker(PackWorker):
    """Packs of lanes: pack g comes from lane g mod M, and this worker owns whole lanes."""

    def _made(self, place: dict[str, Any], turn: Turn) -> Iterator[tuple[int, Made]]:
        cursor = LaneCursor.from_dict(place)
        ((source, dataset),) = self.datasets.items()
        world, order = self.settings.world, dataset.lane_order
        num_lanes = int(order.num_canonical_nodes or 1)
        lanes: dict[int, Lane] = {}
        begin = cursor.packs + (world.group - cursor.packs) % world.num_groups
        for batch_number in count(turn.worker, turn.num_workers):
            number = (begin + batch_number * world.num_groups) % num_lanes
            if number not in lanes:
                lanes[number] = Lane(
                    dataset.samples_per_shard,
                    order=order,
                    packing=dataset.needed_packing,
                    lane=number,
                    measure=partial(measure, dataset),
                    state=cursor.states.get(number),
                )
            pack = lanes[number].next_pack()
            step, micro_batch = divmod(batch_number, self.settings.micro_batches)
            located = dataset.pack_reader.locate(pack.sample_ids)
            segments = pack.sample_ids, pack.starts, pack.lengths, *located, pack.expected
            work = Work(source, step, [micro_batch], np.array([0, len(pack.sample_ids)]), *segments)
            for at, made in self._make(work, turn):
                yield at, made._replace(lane=number, state=lanes[number].state)


def measure(dataset: PackedStreamingDataset, sample_ids: Ids) -> Ids:
    """The tokens of samples, as the dataset's processor measures them: int64."""
    processor = processor_of(dataset)
    lengths = np.empty(len(sample_ids), np.int64)
    for at, sample in enumerate(dataset.pack_reader.samples(sample_ids)):
        try:
            lengths[at] = processor.measure(sample)
        except DataError as error:
            raise naming(dataset, int(sample_ids[at]), error) from error
    return lengths
