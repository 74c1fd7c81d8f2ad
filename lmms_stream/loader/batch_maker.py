"""The batch of a pack: its samples read, processed and joined. work -> [batch maker] -> Batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError, DataError, LengthsError, LmmsStreamError, StorageError
from ..mds.core import PackedDataset
from ..plan.left_out import LeftOut, LeftOutSample
from ..plan.planner import After, StepConfig, Work
from ..processors.base import (
    IGNORED_LABEL,
    Memory,
    PackFiller,
    Processor,
    SegmentError,
    process_all,
    process_sample,
    tokenizes_all,
    works_together,
)
from ..processors.lengths import groups, sample_bytes
from ..types import Batch, Columns, PackSegments, Processed, Sample, TokenRows
from .bad_samples import BadSamples, SampleClock, is_of_sample, padding_of, reason_of
from .collate import PAD_TOKEN_ID, check_keys, collate, for_checked, write_padding
from .counts import MakeTally
from .drop_list import append_left_out
from .media_memory import PackMemory, RowMemory, SharedBlocks, new_rows
from .wire import WireBatch

# A segment of a pack -> the processed sample, or the sample's piece in the pack; errors name the sample.


def processor_that_packs(dataset: PackedDataset) -> Processor:
    """Return the processor of a dataset; ConfigError if the dataset has no processor, and therefore no packs."""
    if dataset.processor is None:
        raise ConfigError(f"packs need a processor: give the dataset at {dataset.url} one")
    return dataset.processor


def process_pack(
    dataset: PackedDataset, work: Work, segments: Sequence[int], tally: MakeTally
) -> dict[int, Processed | DataError | StorageError]:
    """Process the samples of some segments, many samples at once; return processed samples or DataErrors.

    The first segment with an unavailable shard has the StorageError: nobody waits for the shard again. Later segments
    are missing. Segments are also missing if samples are processed singly, and if a sample tokenized in the same group
    raises another error: process_segment raises the error again, for the failing sample.
    """
    processor = processor_that_packs(dataset)
    if not tokenizes_all(processor) or works_together(type(processor), "process", "process_drawn"):
        return {}
    made: dict[int, Processed | DataError | StorageError] = {}

    def read() -> Iterator[tuple[int, Sample]]:
        for segment in segments:
            try:
                since_us = tally.clock_us()
                sample = read_segment(dataset, work, segment)
                tally.read(since_us)
            except StorageError as error:
                made[segment] = error
                return
            yield segment, sample

    try:
        for group in groups(read(), num_bytes=lambda each: sample_bytes(each[1])):
            since_us = tally.clock_us()
            found = process_all(processor, [sample for _, sample in group])
            if found is not None:
                first = int(work.segments.sample_ids[group[0][0]])
                tally.sample(first, (tally.clock_us() - since_us) // len(group))  # they share it
                made |= zip([segment for segment, _ in group], found, strict=True)
    except Exception:  # noqa: BLE001 - the failing segment raises the error again when read separately
        pass
    return made


def read_segment(dataset: PackedDataset, work: Work, segment: int) -> Sample:
    """The stored sample of a segment."""
    return dataset.pack_reader.shard(int(work.segments.shard_ids[segment]))[int(work.segments.indices[segment])]


def process_segment(
    dataset: PackedDataset,
    work: Work,
    segment: int,
    sample: Sample | Processed | DataError,
    memory: Memory | None,
    *,
    pack: int,
    is_made: bool,
) -> Processed:
    """Return the processed sample of a segment. memory: allocates the arrays of media.

    is_made: `sample` is a result of process_pack, not the stored sample. Raises DataError or LengthsError, with the
    sample's name.
    """
    sample_id, start, length, _, _, expected = (int(values[segment]) for values in work.segments)
    try:
        drawn = [work.epochs[pack] if work.epochs else 0, sample_id]
        drawn += [work.repeats[segment]] if work.repeats and work.repeats[segment] else []
        if isinstance(sample, DataError):
            raise sample
        processed = sample if is_made else process_sample(processor_that_packs(dataset), sample, memory, drawn)
        num_tokens = len(processed["input_ids"])
        if num_tokens < start + length or 0 <= expected != num_tokens:
            raise SegmentError("it has another length", segment=segment, num_tokens=num_tokens)
    except DataError as error:
        raise explain(dataset, work, error, segment=segment) from error
    return processed


def piece_of(dataset: PackedDataset, work: Work, segment: int, processed: Processed) -> Processed:
    """Return the tokens of a segment: the whole sample, or a piece of a sample longer than a pack."""
    sample_id, start, length = (int(values[segment]) for values in work.segments[:3])
    num_tokens = len(processed["input_ids"])
    if num_tokens == length:
        return processed
    if "sequences" in processed:
        reason = DataError(
            f"its sequences have {num_tokens} tokens, more than a pack holds, and they must lie in one: set overlong "
            "to drop or error, or raise packing_length"
        )
        raise naming(dataset, sample_id, reason)
    if processed.get("media"):
        reason = DataError(
            f"it has media and {num_tokens} tokens, more than a pack holds, and pictures cannot be cut with their "
            "tokens: set overlong to drop or error, or raise packing_length"
        )
        raise naming(dataset, sample_id, reason)
    return {name: cut(name, value, start, start + length) for name, value in processed.items()}


def name_sample(error: Exception, sample: str) -> None:
    """Add the name of the sample to an error of another library."""
    if not isinstance(error, LmmsStreamError):
        error.add_note(sample)


def cut(name: str, value: Any, start: int, stop: int) -> Any:
    """Cut a value to a piece [start, stop) of a sample's tokens; positions begin at 0 in each piece."""
    if name == "media":
        return value
    if name == "token_inputs":
        return {each: values[start:stop] for each, values in value.items()}
    if name == "position_ids":
        own = value[..., start:stop]
        return own - own[..., :1]
    return value[start:stop]


def naming(dataset: PackedDataset, sample_id: int, error: DataError) -> DataError:
    return DataError(f"{dataset.name_of(sample_id)}: {error}")


def explain(dataset: PackedDataset, work: Work, error: DataError, *, segment: int = -1) -> LmmsStreamError:
    """Return the error for a processor's error, with the name of the sample."""
    num_tokens = None
    if isinstance(error, SegmentError):
        segment, num_tokens = error.segment, error.num_tokens
    sample_id, expected = int(work.segments.sample_ids[segment]), int(work.segments.expected[segment])
    if num_tokens is None:
        return naming(dataset, sample_id, error)
    if dataset.mode == "lanes":
        return LengthsError(
            f"{dataset.name_of(sample_id)} has {num_tokens} tokens and was measured as {expected}: "
            "correct the processor, whose measure must equal what process gives"
        )
    return LengthsError(
        f"{dataset.name_of(sample_id)} has {num_tokens} tokens and its lengths index says "
        f"{expected}: write the index again with lmms-stream index"
    )


Collator = Callable[..., Batch]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """Settings that both halves of a loader share. pad_to and collator: see collate."""

    steps: StepConfig
    pad_to: int | None = None
    collator: Collator = collate
    bad: BadSamples = field(default_factory=BadSamples)


class Ready(NamedTuple):
    """Output of a worker: a batch, or work with fetched shards if making batches is faster than receiving batches.

    after: see Planned; only for the last batch. made: None reports only the end, with the number of dropped packs.
    """

    made: Batch | WireBatch | Work | None
    after: After | None = None
    num_dropped_packs: int = 0


class BatchMaker:
    """Makes batches with the processor of each source: pack by pack if possible, else sample by sample."""

    def __init__(self, datasets: Mapping[str, PackedDataset], settings: LoaderSettings):
        self.datasets = datasets
        self.settings = settings
        processors = {name: processor_that_packs(dataset) for name, dataset in datasets.items()}
        have_one = (
            each.needed_packing.max_samples_per_pack == 1 and not getattr(each.processor, "gives_sequences", False)
            for each in datasets.values()
        )
        self._holds_one = settings.pad_to is None and all(have_one)
        self._memory = RowMemory()
        self._fillers = {name: each for name, each in processors.items() if isinstance(each, PackFiller)}
        self.left_out = LeftOut()
        self.clock: SampleClock | None = None
        self.tally = MakeTally([*datasets])
        self._first_step = self._worker = 0
        self._unmeasured: dict[int, Exception] = {}  # samples passed over since the latest work
        self._untold: list[LeftOutSample] = []  # passed-over samples not yet reported by a batch

    def begin(self, first_step: int, *, worker: int = 0) -> None:
        """Begin the next batches of this process at a step of the run. worker: the number of this process."""
        self._first_step, self._worker = first_step, worker
        self._unmeasured, self._untold = {}, []

    def _step_of(self, work: Work) -> int:
        """Number of a work's step in the run."""
        return self._first_step + work.step

    def passes_over(self, source: str, sample_id: int, error: Exception) -> bool:
        """Whether a sample without a length takes no room in packs; the next work lists the sample."""
        if not is_of_sample(error):
            return False
        if self.left_out.get(source, sample_id) is not None:
            return True
        if self._quarantines(error):
            self._unmeasured[sample_id] = error
            return True
        return False

    def list_unmeasured(self, work: Work) -> None:
        """List the samples passed over for a work; the first batch reports the samples."""
        for sample_id, error in self._unmeasured.items():
            self._untold.append(self._quarantine(work, sample_id, error))
        self._unmeasured = {}

    def fills(self, source: str) -> bool:
        """Whether packs of a source are made directly from the mapped shards, at almost no cost in any process."""
        return source in self._fillers and self.settings.collator is collate

    @property
    def has_news(self) -> bool:
        """Whether the next batch reports samples passed over."""
        return bool(self._untold)

    def ready(self, work: Work, after: After | None, blocks: SharedBlocks | None = None) -> Iterator[Ready]:
        """Yield the batches of a work, the last with `after`. blocks: memory for media."""
        last = work.micro_batches[-1]
        for batch in self.make(work, blocks):
            if self._untold:
                batch = replace(batch, left_out=[*batch.left_out, *self._untold])
                self._untold = []
            yield Ready(batch, after if batch.micro_batch == last else None)

    def make(self, work: Work, blocks: SharedBlocks | None = None) -> Iterator[Batch]:
        """Yield the batches of some packs."""
        if self.fills(work.source):
            yield from self._fill(work)
            return
        # A user's collator may accept other keys.
        checks_keys = self.settings.collator is collate
        collator = for_checked(self.settings.collator)
        for pack, micro_batch in enumerate(work.micro_batches):
            self.tally.begin(work.source)
            segments = range(work.bounds[pack], work.bounds[pack + 1])
            memory = PackMemory(blocks, work.patches[pack]) if blocks is not None and any(work.patches) else None
            made = self._made(work, segments, memory)
            batch = collator(
                [self._processed(work, segment, memory, made, pack, checks_keys) for segment in segments],
                work.segments.sample_ids[segments.start : segments.stop].tolist(),
                pad_to=self.settings.pad_to,
                source=work.source,
                step=self._step_of(work),
                micro_batch=micro_batch,
                **({} if memory is None else {"memory": memory}),
            )
            if left_out := self._left_out_of(work, segments):
                batch = replace(batch, left_out=left_out)
            if repeats := work.repeats[segments.start : segments.stop]:
                batch = replace(batch, repeats=repeats)
            batch.holds_one = self._holds_one
            self.tally.end(num_packs=1, num_samples=len(segments))
            yield replace(batch, num_patches=work.patches[pack]) if any(work.patches) else batch

    def _made(
        self, work: Work, segments: range, memory: Memory | None
    ) -> dict[int, Processed | DataError | StorageError]:
        """See process_pack; empty if each sample is timed, and if media have separate memory."""
        if self.clock is not None or memory is not None:
            return {}
        ids = work.segments.sample_ids
        wanted = [each for each in segments if not (self.left_out and self._is_left_out(work, int(ids[each])))]
        return process_pack(self.datasets[work.source], work, wanted, self.tally) if wanted else {}

    def _processed(
        self,
        work: Work,
        segment: int,
        memory: Memory | None,
        made: Mapping[int, Processed | DataError | StorageError],
        pack: int,
        checks_keys: bool,
    ) -> Processed:
        """Return the processed sample of a segment, or padding. made: see process_pack."""
        sample_id, length = int(work.segments.sample_ids[segment]), int(work.segments.lengths[segment])
        if self._is_left_out(work, sample_id):
            return padding_of(length)
        dataset = self.datasets[work.source]
        is_made, since_us = segment in made, self.tally.clock_us()
        sample = made[segment] if is_made else read_segment(dataset, work, segment)
        if not is_made:
            self.tally.read(since_us)
        if isinstance(sample, StorageError):
            raise sample
        clock = self.clock
        try:
            timed = nullcontext() if clock is None else clock.at(work.source, sample_id, worker=self._worker)
            with timed:
                processed = process_segment(dataset, work, segment, sample, memory, pack=pack, is_made=is_made)
            if not is_made:
                self.tally.sample(sample_id, self.tally.clock_us() - since_us)
        except Exception as error:
            if not self._quarantines(error):
                name_sample(error, dataset.name_of(sample_id))
                raise
            self._quarantine(work, sample_id, error)
            return padding_of(length)
        if checks_keys:
            check_keys(processed, made_by=type(dataset.processor).__name__)
        return piece_of(dataset, work, segment, processed)

    def _left_out_of(self, work: Work, segments: range) -> list[LeftOutSample]:
        """Return the samples of some segments left out in the step of a work, without duplicates."""
        if not self.left_out:
            return []
        ids = dict.fromkeys(work.segments.sample_ids[segments.start : segments.stop].tolist())
        found = [self.left_out.get(work.source, each) for each in ids if self._is_left_out(work, each)]
        return [each for each in found if each is not None]

    def _is_left_out(self, work: Work, sample_id: int) -> bool:
        """Whether a sample is left out: a quarantined sample always, a dropped sample from since_step on."""
        found = self.left_out.get(work.source, sample_id) if self.left_out else None
        return found is not None and (found.kind == "quarantined" or found.since_step <= self._step_of(work))

    def _quarantines(self, error: Exception) -> bool:
        return self.settings.bad.on_bad_sample == "quarantine" and is_of_sample(error)

    def _quarantine(self, work: Work, sample_id: int, error: Exception) -> LeftOutSample:
        """Leave a sample out from now on, and append the sample to the list in the folder."""
        sample = LeftOutSample(work.source, sample_id, reason_of(error), self._step_of(work), "quarantined")
        self.left_out.add(sample)
        if self.settings.bad.folder is not None:
            rank, identity = self.settings.steps.world.rank, self.datasets[work.source].identity
            folder = Path(self.settings.bad.folder)
            append_left_out(folder, sample, dataset=identity, rank=rank, worker=self._worker)
        return sample

    def _fill(self, work: Work) -> Iterator[Batch]:
        """Yield the batches of packs that the processor makes directly from the shards, in shared rows."""
        self.tally.begin(work.source)
        dataset, segments, pad_to = self.datasets[work.source], work.segments, self.settings.pad_to
        ends = np.zeros(len(segments.lengths) + 1, np.int32)
        np.cumsum(segments.lengths, out=ends[1:])
        rows = self._memory.rows(int(ends[-1]))
        addresses, opened = dataset.pack_reader.addresses(segments.shard_ids)
        columns, fill = dataset.stored[0].shards[0].columns, self._fillers[work.source].fill_packs
        ids = {*segments.sample_ids.tolist()} if self.left_out else ()
        left_out = [each for each in ids if self._is_left_out(work, each)]
        while True:
            try:
                learnt = fill_with_padding(fill, columns, addresses, segments, rows, left_out=left_out)
                break
            except SegmentError as error:
                explained = explain(dataset, work, error)
                if not self._quarantines(explained):
                    raise explained from error
                left_out.append(int(segments.sample_ids[error.segment]))
                self._quarantine(work, left_out[-1], explained)
        del opened  # the shards are read
        self.tally.end(num_packs=len(work.micro_batches), num_samples=len(segments.lengths), only_reads=True)
        firsts = work.bounds[:-1]
        longest = np.maximum.reduceat(segments.lengths, firsts).tolist()
        num_loss_tokens = np.add.reduceat(learnt, firsts).tolist()
        for pack, (micro_batch, parts) in enumerate(zip(work.micro_batches, _split(work, rows, ends), strict=True)):
            input_ids, labels, position_ids, cu_seqlens, sample_ids = parts
            batch = Batch(
                input_ids=input_ids,
                labels=labels,
                position_ids=position_ids,
                cu_seqlens=cu_seqlens,
                sample_ids=sample_ids,
                max_seqlen=longest[pack],
                num_loss_tokens=num_loss_tokens[pack],
                source=work.source,
                step=self._step_of(work),
                micro_batch=micro_batch,
                repeats=work.repeats[work.bounds[pack] : work.bounds[pack + 1]],
                holds_one=self._holds_one,
            )
            if pad_to is not None and batch.num_tokens < pad_to:
                batch = _padded(batch, pad_to)
            if left_out:
                batch = replace(batch, left_out=self._left_out_of(work, range(*work.bounds[pack : pack + 2].tolist())))
            yield batch


def _split(work: Work, rows: TokenRows, ends: NDArray[np.int32]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield rows, cu_seqlens and sample ids of each pack: views of shared tensors, cheaper than separate arrays.

    ends: the first token of each segment, and the number of all tokens. Each view has a separate autograd version.
    """
    num_segments = np.diff(work.bounds)
    packs = np.repeat(np.arange(len(num_segments)), num_segments + 1)
    cu_seqlens = (
        ends[np.arange(len(packs)) - packs] - ends[work.bounds[packs]]
    )  # each pack has a bound more than segments
    num_tokens = np.diff(ends[work.bounds]).tolist()
    split, tensor = torch.unsafe_split_with_sizes, torch.from_numpy
    return zip(
        *[split(tensor(row), num_tokens, dim=1) for row in rows],
        split(tensor(cu_seqlens), (num_segments + 1).tolist()),
        split(tensor(work.segments.sample_ids), num_segments.tolist()),
        strict=True,
    )


def _padded(batch: Batch, total: int) -> Batch:
    """Return a batch with padding appended in a separate segment."""
    num_tokens = batch.num_tokens
    rows = new_rows(total)
    for target, source in zip(rows, (batch.input_ids, batch.labels, batch.position_ids), strict=True):
        target[:, :num_tokens] = source.numpy()
    write_padding(rows, num_tokens)
    return replace(
        batch,
        input_ids=torch.from_numpy(rows.input_ids),
        labels=torch.from_numpy(rows.labels),
        position_ids=torch.from_numpy(rows.position_ids),
        cu_seqlens=torch.from_numpy(np.append(batch.cu_seqlens.numpy(), np.int32(total))),
        max_seqlen=max(batch.max_seqlen, total - num_tokens),
    )


# Packs made by a processor directly from the shards, with padding instead of left-out samples.

FillPacks = Callable[[Columns, NDArray[np.int64], PackSegments, TokenRows], NDArray[np.int64]]


def fill_with_padding(
    fill: FillPacks,
    columns: Columns,
    addresses: NDArray[np.int64],
    segments: PackSegments,
    rows: TokenRows,
    *,
    left_out: Sequence[int],
) -> NDArray[np.int64]:
    """Write segments into rows with `fill`, and padding for samples in left_out: see PackFiller.

    Returns the loss tokens per segment, int64[num_segments]. A SegmentError numbers the segment among all segments.
    """
    if not left_out:
        return fill(columns, addresses, segments, rows)
    is_kept = ~np.isin(segments.sample_ids, left_out)
    has_tokens = np.repeat(is_kept, segments.lengths)
    kept = PackSegments(*[values[is_kept] for values in segments])
    made = new_rows(int(has_tokens.sum()))
    learnt = np.zeros(len(is_kept), np.int64)
    if len(kept.lengths):
        try:
            learnt[is_kept] = fill(columns, addresses[is_kept], kept, made)
        except SegmentError as error:
            error.segment = int(np.flatnonzero(is_kept)[error.segment])
            raise
    rows.input_ids[:] = PAD_TOKEN_ID
    rows.labels[:] = IGNORED_LABEL
    starts = np.cumsum(segments.lengths) - segments.lengths
    rows.position_ids[:] = np.arange(len(has_tokens)) - np.repeat(starts, segments.lengths)
    for target, source in zip(rows, made, strict=True):
        target[:, has_tokens] = source
    return learnt
