"""The batch of a pack: its samples read, processed and joined. work -> [batch maker] -> Batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .collate import collate, finish, new_rows
from .dataset import PackedStreamingDataset
from .errors import ConfigError, DataError, LengthsError, LmmsStreamError
from .processors.base import PackFiller, Processor, SegmentError
from .types import Batch, Processed, World

Collator = Callable[..., Batch]
Ids = NDArray[np.int64]
NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """What both halves of a loader know. pad_to and collator: see collate; the others: see PackedLoader."""

    global_batch: int
    world: World
    pad_to: int | None = None
    drop_last: bool = False
    collator: Collator = collate

    @property
    def micro_batches(self) -> int:
        """Batches of a rank in one step."""
        return self.global_batch // self.world.num_groups


class Work(NamedTuple):
    """A batch to be made: a pack's segments (int64[num_segments] each), none for a pad pack.

    shard_ids and places: where the samples lie. expected: tokens that each must have in all, -1
    where that is not known.
    """

    source: str
    step: int
    micro_batch: int
    num_tokens: int = 0
    sample_ids: Ids = NOTHING
    starts: Ids = NOTHING
    lengths: Ids = NOTHING
    shard_ids: Ids = NOTHING
    places: Ids = NOTHING
    expected: Ids = NOTHING


class BatchMaker:
    """Makes batches through the processor of each source: pack by pack where it can, else sample by sample."""

    def __init__(self, datasets: Mapping[str, PackedStreamingDataset], settings: LoaderSettings):
        self.datasets = datasets
        self.settings = settings
        processors = {name: processor_of(dataset) for name, dataset in datasets.items()}
        self._fillers = {name: each for name, each in processors.items() if isinstance(each, PackFiller)}

    def make(self, work: Work) -> Batch:
        """The batch of a pack, through the processor of its source."""
        settings = self.settings
        if work.source in self._fillers and settings.collator is collate:
            return self._filled(work)
        samples: list[Processed] = []
        if work.source:
            dataset = self.datasets[work.source]
            samples = [_process(dataset, work, segment) for segment in range(len(work.sample_ids))]
        return settings.collator(
            samples,
            work.sample_ids.tolist(),
            pad_to=settings.pad_to,
            source=work.source,
            step=work.step,
            micro_batch=work.micro_batch,
        )

    def _filled(self, work: Work) -> Batch:
        """The batch of a pack whose processor makes it straight from the shards."""
        dataset = self.datasets[work.source]
        rows = new_rows(work.num_tokens, len(work.sample_ids), pad_to=self.settings.pad_to)
        addresses = dataset.pack_reader.addresses(work.shard_ids)
        try:
            max_seqlen, num_loss_tokens = self._fillers[work.source].fill_pack(
                dataset.shard_infos[0], addresses, work.places, work.starts, work.lengths, work.expected, rows
            )
        except SegmentError as error:
            raise _explain(dataset, work, error) from error
        return finish(
            rows,
            work.sample_ids,
            max_seqlen=max_seqlen,
            num_loss_tokens=num_loss_tokens,
            source=work.source,
            step=work.step,
            micro_batch=work.micro_batch,
        )


def processor_of(dataset: PackedStreamingDataset) -> Processor:
    if dataset.processor is None:
        raise ConfigError(f"packs need a processor: give the dataset at {dataset.url} one")
    return dataset.processor


def _process(dataset: PackedStreamingDataset, work: Work, segment: int) -> Processed:
    """A segment: all of its sample, unless that is longer than a pack."""
    shard = dataset.pack_reader.shard(int(work.shard_ids[segment]))
    try:
        processed = processor_of(dataset).process(shard[int(work.places[segment])])
        num_tokens = len(processed["input_ids"])
        least = int(work.starts[segment] + work.lengths[segment])
        if num_tokens < least or 0 <= work.expected[segment] != num_tokens:
            raise SegmentError("it has another length", segment=segment, num_tokens=num_tokens)
    except DataError as error:
        raise _explain(dataset, work, error, segment=segment) from error
    start, length = int(work.starts[segment]), int(work.lengths[segment])
    if num_tokens == length:
        return processed
    return {name: value[start : start + length] for name, value in processed.items()}


def naming(dataset: PackedStreamingDataset, sample_id: int, error: DataError) -> DataError:
    return DataError(f"sample {sample_id} of {dataset.url}: {error}")


def _explain(dataset: PackedStreamingDataset, work: Work, error: DataError, *, segment: int = -1) -> LmmsStreamError:
    """An error of a processor, with the name of the sample."""
    num_tokens = None
    if isinstance(error, SegmentError):
        segment, num_tokens = error.segment, error.num_tokens
    sample_id, expected = int(work.sample_ids[segment]), int(work.expected[segment])
    if num_tokens is None:
        return naming(dataset, sample_id, error)
    if dataset.mode == "lanes":
        return LengthsError(
            f"sample {sample_id} of {dataset.url} has {num_tokens} tokens and was measured as {expected}: "
            "correct the processor, whose measure must equal what process gives"
        )
    return LengthsError(
        f"sample {sample_id} of {dataset.url} has {num_tokens} tokens and its lengths index says "
        f"{expected}: write the index again with lmms-stream index"
    )
