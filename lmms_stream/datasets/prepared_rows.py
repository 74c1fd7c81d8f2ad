"""Rows of a unit -> their samples, tokenized some at a time where tokens are all that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..converters.rows.mapper import Mapper
from ..converters.sources.units import Row
from ..errors import DataError
from ..processors.base import Processor, or_error, process_all, tokenizes_all
from ..processors.measured import groups, sample_bytes
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
    if not tokenizes_all(processor):
        yield from mapped
        return
    for group in groups(mapped, num_bytes=lambda each: sum(map(sample_bytes, each[1].sound))):
        made = process_all(processor, [sample for _, each in group for sample in each.sound])
        for index, each in group:
            num_samples = len(each.sound)
            if made is not None:
                each.made, made = made[:num_samples], made[num_samples:]
            yield index, each


def _samples_of(row: Row, mapper: Mapper, folder: str | None) -> Sequence[Sample] | DataError:
    if row.values is None:
        return DataError(row.error)
    return or_error(mapper.samples, row.values, folder)
