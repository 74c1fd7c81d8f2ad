"""The batch of a pack: its samples read, processed and joined. work -> [batch maker] -> Batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError, LengthsError, LmmsStreamError
from ..mds.core import PackedDataset
from ..processors.base import PackFiller, Processor, SegmentError
from ..types import Batch, Processed, World
from .collate import collate, padded_length, to_batch, write_padding
from .row_memory import RowMemory, Rows, new_rows

Collator = Callable[..., Batch]
Ids = NDArray[np.int64]
NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """What both halves of a loader know. pad_to and collator: see collate; the others: see PackedLoader.

    packs_per_item: how many batches a worker process hands over together. packs_per_fill: how many packs that are
    made straight from the shards share their rows.
    """

    global_batch: int
    world: World
    pad_to: int | None = None
    drop_last: bool = False
    collator: Collator = collate
    packs_per_item: int = 1
    packs_per_fill: int = 1

    @property
    def micro_batches(self) -> int:
        """Batches of a rank in one step."""
        return self.global_batch // self.world.num_groups


class Work(NamedTuple):
    """Packs of one source to be made into batches, those of some micro-batches of a step.

    Pack p holds segments [bounds[p], bounds[p + 1]). Of each segment, int64[num_segments]: sample_ids, starts and
    lengths as in PackRange; shard_ids: the shard of the sample; indices: its index_in_shard; expected: its tokens
    in all, -1 where that is not known. Pad packs have no source and no segments.
    """

    source: str
    step: int
    micro_batches: Sequence[int]
    bounds: Ids = np.zeros(2, np.int64)
    sample_ids: Ids = NOTHING
    starts: Ids = NOTHING
    lengths: Ids = NOTHING
    shard_ids: Ids = NOTHING
    indices: Ids = NOTHING
    expected: Ids = NOTHING


class BatchMaker:
    """Makes batches through the processor of each source: pack by pack where it can, else sample by sample."""

    def __init__(self, datasets: Mapping[str, PackedDataset], settings: LoaderSettings):
        self.datasets = datasets
        self.settings = settings
        processors = {name: processor_of(dataset) for name, dataset in datasets.items()}
        self._memory = RowMemory()
        self._fillers = {name: each for name, each in processors.items() if isinstance(each, PackFiller)}

    def fills(self, source: str) -> bool:
        """Whether packs of a source are made straight from the shards: in no time, wherever the shards are mapped."""
        return source in self._fillers and self.settings.collator is collate

    def make(self, work: Work) -> Iterator[Batch]:
        """The batches of some packs."""
        if self.fills(work.source):
            yield from self._fill(work)
            return
        for pack, micro_batch in enumerate(work.micro_batches):
            segments = range(work.bounds[pack], work.bounds[pack + 1])
            dataset = self.datasets[work.source] if segments else None
            yield self.settings.collator(
                [_process(dataset, work, segment) for segment in segments] if dataset is not None else [],
                work.sample_ids[segments.start : segments.stop].tolist(),
                pad_to=self.settings.pad_to,
                source=work.source,
                step=work.step,
                micro_batch=micro_batch,
            )

    def _fill(self, work: Work) -> Iterator[Batch]:
        """The batches of packs whose processor makes them straight from the shards, in rows that they share."""
        dataset, pad_to = self.datasets[work.source], self.settings.pad_to
        ends = np.zeros(len(work.lengths) + 1, np.int32)
        np.cumsum(work.lengths, out=ends[1:])
        rows = self._memory.rows(int(ends[-1]))
        addresses = dataset.pack_reader.addresses(work.shard_ids)
        try:
            learnt = self._fillers[work.source].fill_packs(
                dataset.one.shards[0].columns,
                addresses,
                work.indices,
                work.starts,
                work.lengths,
                work.expected,
                *(row[0] for row in rows),
            )
        except SegmentError as error:
            raise _explain(dataset, work, error) from error
        firsts = work.bounds[:-1]
        longest = np.maximum.reduceat(work.lengths, firsts).tolist()
        num_loss_tokens = np.add.reduceat(learnt, firsts).tolist()
        bounds, tokens = work.bounds.tolist(), ends[work.bounds].tolist()
        for pack, micro_batch in enumerate(work.micro_batches):
            first, stop = bounds[pack], bounds[pack + 1]
            at = slice(tokens[pack], tokens[pack + 1])
            mine = rows[0][:, at], rows[1][:, at], rows[2][:, at]
            cu_seqlens = ends[first : stop + 1] - ends[first]
            max_seqlen, num_tokens = longest[pack], at.stop - at.start
            total = padded_length(num_tokens, pad_to)
            if total > num_tokens:
                mine, max_seqlen = _padded(mine, total), max(max_seqlen, total - num_tokens)
                cu_seqlens = np.append(cu_seqlens, np.int32(total))
            yield to_batch(
                mine,
                cu_seqlens,
                work.sample_ids[first:stop],
                max_seqlen=max_seqlen,
                num_loss_tokens=num_loss_tokens[pack],
                source=work.source,
                step=work.step,
                micro_batch=micro_batch,
            )


def _padded(rows: Rows, total: int) -> Rows:
    padded = new_rows(total)
    num_tokens = rows[0].shape[1]
    for target, source in zip(padded, rows, strict=True):
        target[:, :num_tokens] = source
    write_padding(padded, num_tokens)
    return padded


def processor_of(dataset: PackedDataset) -> Processor:
    if dataset.processor is None:
        raise ConfigError(f"packs need a processor: give the dataset at {dataset.url} one")
    return dataset.processor


def _process(dataset: PackedDataset, work: Work, segment: int) -> Processed:
    """A segment: all of its sample, unless that is longer than a pack."""
    shard = dataset.pack_reader.shard(int(work.shard_ids[segment]))
    try:
        processed = processor_of(dataset).process(shard[int(work.indices[segment])])
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


def naming(dataset: PackedDataset, sample_id: int, error: DataError) -> DataError:
    return DataError(f"sample {sample_id} of {dataset.url}: {error}")


def _explain(dataset: PackedDataset, work: Work, error: DataError, *, segment: int = -1) -> LmmsStreamError:
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
