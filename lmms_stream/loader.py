"""Batches of this rank, step by step, with a cursor. dataset + processor + collate -> [loader] -> batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .assign import PAD, assign, check_global_batch, num_steps
from .collate import collate
from .cursor import Cursor
from .dataset import PackedStreamingDataset
from .errors import ConfigError, DataError, LengthsError, LmmsStreamError, WorkerError
from .mixture import Mixture, Weights
from .types import Batch, PackRange, Processed, World

SOURCE = "data"  # the name of a single source in the cursor
PREFETCH_PACKS = 32  # shards are fetched this many packs of a worker ahead

Collator = Callable[..., Batch]


class PackedLoader:
    """This rank's batches, each a pack: steps of global_batch / (world_size / replication) batches.

    dataset: one, or several by name; then weights and max_epochs are Mixture's. Iterating gives what is left of the
    current epoch, or, with weights, goes on until every source has had its max_epochs. The samples in the global
    batch of a step do not depend on world size or workers. `len` is the number of batches left.

    state_dict() counts only steps whose batches have all been delivered; it can be loaded at another world
    size, worker count or global_batch, and with other weights or more sources. drop_last drops a short last step
    (num_dropped_packs counts its packs), which is padded with label-free packs otherwise.
    start_method: how workers are started (default: torch's). Raises ConfigError when global_batch cannot be
    shared equally.
    """

    def __init__(
        self,
        dataset: PackedStreamingDataset | Mapping[str, PackedStreamingDataset],
        *,
        global_batch: int,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
        world: World | None = None,
        num_workers: int = 0,
        pad_to: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        start_method: Literal["fork", "spawn", "forkserver"] | None = None,
        timeout_s: float = 600.0,
        collator: Collator = collate,
    ):
        if not dataset:
            raise ConfigError("a PackedLoader needs at least one dataset")
        datasets = {SOURCE: dataset} if isinstance(dataset, PackedStreamingDataset) else dict(dataset)
        for name, each in datasets.items():
            if each.processor is None:
                raise ConfigError(f"a PackedLoader needs a processor: give dataset {name!r} one")
        self.world = world or next(iter(datasets.values())).world
        check_global_batch(global_batch, self.world.num_groups)
        self._packs = _Packs(datasets, weights, max_epochs, global_batch, self.world, pad_to, drop_last, collator)
        self.mixture = self._packs.mixture
        self.global_batch = global_batch
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.start_method = start_method
        self.timeout_s = timeout_s
        self.cursor = self.mixture.start()
        self.num_dropped_packs = 0

    @property
    def micro_batches(self) -> int:
        """Batches of this rank in one step."""
        return self._packs.micro_batches

    @property
    def packs_left(self) -> int | None:
        """Packs left in the epoch; with weights, until all max_epochs, or None when there is no end."""
        return self.mixture.packs_left(self.cursor)

    @property
    def steps_left(self) -> int:
        """Steps left in the epoch (with weights: until all max_epochs); ConfigError when there is no end."""
        packs_left = self.packs_left
        if packs_left is None:
            raise ConfigError("sources with weights and without max_epochs have no end: count steps instead")
        return num_steps(global_batch=self.global_batch, num_packs=packs_left, drop_last=self.drop_last)

    def steps_of_epochs(self, num_epochs: int) -> int:
        """Steps in the first `num_epochs` epochs, where each holds every source once."""
        plans = self.mixture.plans.values()
        packs = [sum(plan.num_packs(epoch) for plan in plans) for epoch in range(num_epochs)]
        return sum(
            num_steps(global_batch=self.global_batch, num_packs=count, drop_last=self.drop_last) for count in packs
        )

    def __len__(self) -> int:
        return self.steps_left * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        self._packs.start = self.cursor
        batches = DataLoader(
            self._packs,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            multiprocessing_context=self.start_method if self.num_workers else None,
            timeout=self.timeout_s if self.num_workers else 0,
        )
        for batch in self._until_a_worker_dies(batches):
            if batch.micro_batch == self.micro_batches - 1:
                # Before the yield: when the consumer has the last batch of a step, the step is delivered.
                self.cursor = self.mixture.step(self.cursor, global_batch=self.global_batch).after
            yield batch
        if self.drop_last:
            self._pass_over_short_step()

    def _until_a_worker_dies(self, batches: DataLoader[Batch | LmmsStreamError]) -> Iterator[Batch]:
        """Batches as they come; a worker's error, its death and its silence are errors of ours."""
        waiting = iter(batches)
        while True:
            try:
                batch = next(waiting, None)
            except RuntimeError as error:  # what torch raises for a dead worker and for one past the timeout
                if not self.num_workers:
                    raise
                raise WorkerError(
                    f"a loader worker died or gave nothing within {self.timeout_s:.0f} s ({error}): "
                    "look for an out-of-memory kill, or set num_workers to 0 to see what happens"
                ) from error
            if batch is None:
                return
            if isinstance(batch, LmmsStreamError):
                raise batch
            yield batch

    def _pass_over_short_step(self) -> None:
        step = self.mixture.step(self.cursor, global_batch=self.global_batch)
        if step.ends_epoch and 0 < step.num_packs < self.global_batch:
            self.num_dropped_packs += step.num_packs
            self.cursor = step.after

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was delivered whole: plain ints and strings."""
        return self.cursor.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved cursor; CursorError when it belongs to another plan or lies beyond this one."""
        self.cursor = self.mixture.adopt(Cursor.from_dict(state))

    def skip_steps(self, num_steps: int) -> None:
        """Pass over the next steps without reading them."""
        self.cursor = self.mixture.skip(self.cursor, num_steps, global_batch=self.global_batch)


class _Work(NamedTuple):
    """A batch to be made: a pack's segments (int64[num_segments] each), none for a pad pack."""

    source: str
    step: int
    micro_batch: int
    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class _Packs(IterableDataset[Batch | LmmsStreamError]):
    """The part of the loader that runs in workers: worker w of n makes the batches w, w + n, … of this rank.

    An error of ours is the last item, so that the consumer raises it as it is, without a worker's traceback.
    """

    def __init__(
        self,
        datasets: Mapping[str, PackedStreamingDataset],
        weights: Weights | Mapping[int, Weights] | None,
        max_epochs: Mapping[str, int] | None,
        global_batch: int,
        world: World,
        pad_to: int | None,
        drop_last: bool,
        collator: Collator,
    ):
        self.datasets = datasets
        self.weights = weights
        self.max_epochs = max_epochs
        self.global_batch = global_batch
        self.world = world
        self.pad_to = pad_to
        self.drop_last = drop_last
        self.collator = collator
        self.start: Cursor | None = None

    @cached_property
    def mixture(self) -> Mixture:
        plans = {name: dataset.plan for name, dataset in self.datasets.items()}
        return Mixture(plans, weights=self.weights, max_epochs=self.max_epochs)

    @property
    def micro_batches(self) -> int:
        return self.global_batch // self.world.num_groups

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "mixture"}

    def __iter__(self) -> Iterator[Batch | LmmsStreamError]:
        worker = get_worker_info()
        try:
            yield from self._batches(*((worker.id, worker.num_workers) if worker else (0, 1)))
        except LmmsStreamError as error:
            yield error

    def _batches(self, first: int, stride: int) -> Iterator[Batch]:
        waiting: deque[_Work] = deque()
        for work in self._assigned(first, stride):
            if work.source:
                self.datasets[work.source].prefetch(work.sample_ids)
            waiting.append(work)
            if len(waiting) > PREFETCH_PACKS:
                yield self._batch(waiting.popleft())
        while waiting:
            yield self._batch(waiting.popleft())

    def _assigned(self, first: int, stride: int) -> Iterator[_Work]:
        """Every stride-th batch of this rank, from the first on, to the end of the epoch."""
        cursor = self.start or self.mixture.start()
        number = first
        for step_number in count():
            step = self.mixture.step(cursor, global_batch=self.global_batch)
            if not step.num_packs or (self.drop_last and step.num_packs < self.global_batch):
                return
            cursor = step.after
            if number < (step_number + 1) * self.micro_batches:
                packs = self.mixture.packs(step.ranges)
                mine = self._assign(packs)
                while number < (step_number + 1) * self.micro_batches:
                    yield self._work(packs, mine, step_number, number % self.micro_batches)
                    number += stride
            if step.ends_epoch:
                return

    def _assign(self, packs: PackRange) -> NDArray[np.int64]:
        """The packs of this rank in a step: int64[micro_batches], PAD where none."""
        dealt = assign(
            packs,
            global_batch=self.global_batch,
            world_size=self.world.num_groups,
            num_nodes=self.world.num_group_nodes,
            num_canonical_nodes=self.mixture.num_canonical_nodes,
        )
        mine: NDArray[np.int64] = dealt[self.world.group]
        return mine

    def _work(self, packs: PackRange, mine: NDArray[np.int64], step: int, micro_batch: int) -> _Work:
        pack = int(mine[micro_batch])
        if pack == PAD:
            nothing = np.empty(0, np.int64)
            return _Work("", step, micro_batch, nothing, nothing, nothing)
        at = slice(packs.offsets[pack], packs.offsets[pack + 1])
        source = self.mixture.names[packs.sources[pack]]
        return _Work(source, step, micro_batch, packs.sample_ids[at], packs.starts[at], packs.lengths[at])

    def _batch(self, work: _Work) -> Batch:
        segments = zip(work.sample_ids.tolist(), work.starts.tolist(), work.lengths.tolist(), strict=True)
        return self.collator(
            [self._process(self.datasets[work.source], *segment) for segment in segments],
            work.sample_ids.tolist(),
            pad_to=self.pad_to,
            source=work.source,
            step=work.step,
            micro_batch=work.micro_batch,
        )

    @staticmethod
    def _process(dataset: PackedStreamingDataset, sample_id: int, start: int, length: int) -> Processed:
        """The sample's segment of `length` tokens from `start` on; all of it unless it is longer than a pack."""
        assert dataset.processor is not None
        try:
            processed = dataset.processor.process(dataset.get_item(sample_id))
        except DataError as error:
            raise DataError(f"sample {sample_id} of {dataset.storage.url}: {error}") from error
        indexed, measured = int(dataset.plan.lengths[sample_id]), len(processed["input_ids"])
        if measured != indexed:
            raise LengthsError(
                f"sample {sample_id} of {dataset.storage.url} has {measured} tokens and its lengths index says "
                f"{indexed}: write the index again with lmms-stream index"
            )
        if measured == length:
            return processed
        return {name: value[start : start + length] for name, value in processed.items()}
