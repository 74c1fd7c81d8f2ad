"""Rows of sources -> pieces of samples for packs, tokenized or measured during reading."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from ....converters.rows.mapper import Mapper, find_mapper
from ....converters.rows.options import SchemaOptions
from ....converters.sources.table import by_index
from ....converters.sources.units import NoRowsError, Row, Unit
from ....errors import ConfigError, DataError, EmptyRowError, PackingError
from ....loader.batch_maker import cut
from ....loader.collate import check_keys
from ....plan.packing import Overlong
from ....processors.base import Measured, Processor, or_error, process_all, process_sample, tokenizes_all
from ....processors.lengths import checked, groups, measured_with_media, measures_media, sample_bytes
from ....storage.failures import disk_errors
from ....types import Processed, Sample
from .building import RowLoader
from .source_files import SourceFile, row_order, sample_id_of
from .source_state import Counts, check_inside
from .streaming_packs import SamplePiece, StreamingPackConfig

LOOK_ROWS = 100  # rows of a file used to find their kind
TOLD_ROWS = 10  # rows left out and named; further rows are only counted
logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRowSettings:
    """Settings from rows to packs.

    overlong: treatment of samples longer than a pack. max_length: longer samples are left out. seed: seed of the order,
    None for the stored order. on_error: unreadable or invalid rows end the run ("fail") or are left out, counted and
    logged ("skip"). loader: changes the rows.
    """

    processor: Processor
    packing: StreamingPackConfig
    rows: SchemaOptions = field(default_factory=SchemaOptions)
    overlong: Overlong = "drop"
    max_length: int | None = None
    seed: int | None = None
    num_lanes: int = 1
    on_error: Literal["fail", "skip"] = "fail"
    loader: RowLoader | None = None


@dataclass(slots=True)
class Tally:
    """Counts in progress."""

    rows: int = 0
    samples: int = 0
    unreadable: int = 0
    empty: int = 0
    overlong: int = 0

    @staticmethod
    def of(counts: Counts) -> Tally:
        return Tally(counts.rows, counts.samples, counts.unreadable, counts.empty, counts.overlong)

    @property
    def counts(self) -> Counts:
        return Counts(
            rows=self.rows,
            samples=self.samples,
            unreadable=self.unreadable,
            empty=self.empty,
            overlong=self.overlong,
        )


class Content(NamedTuple):
    """Tokens [start, start + length) of a sample with num_tokens tokens. row: number of its row in the unit.

    made: the processed sample; None if the processor reads media: their arrays are large, and are made of `sample` when
    the pack is full.
    """

    row: int
    made: Processed | None
    sample: Sample | None
    num_tokens: int
    start: int
    length: int


class RowReader:
    """Reader of the rows of units, with the settings of a SourceRowSettings."""

    def __init__(self, reading: SourceRowSettings):
        self.reading = reading
        self._num_told = 0

    def mapper(self, file: SourceFile) -> Mapper:
        """Return the mapper of a file's rows, found from its first readable rows; equal for every reader.

        Raises NoRowsError for a file without rows, DataError for rows of unknown kind, ConfigError for rows of a kind
        the processor does not read.
        """
        errors: list[DataError] = []
        num_rows = 0
        with disk_errors(file.key):
            for unit in file.opened.units():
                rows = list(islice(unit.rows(), LOOK_ROWS))
                num_rows += len(rows)
                found = [or_error(loaded_rows, row, self.reading.loader, unit.folder) for row in rows]
                errors += (each for each in found if isinstance(each, DataError))
                if values := [values for each in found if not isinstance(each, DataError) for values in each]:
                    break
            else:
                if not num_rows:
                    raise NoRowsError(f"{file.key} holds no rows: leave it out, or write it again")
                why = f", the first because {errors[0]}" if self.reading.loader is not None and errors else ""
                raise DataError(f"{file.key}: none of its rows can be read{why}: check its format")
        try:
            mapper = find_mapper(values, self.reading.rows.changed(file.opened.settings))
        except DataError as error:
            raise DataError(f"{file.key}: {error}") from error
        processor = self.reading.processor
        if mapper.schema != processor.schema:
            raise ConfigError(
                f"{file.key}: the rows are {mapper.schema!r}, and {type(processor).__name__} reads "
                f"{processor.schema!r}: choose another processor_type or dataset_type"
            )
        return mapper

    def rows(
        self,
        file: SourceFile,
        unit: Unit,
        number: int,
        *,
        epoch: int,
        first: int = 0,
        only: Collection[int] | None = None,
    ) -> Iterator[tuple[int, Row]]:
        """Yield rows of a unit with their index in reading order: from `first` on, or only the indices in `only`.

        Other rows are skipped by offset or number without parsing, if the format allows.
        """
        with disk_errors(file.key):
            if self.reading.seed is None and not first and only is None:
                yield from enumerate(unit.rows())
                return
            rows = by_index(unit)
            check_inside("row", first, len(rows), where=f"unit {number} of {file.key}")
            order = np.arange(len(rows))
            if self.reading.seed is not None:
                order = row_order(len(rows), file.key, number, seed=self.reading.seed, epoch=epoch)
            wanted = range(first, len(rows)) if only is None else sorted(at for at in only if at < len(rows))
            yield from zip(wanted, rows.rows(order[list(wanted)].tolist()), strict=True)

    def contents(self, row: RowSamples, *, where: str, tally: Tally) -> list[Content]:
        """Return the pieces of a row; [] if the row is left out and counted."""
        tally.rows += 1
        try:
            if isinstance(row.samples, DataError):
                raise row.samples
            made: Sequence[Processed | DataError | None] = row.made or [None] * len(row.samples)
            found = [
                each
                for sample, processed in zip(row.samples, made, strict=True)
                for each in self._contents(sample, processed, row.number, where=where, tally=tally)
            ]
        except EmptyRowError:
            tally.empty += 1
            return []
        except DataError as error:
            self.leave_out(DataError(f"{where}: {error}"), tally)
            return []
        tally.samples += len(row.samples)
        return found

    def leave_out(self, error: DataError, tally: Tally) -> None:
        """Raise the error, or count it and log the first TOLD_ROWS errors."""
        if self.reading.on_error == "fail":
            raise DataError(f'{error} (or set on_error="skip" to leave out unreadable rows, with a count)') from error
        tally.unreadable += 1
        self._num_told += 1
        if self._num_told <= TOLD_ROWS:
            last = "; more are counted and not named" if self._num_told == TOLD_ROWS else ""
            logger.warning("left out: %s%s", error, last)

    def pass_empty(self, error: NoRowsError) -> None:
        """Log a skipped file without rows; it is one of the files of a folder or glob."""
        logger.warning("passed over: %s", error)

    def samples_of(
        self, pieces: Sequence[SamplePiece], tally: Tally, *, epoch: int
    ) -> tuple[list[Processed], list[int]]:
        """Return the processed pieces of a pack and their sample ids.

        A failed piece is left out and counted if on_error is "skip", else DataError.
        epoch: epoch of the lane, for the processor's random draws.
        """
        made: list[Processed] = []
        sample_ids: list[int] = []
        for ref, content in pieces:
            sample_id = sample_id_of(ref.file, ref.unit, content.row)
            try:
                made.append(self._made(content, [epoch, sample_id]))
            except DataError as error:
                self.leave_out(DataError(f"{row_name(ref.file, ref.unit, content.row)}: {error}"), tally)
                continue
            sample_ids.append(sample_id)
        return made, sample_ids

    def _contents(
        self, sample: Sample, processed: Processed | DataError | None, row: int, *, where: str, tally: Tally
    ) -> list[Content]:
        """Return the pieces of a sample. processed: its result if it was processed together with others."""
        processor = self.reading.processor
        made: Processed | None = None
        if isinstance(processed, DataError):
            raise processed
        if processed is None and measures_media(processor):
            (measured,) = measured_with_media(processor, [sample])
            if isinstance(measured, DataError):
                raise measured
            num_tokens, has_media = checked(measured, what="it").tokens, measured.patches > 0
        else:
            made = processor.process(sample) if processed is None else processed
            check_keys(made, made_by=type(processor).__name__)
            num_tokens, has_media = checked(Measured(len(made["input_ids"])), what="it").tokens, bool(made.get("media"))
        limit, longest = self.reading.packing.packing_length, self.reading.max_length
        if longest is not None and num_tokens > longest:
            tally.overlong += 1
            return []
        whole = Content(row, made, sample if made is None else None, num_tokens, 0, num_tokens)
        return [whole] if num_tokens <= limit else self._cut(whole, has_media, where=where, tally=tally)

    def _cut(self, whole: Content, has_media: bool, *, where: str, tally: Tally) -> list[Content]:
        """Return the pieces of a sample longer than a pack."""
        limit, overlong = self.reading.packing.packing_length, self.reading.overlong
        if overlong == "error":
            raise PackingError(
                f"{where} has {whole.length} tokens, more than packing_length {limit}: raise packing_length, or set "
                "overlong to drop, truncate, split or keep (filter_overlong: true drops, false keeps)"
            )
        tally.overlong += 1
        if overlong == "keep":
            return [whole]
        if overlong == "drop" or has_media:
            return []
        stop = limit if overlong == "truncate" else whole.length
        return [whole._replace(start=start, length=min(limit, stop - start)) for start in range(0, stop, limit)]

    def _made(self, content: Content, drawn: Sequence[int]) -> Processed:
        made = content.made
        if made is None:
            assert content.sample is not None
            made = process_sample(self.reading.processor, content.sample, None, drawn)
            check_keys(made, made_by=type(self.reading.processor).__name__)
        num_tokens, stop = len(made["input_ids"]), content.start + content.length
        if num_tokens != content.num_tokens:
            raise DataError(
                f"it has {num_tokens} tokens, but its measured length is {content.num_tokens}: correct the processor, "
                "whose measure must match the output of process"
            )
        if content.length == num_tokens:
            return made
        return {name: cut(name, value, content.start, stop) for name, value in made.items()}


def row_name(key: str, unit: int, row: int) -> str:
    """Return a row's name for messages; rows and units are counted from 1."""
    return f"{key}: row {row + 1} of unit {unit + 1}"


# Rows of a unit -> their samples, tokenized in groups if only tokens are needed.


@dataclass(slots=True)
class RowSamples:
    """A row and its samples, or its error.

    made: the processed samples; None if each sample is processed separately.
    """

    number: int
    samples: Sequence[Sample] | DataError
    made: Sequence[Processed | DataError] | None = None

    @property
    def sound(self) -> Sequence[Sample]:
        """The row's samples; empty for an error."""
        return () if isinstance(self.samples, DataError) else self.samples


def prepared(
    rows: Iterable[tuple[int, Row]], mapper: Mapper, reading: SourceRowSettings, folder: str | None
) -> Iterator[tuple[int, RowSamples]]:
    """Yield rows as samples, in order; tokenize in groups if only tokens are needed."""
    processor = reading.processor
    mapped = ((index, RowSamples(row.number, _samples_of(row, mapper, folder, reading.loader))) for index, row in rows)
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


def loaded_rows(row: Row, loader: RowLoader | None, folder: str | None) -> list[dict[str, Any]]:
    """Return the rows of a user's dataset for a row; DataError for an unreadable row and for errors of the dataset."""
    if row.values is None:
        raise DataError(row.error)
    return [row.values] if loader is None else loader.rows(row.values, folder)


def _samples_of(row: Row, mapper: Mapper, folder: str | None, loader: RowLoader | None) -> Sequence[Sample] | DataError:
    rows = or_error(loaded_rows, row, loader, folder)
    if isinstance(rows, DataError):
        return rows
    if len(rows) == 1:
        return or_error(mapper.samples, rows[0], folder)
    return or_error(lambda: [sample for values in rows for sample in mapper.samples(values, folder)])
