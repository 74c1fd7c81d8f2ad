"""The lengths of samples, several at once where their processor can do that. samples -> groups -> lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from ..errors import ConfigError, DataError
from ..types import Sample
from .base import MeasureAll, Processor, or_error, works_together

T = TypeVar("T")

_GROUP_SAMPLES = 64  # one at a time, the tokenizer and Python would push each other out of the CPU's caches
_GROUP_BYTES = 1 << 20  # about; what a tokenizer makes of a text takes a hundred times its bytes until it is counted


def measured(processor: Processor, samples: Sequence[Sample]) -> Iterator[int | DataError]:
    """What `processor.measure` gives of each sample, or the DataError that it raises; other errors are raised in turn.

    By its `measure_all`, if it has one for the `measure` that it has.
    """
    if works_together(type(processor), "measure", "measure_all"):
        measure_all: MeasureAll = processor.measure_all  # type: ignore[attr-defined]
        try:
            lengths = measure_all(samples)
        except Exception:  # noqa: BLE001 - one by one, the sample that it comes from raises it again below
            pass
        else:
            yield from _one_each(lengths, samples)
            return
    for sample in samples:
        yield or_error(processor.measure, sample)


def groups(items: Iterable[T], *, num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in their order, as many together as are measured at once. num_bytes: of an item.

    An error that the items raise is raised after what came before it.
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
        except Exception as error:  # noqa: BLE001 - it is raised below
            failure = error
        if group:
            yield group
        elif failure is None:
            return
    raise failure


def sample_bytes(sample: Sample) -> int:
    """Bytes of media and arrays and characters of texts, about what a sample takes in memory."""
    sizes = (len(value) if isinstance(value, str | bytes) else getattr(value, "nbytes", 0) for value in sample.values())
    return sum(sizes)


def checked_length(length: int, *, what: str) -> int:
    """The length of a sample, if a lengths index can hold it; DataError otherwise. what: the sample, for the error."""
    if not 0 < length < 1 << 32:
        raise DataError(f"{what} has {length} tokens, one that can be packed has 1 to 2^32 - 1: remove it")
    return length


def _one_each(lengths: Sequence[int | DataError], samples: Sequence[Sample]) -> Sequence[int | DataError]:
    if len(lengths) != len(samples):
        raise ConfigError(
            f"the processor's measure_all gave {len(lengths)} lengths of {len(samples)} samples: correct it to give "
            "one for each"
        )
    return lengths
