"""Lengths of samples, several at once if the processor can. samples -> groups -> lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from ..errors import ConfigError, DataError
from ..types import Sample
from .base import (
    FactsMissingError,
    MeasureAll,
    Measured,
    MeasureMedia,
    MeasureShown,
    NotShownOf,
    Processor,
    or_error,
    works_together,
)

T = TypeVar("T")

_GROUP_SAMPLES = 64  # one at a time, the tokenizer and Python would push each other out of the CPU's caches
_GROUP_BYTES = 1 << 20  # approximate; a tokenizer's result takes a hundred times the text's bytes until it is counted


def measured(processor: Processor, samples: Sequence[Sample]) -> Iterator[int | DataError]:
    """Yield the result of `processor.measure` for each sample, or its DataError; other errors are raised in turn. Uses
    a `measure_all` that matches the processor's `measure`.
    """
    if works_together(type(processor), "measure", "measure_all"):
        measure_all: MeasureAll = processor.measure_all  # type: ignore[attr-defined]
        try:
            lengths = measure_all(samples)
        except Exception:  # noqa: BLE001 - the failing sample raises the error again below
            pass
        else:
            yield from _one_each(lengths, samples, name="measure_all")
            return
    for sample in samples:
        yield or_error(processor.measure, sample)


def measures_media(processor: Processor) -> bool:
    """Return whether a processor measures the media of its samples: it has a `measure_media` for its `measure`."""
    return works_together(type(processor), "measure", "measure_media")


def measured_columns(processor: Processor) -> tuple[str, ...]:
    """Columns needed to measure samples; see `measured_with_media` for samples that need all columns."""
    if not measures_media(processor):
        return processor.columns
    return tuple(getattr(processor, "measured_columns", processor.columns))


def measured_with_media(
    processor: Processor, samples: Sequence[Sample], *, whole: Callable[[int], Sample] | None = None
) -> Iterator[Measured | DataError]:
    """Yield the length of each sample, or its DataError; other errors are raised in turn.

    Samples need only measured_columns. whole: sample index -> the sample with all columns, called if the facts of its
    media are not stored (default: the samples are whole). A processor without `measure_media` measures only tokens.
    """
    if not measures_media(processor):
        for length in measured(processor, samples):
            yield length if isinstance(length, DataError) else Measured(operator.index(length))
        return
    measure_media: MeasureMedia = processor.measure_media  # type: ignore[attr-defined]
    found: Sequence[Measured | DataError] | None = None
    try:
        found = measure_media(samples)
    except Exception:  # noqa: BLE001 - the failing sample raises the error again below
        pass
    else:
        _one_each(found, samples, name="measure_media")
    for index, sample in enumerate(samples):
        each = found[index] if found is not None else or_error(_measured_alone, measure_media, sample)
        if isinstance(each, FactsMissingError) and whole is not None:
            each = or_error(_measured_alone, measure_media, whole(index))
        yield each


def tells_not_shown(processor: Processor) -> bool:
    """Return whether a processor reports content of its samples that its chat template does not show."""
    return works_together(type(processor), "measure", "not_shown")


def with_not_shown(
    processor: Processor, samples: Sequence[Sample], found: Iterable[Measured | DataError]
) -> Iterator[Measured | DataError]:
    """Yield each result of `found` with the content that the chat template of `processor` does not show, as bits."""
    if not tells_not_shown(processor):
        yield from found
        return
    not_shown_of: NotShownOf = processor.not_shown  # type: ignore[attr-defined]
    for each, bits in zip(found, not_shown_of(samples), strict=True):
        if isinstance(each, DataError) or isinstance(bits, DataError):
            yield each
        else:
            yield each._replace(not_shown=bits)


def shown_lengths(
    processor: Processor, samples: Sequence[Sample], *, whole: Callable[[int], Sample] | None = None
) -> Iterator[Measured | DataError]:
    """Yield the result of `measured_with_media` for each sample, with the content that the chat template does not show.

    Samples are read once by a processor with a `measure_shown` that matches its `measure`.
    """
    if works_together(type(processor), "measure", "measure_shown"):
        measure_shown: MeasureShown = processor.measure_shown  # type: ignore[attr-defined]
        try:
            lengths = measure_shown(samples)
        except Exception:  # noqa: BLE001 - the failing sample raises the error again below
            pass
        else:
            yield from _one_each(lengths, samples, name="measure_shown")
            return
    yield from with_not_shown(processor, samples, measured_with_media(processor, samples, whole=whole))


def _measured_alone(measure_media: MeasureMedia, sample: Sample) -> Measured:
    (found,) = _one_each(measure_media([sample]), [sample], name="measure_media")
    if isinstance(found, DataError):
        raise found
    return found


def groups(items: Iterable[T], *, num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, in groups that are measured together. num_bytes: of an item.

    An error of the items is raised after the items before it.
    """
    following = iter(items)
    failure: Exception | None = None
    while failure is None:
        group: list[T] = []
        room = _GROUP_BYTES
        try:
            for item in islice(following, _GROUP_SAMPLES):
                group.append(item)
                room -= num_bytes(item)
                if room <= 0:
                    break
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        if group:
            yield group
        elif failure is None:
            return
    raise failure


def sample_bytes(sample: Sample | DataError) -> int:
    """Approximate memory of a sample: bytes of media and arrays, and characters of texts; 0 for an error."""
    num_bytes = 0
    for value in () if isinstance(sample, DataError) else sample.values():
        num_bytes += len(value) if isinstance(value, str | bytes) else getattr(value, "nbytes", 0)
    return num_bytes


def checked(found: Measured, *, what: str) -> Measured:
    """Return the length of a sample, if an index can hold it; raise DataError otherwise. what: the sample, for the
    error.
    """
    if not 0 < found.tokens < 1 << 32:
        raise DataError(f"{what} has {found.tokens} tokens, expected 1 to 2^32 - 1: remove it")
    of_media = found[2:5]
    if not 0 <= found.patches < 1 << 32 or min(of_media) < 0 or sum(of_media) > found.tokens:
        raise DataError(
            f"{what} was measured as {found}: patches are from 0 to 2^32 - 1, and tokens of media at most all of its "
            "tokens; correct the processor's measure_media"
        )
    return found


def _one_each(found: Sequence[T], samples: Sequence[Sample], *, name: str) -> Sequence[T]:
    if len(found) != len(samples):
        raise ConfigError(
            f"the processor's {name} gave {len(found)} lengths of {len(samples)} samples: it must return a length for "
            "each sample; correct the processor"
        )
    return found
