"""The half of the loader that runs in worker processes: which packs are this worker's, and their batches."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .assign import PAD, assign
from .batch_maker import BatchMaker, Ids, LoaderSettings, Work, naming, processor_of
from .cursor import Cursor
from .dataset import PackedStreamingDataset
from .errors import ConfigError, DataError, LmmsStreamError
from .lane_cursor import LaneCursor
from .lanes import Lane, LaneState
from .mixture import Mixture, Weights
from .types import Batch, PackRange

PREFETCH_PACKS = 32  # shards are fetched this many packs of a worker ahead
MAX_START_BYTES = 1 << 20  # of a place that persistent workers are told


class Made(NamedTuple):
    """What a worker hands over: a batch; in lanes, also the number of its lane and the lane's state after it."""

    batch: Batch
    lane: int = -1
    state: LaneState | None = None


class PackWorker(IterableDataset[Made | LmmsStreamError]):
    """Worker w of n makes the batches w, w + n, … of this rank, from a start that its loader tells.

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

    def __iter__(self) -> Iterator[Made | LmmsStreamError]:
        worker = get_worker_info()
        try:
            yield from self._made(self._told(), *((worker.id, worker.num_workers) if worker else (0, 1)))
        except LmmsStreamError as error:
            yield error

    def _made(self, place: dict[str, Any], first: int, stride: int) -> Iterator[Made]:
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

    def _made(self, place: dict[str, Any], first: int, stride: int) -> Iterator[Made]:
        waiting: deque[Work] = deque()
        for work in self._assigned(Cursor.from_dict(place), first, stride):
            if work.source:
                self.datasets[work.source].pack_reader.prefetch(work.shard_ids)
            waiting.append(work)
            if len(waiting) > PREFETCH_PACKS:
                yield Made(self.batches.make(waiting.popleft()))
        while waiting:
            yield Made(self.batches.make(waiting.popleft()))

    def _assigned(self, cursor: Cursor, first: int, stride: int) -> Iterator[Work]:
        """Every stride-th batch of this rank, from the first on, to the end of the epoch."""
        settings = self.settings
        number = first
        for step_number in count():
            step = self.mixture.step(cursor, global_batch=settings.global_batch)
            if not step.num_packs or (settings.drop_last and step.num_packs < settings.global_batch):
                return
            cursor = step.after
            stop = (step_number + 1) * settings.micro_batches
            if number < stop:
                mine = range(number % settings.micro_batches, settings.micro_batches, stride)
                yield from self._work(self.mixture.packs(step.ranges), step_number, mine)
                number += stride * len(mine)
            if step.ends_epoch:
                return

    def _work(self, packs: PackRange, step: int, micro_batches: range) -> Iterator[Work]:
        """What is to be done for these batches of this rank in a step."""
        world = self.settings.world
        dealt = assign(
            packs,
            global_batch=self.settings.global_batch,
            world_size=world.num_groups,
            num_nodes=world.num_group_nodes,
            num_canonical_nodes=self.mixture.num_canonical_nodes,
        )[world.group]
        located = self._locate(packs)
        num_tokens = np.add.reduceat(packs.lengths, packs.offsets[:-1]).tolist()
        offsets, sources = packs.offsets.tolist(), packs.sources.tolist()
        for micro_batch in micro_batches:
            pack = int(dealt[micro_batch])
            if pack == PAD:
                yield Work("", step, micro_batch)
                continue
            at = slice(offsets[pack], offsets[pack + 1])
            yield Work(
                self.mixture.names[sources[pack]],
                step,
                micro_batch,
                num_tokens[pack],
                packs.sample_ids[at],
                packs.starts[at],
                packs.lengths[at],
                *(values[at] for values in located),
            )

    def _locate(self, packs: PackRange) -> tuple[Ids, Ids, Ids]:
        """Shard, place in it, and tokens of the sample of every segment."""
        shard_ids, places, expected = (np.empty_like(packs.sample_ids) for _ in range(3))
        source_of_segment = np.repeat(packs.sources, np.diff(packs.offsets))
        for number, name in enumerate(self.mixture.names):
            here: Any = slice(None) if len(self.mixture.names) == 1 else source_of_segment == number
            sample_ids = packs.sample_ids[here]
            shard_ids[here], places[here] = self.datasets[name].pack_reader.locate(sample_ids)
            expected[here] = self.mixture.plans[name].lengths[sample_ids]
        return shard_ids, places, expected


class LaneWorker(PackWorker):
    """Packs of lanes: pack g comes from lane g mod M, and this worker owns whole lanes."""

    def _made(self, place: dict[str, Any], first: int, stride: int) -> Iterator[Made]:
        cursor = LaneCursor.from_dict(place)
        ((source, dataset),) = self.datasets.items()
        world, order = self.settings.world, dataset.lane_order
        num_lanes = int(order.num_canonical_nodes or 1)
        lanes: dict[int, Lane] = {}
        begin = cursor.packs + (world.group - cursor.packs) % world.num_groups
        for batch_number in count(first, stride):
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
            num_tokens = int(pack.lengths.sum())
            segments = pack.sample_ids, pack.starts, pack.lengths, *located, pack.expected
            work = Work(source, step, micro_batch, num_tokens, *segments)
            yield Made(self.batches.make(work), number, lanes[number].state)


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
