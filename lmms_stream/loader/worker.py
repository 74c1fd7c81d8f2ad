"""The half of the loader that runs in worker processes: which packs are this worker's, and their batches."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import ConfigError, DataError, LmmsStreamError
from ..mds.core import PackedDataset
from ..plan.assign import assign_steps
from ..plan.cursor import Cursor
from ..plan.kernels.deal import PAD
from ..plan.lane_cursor import LaneCursor
from ..plan.lanes import Lane, LaneState
from ..plan.mixture import Mixture, SourceBlock, Step
from ..plan.pack_range import PackRange
from ..plan.weights import Weights
from ..types import Batch
from .batch_maker import BatchMaker, Ids, LoaderSettings, Work, naming, processor_of
from .blocks_ahead import BlocksAhead
from .collate import collate
from .wire import WireBatch, to_wire
from .worker_counts import WorkerCounts

PREFETCH_PACKS = 32  # shards are requested this many packs before a worker reads them
STRETCH_PACKS = 1024  # packs of successive global batches that are computed together
MAX_START_BYTES = 1 << 20  # size of the longest cursor that can be sent to persistent workers


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
    is_sent: bool = False  # whether it goes to another process

    def takes(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        taken: NDArray[np.bool_] = numbers // self.packs_per_item % self.num_workers == self.worker
        return taken

    def ends_item(self, number: int) -> bool:
        return (number + 1) % self.packs_per_item == 0


class PackWorker(IterableDataset[Item]):
    """Worker w of n makes the items w, w + n, … of this rank's batches, from a start that its loader tells.

    An error of ours is the last item, so that the consumer raises it as it is, without a worker's traceback.
    persistent: the workers outlive an iteration, so they read the next start from memory that they share.
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
        self.counts = WorkerCounts(num_workers)
        self.settings = settings
        self.batches = BatchMaker(datasets, settings)
        self._start = b""
        self._shared = torch.zeros(MAX_START_BYTES, dtype=torch.uint8).share_memory_() if persistent else None

    def start_at(self, cursor: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a cursor, as to_dict gives it."""
        text = json.dumps(cursor).encode()
        if self._shared is None:
            self._start = text
        elif len(text) + 8 <= MAX_START_BYTES:
            framed = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
            self._shared[: len(framed)] = torch.from_numpy(framed.copy())
        else:
            raise ConfigError(
                f"persistent workers cannot be told a cursor of {len(text)} bytes: set persistent_workers to False"
            )

    def _told(self) -> dict[str, Any]:
        text = self._start
        if self._shared is not None:
            size = int.from_bytes(self._shared[:8].numpy().tobytes(), "little")
            text = self._shared[8 : 8 + size].numpy().tobytes()
        cursor: dict[str, Any] = json.loads(text)
        return cursor

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        if worker is None:
            yield from self._items(Turn())
            return
        tell = self.counts.teller(worker.id, [each.one.cache.tally for each in self.datasets.values()])
        turn = Turn(
            worker=worker.id, num_workers=worker.num_workers, packs_per_item=self.settings.packs_per_item, is_sent=True
        )
        for item in self._items(turn):
            tell()
            yield item

    def _items(self, turn: Turn) -> Iterator[Item]:
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

    def _made(self, start: dict[str, Any], turn: Turn) -> Iterator[tuple[int, Made]]:
        """The batches of a turn, each with its number among this rank's from the start on."""
        raise NotImplementedError


class Planned(NamedTuple):
    """A step from the start on: its number, its packs, and which of a rank's batches a worker makes: int64[n]."""

    number: int
    step: Step
    mine: NDArray[np.int64]


class PlanWorker(PackWorker):
    """Packs of plans: which samples they hold is known, so their shards are fetched ahead."""

    def __init__(
        self,
        datasets: Mapping[str, PackedDataset],
        settings: LoaderSettings,
        *,
        weights: Weights | Mapping[int, Weights] | None,
        max_epochs: Mapping[str, int] | None,
        num_workers: int = 0,
        persistent: bool = False,
    ):
        super().__init__(datasets, settings, num_workers=num_workers, persistent=persistent)
        self.weights = weights
        self.max_epochs = max_epochs

    @cached_property
    def mixture(self) -> Mixture:
        plans = {name: dataset.plan for name, dataset in self.datasets.items()}
        return Mixture(plans, weights=self.weights, max_epochs=self.max_epochs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "mixture"}

    def _made(self, start: dict[str, Any], turn: Turn) -> Iterator[tuple[int, Made]]:
        waiting: deque[Work] = deque()
        num_waiting = 0
        for work in self._assigned(Cursor.from_dict(start), turn):
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
        ahead = BlocksAhead(self.datasets, self.settings.world)
        for stretch in self._stretches(cursor, turn):
            entered = self._entered(stretch)
            for planned, works in zip(stretch, self._works(stretch), strict=True):
                yield from works
                if planned.number in entered:
                    ahead.enter(entered[planned.number])

    def _stretches(self, cursor: Cursor, turn: Turn) -> Iterator[list[Planned]]:
        """The steps that have batches of a turn, some at a time."""
        settings = self.settings
        batches = np.arange(settings.micro_batches)
        stretch: list[Planned] = []
        for number in count():
            step = self.mixture.step(cursor, global_batch=settings.global_batch)
            if not step.num_packs or (settings.drop_last and step.num_packs < settings.global_batch):
                break
            cursor = step.after
            mine = batches[turn.takes(number * settings.micro_batches + batches)]
            if len(mine):
                stretch.append(Planned(number, step, mine))
            if step.ends_epoch:
                break
            if len(stretch) * settings.global_batch >= STRETCH_PACKS:
                yield stretch
                stretch = []
        if stretch:
            yield stretch

    def _entered(self, stretch: Sequence[Planned]) -> dict[int, list[SourceBlock]]:
        """The shuffle blocks that packs of the stretch come from, by the number of the first step that does."""
        entered: dict[int, list[SourceBlock]] = {}
        for position, block in self.mixture.blocks([taken for planned in stretch for taken in planned.step.ranges]):
            entered.setdefault(stretch[position // self.settings.global_batch].number, []).append(block)
        return entered

    def _works(self, stretch: Sequence[Planned]) -> Iterator[list[Work]]:
        """What is to be done in each step: packs of one source at a time, packs_per_fill of them or fewer."""
        world = self.settings.world
        packs = self.mixture.packs([taken for planned in stretch for taken in planned.step.ranges])
        dealt = assign_steps(
            packs,
            global_batch=self.settings.global_batch,
            world_size=world.num_groups,
            num_nodes=world.num_group_nodes,
            num_canonical_nodes=self.mixture.num_canonical_nodes,
        )[:, world.group]
        chosen = [of_step[planned.mine] for of_step, planned in zip(dealt, stretch, strict=True)]
        numbers = np.concatenate(chosen)
        packs = packs.take(numbers[numbers != PAD])
        located = self._locate(packs)
        sources, offsets = packs.sources.tolist(), packs.offsets.tolist()
        first = 0
        for planned, of_step in zip(stretch, chosen, strict=True):
            works = []
            micro_batches = planned.mine.tolist()
            begin, end = first, first + int(np.count_nonzero(of_step != PAD))  # the pad packs of a rank are its last
            while first < end:
                stop = first + 1
                limit = min(end, first + self.settings.packs_per_fill)
                while stop < limit and sources[stop] == sources[first]:
                    stop += 1
                at = slice(offsets[first], offsets[stop])
                works.append(
                    Work(
                        self.mixture.names[sources[first]],
                        planned.number,
                        micro_batches[first - begin : stop - begin],
                        packs.offsets[first : stop + 1] - offsets[first],
                        packs.sample_ids[at],
                        packs.starts[at],
                        packs.lengths[at],
                        *(each[at] for each in located),
                    )
                )
                first = stop
            works += [Work("", planned.number, [micro_batch]) for micro_batch in micro_batches[end - begin :]]
            yield works

    def _locate(self, packs: PackRange) -> tuple[Ids, Ids, Ids]:
        """Shard, index in it, and tokens of the sample of each segment."""
        shard_ids, indices, expected = (np.empty_like(packs.sample_ids) for _ in range(3))
        sources = np.repeat(packs.sources, np.diff(packs.offsets)) if len(self.mixture.names) > 1 else None
        for number, name in enumerate(self.mixture.names):
            here: Any = slice(None) if sources is None else sources == number
            sample_ids = packs.sample_ids[here]
            shard_ids[here], indices[here] = self.datasets[name].pack_reader.locate(sample_ids)
            expected[here] = self.mixture.plans[name].lengths[sample_ids]
        return shard_ids, indices, expected


class LaneWorker(PackWorker):
    """Packs of lanes: pack g comes from lane g mod M, and this worker owns whole lanes."""

    def _made(self, start: dict[str, Any], turn: Turn) -> Iterator[tuple[int, Made]]:
        cursor = LaneCursor.from_dict(start)
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


def measure(dataset: PackedDataset, sample_ids: Ids) -> Ids:
    """The tokens of samples, as the dataset's processor measures them: int64."""
    processor = processor_of(dataset)
    lengths = np.empty(len(sample_ids), np.int64)
    for at, sample in enumerate(dataset.pack_reader.samples(sample_ids)):
        try:
            lengths[at] = processor.measure(sample)
        except DataError as error:
            raise naming(dataset, int(sample_ids[at]), error) from error
    return lengths
