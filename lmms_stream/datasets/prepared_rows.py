"""Rows of a unit -> their samples, tokenized some at a time where tokens are all that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..converters.rows.mapper import Mapper
from ..converters.sources.units import Row
from ..errors import DataError
from ..processors.base import Processor, TokenizeAll, or_error, works_together
from ..processors.measured import groups, sample_bytes
from ..processors.spans import labels_of
from ..types import Processed, Sample


@dataclass(slots=True)
class Prepared:
    """A row and its samples, or the error that it is.

    made: what the processor makes of each sample; None where that is made one by one.
    """

    number: int
    samples: Sequence[Sample] | DataError
    made: Sequence[Processed | DataError] | None = None

    @property
    def sound(self) -> Sequence[Sample]:
        """Its samples, none of an error."""
        return () if isinstance(self.samples, DataError) else self.samples


def prepared(
    rows: Iterable[tuple[int, Row]], mapper: Mapper, processor: Processor, folder: str | None
) -> Iterator[tuple[int, Prepared]]:
    """Rows as samples, in their order; where tokens are all that is made of them, some at a time."""
    mapped = ((index, Prepared(row.number, _samples_of(row, mapper, folder))) for index, row in rows)
    if not works_together(type(processor), "process", "tokenize_all"):
        yield from mapped
        return
    for group in groups(mapped, num_bytes=lambda each: sum(map(sample_bytes, each[1].sound))):
        made = _tokenized([sample for _, each in group for sample in each.sound], processor)
        for index, each in group:
            num_samples = len(each.sound)
            if made is not None:
                each.made, made = made[:num_samples], made[num_samples:]
            yield index, each


def _tokenized(samples: Sequence[Sample], processor: Processor) -> list[Processed | DataError] | None:
    """What the processor makes of samples; None where it fails, and one by one tells of which."""
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    try:
        found = tokenize_all(samples)
    except Exception:  # noqa: BLE001 - one by one, the sample that it comes from raises it again
        return None
    return [each if isinstance(each, DataError) else _processed(*each) for each in found]


def _samples_of(row: Row, mapper: Mapper, folder: str | None) -> Sequence[Sample] | DataError:
    if row.values is None:
        return DataError(row.error)
    return or_error(mapper.samples, row.values, folder)


def _processed(ids: NDArray[np.int32], spans: Sequence[tuple[int, int]]) -> Processed:
    """As `process` makes it."""
    input_ids = ids.astype(np.int64)
    return {"input_ids": input_ids, "labels": labels_of(input_ids, spans)}
