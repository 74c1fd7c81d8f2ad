"""A segment of a pack -> its sample, processed, or the piece that the pack holds; errors name the sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ConfigError, DataError, LengthsError, LmmsStreamError, StorageError
from ..mds.core import PackedDataset
from ..plan.planner import Work
from ..processors.base import (
    Memory,
    Processor,
    SegmentError,
    process_all,
    process_sample,
    tokenizes_all,
    works_together,
)
from ..processors.measured import groups, sample_bytes
from ..types import Processed, Sample


def processor_that_packs(dataset: PackedDataset) -> Processor:
    """The processor of a dataset, without which it has no packs; ConfigError where it has none."""
    if dataset.processor is None:
        raise ConfigError(f"packs need a processor: give the dataset at {dataset.url} one")
    return dataset.processor


def process_pack(
    dataset: PackedDataset, work: Work, segments: Sequence[int]
) -> dict[int, Processed | DataError | StorageError]:
    """Return what the processor makes of the samples of some segments, or their DataErrors, many samples at once.

    The first segment whose shard cannot be had has its StorageError, so that nobody waits for the shard again. A
    segment is missing behind it, where samples are processed one by one, and where another error is raised for a sample
    that is tokenized with it: process_segment raises the error again, for its sample.
    """
    processor = processor_that_packs(dataset)
    if not tokenizes_all(processor) or works_together(type(processor), "process", "process_drawn"):
        return {}
    made: dict[int, Processed | DataError | StorageError] = {}

    def read() -> Iterator[tuple[int, Sample]]:
        for segment in segments:
            try:
                sample = read_segment(dataset, work, segment)
            except StorageError as error:
                made[segment] = error
                return
            yield segment, sample

    try:
        for group in groups(read(), num_bytes=lambda each: sample_bytes(each[1])):
            found = process_all(processor, [sample for _, sample in group])
            if found is not None:
                made |= zip([segment for segment, _ in group], found, strict=True)
    except Exception:  # noqa: BLE001 - the segment that cannot be read raises it again where it is read by itself
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
    """Return the sample of a segment, processed. memory: for its media. DataError or LengthsError, with its name.

    is_made: `sample` is what process_pack made of the stored sample.
    """
    sample_id, start, length, _, _, expected = (int(values[segment]) for values in work.segments)
    try:
        drawn = [work.epochs[pack] if work.epochs else 0, sample_id]
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
    """The tokens of a segment: all of its sample, unless that is longer than a pack."""
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
    """Have an error that is not ours say which sample it is of, where it is shown."""
    if not isinstance(error, LmmsStreamError):
        error.add_note(sample)


def cut(name: str, value: Any, start: int, stop: int) -> Any:
    """What a piece [start, stop) of a sample's tokens has of a value; positions begin at 0 in each."""
    if name == "media":
        return value
    if name == "token_inputs":
        return {each: values[start:stop] for each, values in value.items()}
    if name == "position_ids":
        own = value[..., start:stop]
        return own - own[..., :1]
    return value[start:stop]


def naming(dataset: PackedDataset, sample_id: int, error: DataError) -> DataError:
    return DataError(f"sample {sample_id} of {dataset.url}: {error}")


def explain(dataset: PackedDataset, work: Work, error: DataError, *, segment: int = -1) -> LmmsStreamError:
    """An error of a processor, with the name of the sample."""
    num_tokens = None
    if isinstance(error, SegmentError):
        segment, num_tokens = error.segment, error.num_tokens
    sample_id, expected = int(work.segments.sample_ids[segment]), int(work.segments.expected[segment])
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
