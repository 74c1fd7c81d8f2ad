"""Batches of this rank, step by step, with a cursor. dataset + processor + collate -> [loader] -> batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .assign import PAD, assign, check_global_batch, num_steps, step_bounds
from .collate import collate
from .cursor import Cursor, Place
from .dataset import PackedStreamingDataset
from .errors import ConfigError, CursorError, DataError, LengthsError, LmmsStreamError
from .types import Batch, Processed, World

SOURCE = "data"  # the name of a single source in the cursor
PREFETCH_PACKS = 32  # shards are fetched this many packs of a worker ahead

Collator = Callable[..., Batch]


class PackedLoader:
    """This rank's batches of one epoch after another, each a pack.

    Iterating gives what is left of the current epoch: steps of global_batch / world_size batches. The order of
    samples in the global batch of a step does not depend on world size or workers. `len` is the number of
    batches left in the epoch.

    state_dict() counts only steps whose batches have all been delivered; it can be loaded at another world
    size, worker count or global_batch. drop_last drops a short last step, which is padded with label-free
    packs otherwise. Raises ConfigError when global_batch is not a multiple of world_size.
    """

    def __init__(
        self,
        dataset: PackedStreamingDataset,
        *,
        global_batch: int,
        world: World | None = None,
        num_workers: int = 0,
        pad_to: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        timeout_s: float = 600.0,
        collator: Collator = collate,
    ):
        if dataset.processor is None:
            raise ConfigError("a PackedLoader needs a processor: give the dataset one")
        self.dataset = dataset
        self.world = world or dataset.world
        check_global_batch(global_batch, self.world.world_size)
        self.global_batch = global_batch
        self.num_workers = num_workers
        self.pad_to = pad_to
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.timeout_s = timeout_s
        self.collator = collator
        self.place = Place()

    @property
    def micro_batches(self) -> int:
        """Batches of this rank in one step."""
        return self.global_batch // self.world.world_size

    @property
    def steps_left(self) -> int:
        """Steps left in the current epoch."""
        return num_steps(
            global_batch=self.global_batch,
            num_packs=self.dataset.plan.num_packs(self.place.epoch),
            first=self.place.packs,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        return self.steps_left * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        start, steps = self.place, self.steps_left
        if steps:
            batches = DataLoader(
                _Packs(self, start),
                batch_size=None,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                timeout=self.timeout_s if self.num_workers else 0,
            )
            for batch in batches:
                if isinstance(batch, LmmsStreamError):
                    raise batch
                if batch.micro_batch == self.micro_batches - 1:
                    # Before the yield: when the consumer has the last batch of a step, the step is delivered.
                    self.place = self._place_after(start, batch.step, steps)
                yield batch
        else:
            self.place = Place(epoch=start.epoch + 1)

    def _place_after(self, start: Place, step: int, steps: int) -> Place:
        if step == steps - 1:
            return Place(epoch=start.epoch + 1)
        return Place(epoch=start.epoch, packs=start.packs + (step + 1) * self.global_batch)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was delivered whole: plain ints and strings."""
        return Cursor(plan=self.dataset.plan.fingerprint, sources={SOURCE: self.place}).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved cursor; CursorError when it belongs to another plan or lies beyond this one."""
        cursor = Cursor.from_dict(state)
        cursor.check_plan(self.dataset.plan.fingerprint)
        if set(cursor.sources) != {SOURCE}:
            raise CursorError(f"the saved cursor has sources {sorted(cursor.sources)}, this run has {[SOURCE]}")
        place = cursor.sources[SOURCE]
        num_packs = self.dataset.plan.num_packs(place.epoch)
        if place.packs > num_packs:
            raise CursorError(
                f"the saved cursor stands at pack {place.packs} of epoch {place.epoch}, which has {num_packs}: "
                "use another checkpoint"
            )
        self.place = place


class _Work(NamedTuple):
    """A batch to be made: a pack's segments (int64[num_segments] each), none for a pad pack."""

    step: int
    micro_batch: int
    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class _Packs(IterableDataset[Batch | LmmsStreamError]):
    """The part of the loader that runs in workers: worker w of n makes the batches w, w + n, … of the epoch.

    An error of ours is the last item, so that the consumer raises it as it is, without a worker's traceback.
    """

    def __init__(self, loader: PackedLoader, start: Place):
        self.dataset = loader.dataset
        self.world = loader.world
        self.global_batch = loader.global_batch
        self.micro_batches = loader.micro_batches
        self.pad_to = loader.pad_to
        self.collator = loader.collator
        self.start = start
        self.steps = loader.steps_left

    def __iter__(self) -> Iterator[Batch | LmmsStreamError]:
        worker = get_worker_info()
        try:
            yield from self._batches(*((worker.id, worker.num_workers) if worker else (0, 1)))
        except LmmsStreamError as error:
            yield error

    def _batches(self, first: int, stride: int) -> Iterator[Batch]:
        waiting: deque[_Work] = deque()
        for work in self._assigned(first, stride):
            self.dataset.prefetch(work.sample_ids)
            waiting.append(work)
            if len(waiting) > PREFETCH_PACKS:
                yield self._batch(waiting.popleft())
        while waiting:
            yield self._batch(waiting.popleft())

    def _assigned(self, first: int, stride: int) -> Iterator[_Work]:
        """Every stride-th batch of this rank in the epoch, from the first on."""
        plan = self.dataset.plan
        epoch = self.start.epoch
        nothing = np.empty(0, np.int64)
        step = -1
        for number in range(first, self.steps * self.micro_batches, stride):
            if number // self.micro_batches != step:
                step = number // self.micro_batches
                bounds = step_bounds(
                    step, global_batch=self.global_batch, num_packs=plan.num_packs(epoch), first=self.start.packs
                )
                packs = plan.packs(epoch, *bounds)
                mine = assign(
                    packs,
                    global_batch=self.global_batch,
                    world_size=self.world.world_size,
                    num_nodes=self.world.num_nodes,
                    num_canonical_nodes=plan.num_canonical_nodes,
                )[self.world.rank]
            micro_batch = number % self.micro_batches
            pack = int(mine[micro_batch])
            if pack == PAD:
                yield _Work(step, micro_batch, nothing, nothing, nothing)
            else:
                at = slice(packs.offsets[pack], packs.offsets[pack + 1])
                yield _Work(step, micro_batch, packs.sample_ids[at], packs.starts[at], packs.lengths[at])

    def _batch(self, work: _Work) -> Batch:
        segments = zip(work.sample_ids.tolist(), work.starts.tolist(), work.lengths.tolist(), strict=True)
        return self.collator(
            [self._process(*segment) for segment in segments],
            work.sample_ids.tolist(),
            pad_to=self.pad_to,
            step=work.step,
            micro_batch=work.micro_batch,
        )

    def _process(self, sample_id: int, start: int, length: int) -> Processed:
        """The sample's segment of `length` tokens from `start` on; all of it unless it is longer than a pack."""
        processor, plan = self.dataset.processor, self.dataset.plan
        assert processor is not None
        try:
            processed = processor.process(self.dataset.get_item(sample_id))
        except DataError as error:
            raise DataError(f"sample {sample_id} of {self.dataset.storage.url}: {error}") from error
        indexed, measured = int(plan.lengths[sample_id]), len(processed["input_ids"])
        if measured != indexed:
            raise LengthsError(
                f"sample {sample_id} of {self.dataset.storage.url} has {measured} tokens and its lengths index says "
                f"{indexed}: write the index again with lmms-stream index"
            )
        if measured == length:
            return processed
        return {name: value[start : start + length] for name, value in processed.items()}
