"""A unit of rows -> an encoded unit: the bytes of its samples in a shard, in a file of the work folder.

One process encodes a unit; the bytes do not depend on the process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError, EmptyRowError, WorkerError
from ...processors.base import AMOUNTS, Measured, Processor, or_error, through
from ...processors.lengths import (
    checked,
    groups,
    measured_with_media,
    measures_media,
    sample_bytes,
    shown_lengths,
    tells_not_shown,
    with_not_shown,
)
from ...processors.not_shown import OnDropped, check_shown, keys_named
from ...processors.text import TokensProcessor
from ...storage.failures import disk_errors
from ...types import Sample
from ..rows.mapper import Mapper
from ..rows.speakers import SPEAKER
from ..rows.tokens import to_tokens
from ..rows.user_functions import RowFunctions
from ..sources.mds import ShardSamples
from ..sources.units import Row, Unit
from ..stored.catalog import check_processed
from ..stored.row_counts import KEY_OF_MESSAGES, REASONS, Why
from .documents import document_of
from .encoding import ShardFormat
from .unit_files import EncodedUnit, LossSpans, about_path, failed_path, samples_path, temporary_beside

OnError = Literal["fail", "skip"]
_Found = tuple[Sample | DataError, Measured | DataError]  # sample to store, and its measured length
_NO_SPANS = np.empty((0, 2), np.int32)
_NOTHING = Measured(0)  # length without a processor
NONE_FITS = " (none of the first rows fits)"
_LOOK_ROWS = 100  # rows after a row that does not fit, which show whether any row fits
_BUFFER_BYTES = 1 << 18
_PROCESS_EACH = 1000  # n: 1 of n rows is processed, other rows are only measured


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTask:
    """Read a unit and encode the rows. number: among all units. source: number of the source. index: of the unit in the
    source.

    functions: the user's functions for the rows. mapper: None if the functions leave no row to detect the kind from.
    """

    number: int
    unit: Unit
    mapper: Mapper | None
    source: int
    source_name: str
    functions: RowFunctions | None = None
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEncoder:
    """Encodes units. processor: measures samples; with `tokenize`, its tokens are stored.

    on_error: at a row that does not fit, the unit ends with this row as its only reject, or continues. limit: number of
    samples; a unit ends with the row that reaches the limit. shortest, longest: samples of fewer or more tokens are
    left out. hashes: hash each sample. documents: samples of tokens become parts of other samples; only their tokens
    are stored. links: link to local shards instead of copying their samples. process_each: n: 1 of n rows is processed,
    other rows are only measured; None: decided by on_error. on_dropped: whether tools and tool calls that the
    processor's chat template does not show are an error.
    """

    folder: Path
    format: ShardFormat
    processor: Processor | None
    tokenize: bool
    on_error: OnError
    limit: int | None
    shortest: int | None
    longest: int | None
    hashes: bool = False
    documents: bool = False
    process_each: int | None = None
    links: bool = True
    on_dropped: OnDropped = "error"

    def encoded(self, task: UnitTask) -> tuple[list[bytes], EncodedUnit]:
        """Return the bytes of the samples and their description, in memory."""
        encoding = _Encoding(self, task)
        return list(encoding.samples()), encoding.encoded_unit()

    def encode(self, task: UnitTask, on_bytes: Callable[[int], None]) -> bool:
        """Write the samples, then their description; return False if a row ended the unit early."""
        if isinstance(task.unit, ShardSamples) and task.unit.is_moved and self.processor is None and not self.tokenize:
            self._move(task.number, task.unit)
            on_bytes(task.unit.num_bytes)
            return True
        encoding = _Encoding(self, task)
        temporary = temporary_beside(samples_path(self.folder, task.number))
        with temporary.open("wb", buffering=_BUFFER_BYTES) as file:
            for data in encoding.samples():
                file.write(data)
        temporary.replace(samples_path(self.folder, task.number))
        encoded, is_whole = encoding.encoded_unit(), not encoding.has_failed
        encoded.save(about_path(self.folder, task.number) if is_whole else failed_path(self.folder, task.number))
        on_bytes(task.unit.num_bytes)
        return is_whole

    def _move(self, number: int, unit: ShardSamples) -> None:
        """Copy or link the shard's raw samples, then write their description; nothing is decoded."""
        temporary = temporary_beside(samples_path(self.folder, number))
        file = unit.file if self.links else None
        with disk_errors(unit.url), unit.shard() as shard:
            if file is None:
                with temporary.open("wb") as copy:
                    for first, stop in consecutive(unit.numbers):
                        copy.write(shard.stored(first, stop))
            else:
                temporary.symlink_to(file)
            places = None if file is None else shard.first_bytes[unit.numbers]
            sizes = shard.sample_bytes[unit.numbers]
            hashes = (
                _hashes(shard.stored(number, number + 1) for number in unit.numbers.tolist()) if self.hashes else None
            )
        temporary.replace(samples_path(self.folder, number))
        rows = unit.first + unit.numbers
        EncodedUnit(
            sizes=sizes,
            rows=rows,
            lengths=None,
            rejects=[],
            left_out={},
            hashes=hashes,
            num_rows=unit.num_rows,
            places=places,
        ).save(about_path(self.folder, number))


def _hashes(samples: Iterable[bytes | memoryview]) -> NDArray[np.uint64]:
    """Hashes of samples in their stored bytes: uint64[n, 2]."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, samples)), np.uint64).reshape(-1, 2)


def consecutive(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ascending numbers as runs [first, stop).

    >>> list(consecutive(np.array([0, 1, 2, 5, 7, 8])))
    [(0, 3), (5, 6), (7, 9)]
    """
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for run in np.split(numbers, breaks):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1


def process_each(on_error: OnError) -> int:
    """Return n: 1 of n rows is processed; all rows if rows that do not fit are left out."""
    return 1 if on_error == "skip" else _PROCESS_EACH


class _Encoded(NamedTuple):
    """Bytes of a sample in a shard, spans of a document, and measured length."""

    data: bytes
    spans: NDArray[np.int32]
    found: Measured


class _Encoding:
    """An encoded unit during encoding."""

    def __init__(self, encoder: UnitEncoder, task: UnitTask):
        self._encoder = encoder
        self._unit = task.unit
        self._source_name = task.source_name
        self._mapper = task.mapper
        self._functions = task.functions
        self._simple = None if task.functions is not None or task.mapper is None else task.mapper.read_simple
        self._sizes: list[int] = []
        self._rows: list[int] = []
        self._lengths: list[int | tuple[int, ...]] = []
        self._rejects: list[tuple[int, str]] = []
        self._left_out: dict[Why, list[int]] = {why: [] for why in REASONS}
        self._unread: dict[str, list[int]] = {}  # name -> rows with a value of this unread name
        self._hashes: list[bytes] = []
        self._spans: list[NDArray[np.int32]] = []  # of each document
        self._measures: Processor | None = TokensProcessor() if encoder.tokenize else encoder.processor
        has_media = self._measures is not None and measures_media(self._measures)
        self._shape = (-1, AMOUNTS) if has_media else (-1,)  # of the array of lengths
        self._not_shown: list[int] = []
        self._named_keys = keys_named(encoder.processor)
        self.has_failed = False  # a row did not fit, and on_error is "fail"
        self._is_full = encoder.limit == 0

    def samples(self) -> Iterator[bytes]:
        """Yield the bytes of the kept samples. A row that ends the unit is noted with NONE_FITS if no row of the unit's
        first rows fits.
        """
        rows = self._unit.rows()
        try:
            with disk_errors(self._source_name):
                yield from self._unmeasured(rows) if self._measures is None else self._measured(rows)
        finally:  # an error keeps its frames, and so the rows and their open files
            if isinstance(rows, Generator):
                rows.close()

    def _unmeasured(self, rows: Iterator[Row]) -> Iterator[bytes]:
        """Yield the bytes of samples that have no length; the most frequent rows are read and encoded at once."""
        found = ([(sample, _NOTHING) for sample in self._mapped(row)] for row in rows)
        read, encode = None if self._encoder.documents else self._simple, self._encoder.format.encode
        for row in rows:
            sample = None if read is None or row.values is None else read(row.values)
            try:
                data = row.stored if sample is None or row.stored is not None else encode(sample)
            except DataError:  # raised again below, from the row
                sample = data = None
            if sample is None or data is None:
                yield from self._kept(row, [(sample, _NOTHING) for sample in self._mapped(row)], later=found)
            else:
                self._add(row.number, data)
                yield data
            if self.has_failed or self._is_full:
                return

    def _measured(self, rows: Iterator[Row]) -> Iterator[bytes]:
        """Yield the bytes of samples with a length; the rows are measured in groups."""
        mapped = ((row, self._mapped(row)) for row in rows)
        found = (
            (row, [*islice(measured, len(samples))])
            for group in groups(mapped, num_bytes=lambda item: sum(map(sample_bytes, item[1])))
            for measured in (self._with_lengths([sample for _, samples in group for sample in samples]),)
            for row, samples in group
        )
        for row, samples in found:
            yield from self._kept(row, samples, later=(samples for _, samples in found))
            if self.has_failed or self._is_full:
                return

    def _with_lengths(self, made: Sequence[Sample | DataError]) -> Iterator[_Found]:
        """Yield the samples to store, each with its length."""
        processor, stored = self._encoder.processor, made
        assert self._measures is not None
        if processor is not None and self._encoder.tokenize:
            keep_masked = self._encoder.on_dropped == "warn"
            stored = through(made, partial(to_tokens, processor=processor, keep_masked=keep_masked))
        kept = [sample for sample in stored if not isinstance(sample, DataError)]
        if processor is None or stored is made:
            lengths = shown_lengths(self._measures, kept)
        else:
            read = [
                sample
                for sample, tokens in zip(made, stored, strict=True)
                if not (isinstance(sample, DataError) or isinstance(tokens, DataError))
            ]
            lengths = with_not_shown(processor, read, measured_with_media(self._measures, kept))
        for sample in stored:
            yield sample, _NOTHING if isinstance(sample, DataError) else next(lengths)

    def _mapped(self, row: Row) -> Sequence[Sample | DataError]:
        """Return the samples of a row; an error in place of all of them if one does not fit."""
        if row.values is None:
            return [DataError(row.error)]
        sample = None if self._simple is None else self._simple(row.values)
        if sample is not None:
            return [sample]
        rows: Sequence[dict[str, Any]] | DataError = [row.values]
        if self._functions is not None:
            rows = or_error(self._rows_left, row.number, row.values, self._functions)
        if isinstance(rows, DataError):
            return [rows]
        mapped: list[Sample | DataError] = []
        for values in rows:
            if self._mapper is None:
                raise WorkerError(
                    f"{self._source_name}: the functions of --filter and --map left out all rows before, and now keep "
                    "a row: their results must depend only on the row: correct the functions"
                )
            keys: set[str] = set()
            samples = or_error(self._mapper.samples, values, self._unit.folder, keys)
            if isinstance(samples, DataError):
                if not isinstance(samples, EmptyRowError):
                    return [samples]
                mapped.append(samples)
                continue
            noted = sorted(key for key in keys if key.removeprefix(SPEAKER) not in self._named_keys)
            unread = [f"{KEY_OF_MESSAGES}{key}" for key in noted]
            if self._mapper.synonyms or not values.keys() <= self._mapper.names:
                unread += self._mapper.unread(values)
            for name in unread:
                numbers = self._unread.setdefault(name, [])
                if row.number not in numbers[-1:]:  # the map may make several of a row
                    numbers.append(row.number)
            mapped += samples
        return mapped

    def _rows_left(self, number: int, values: dict[str, Any], functions: RowFunctions) -> Sequence[dict[str, Any]]:
        """Apply the user's functions to a row; count a row that they leave out."""
        if not functions.keeps(values):
            self._left_out["by_filter"].append(number)
            return []
        rows = functions.rows(values)
        if not rows:
            self._left_out["by_map"].append(number)
        return rows

    def _kept(self, row: Row, made: Sequence[_Found], *, later: Iterable[Sequence[_Found]]) -> list[bytes]:
        """Return the bytes of a row's samples, without samples that are left out; [] if a sample does not fit.

        A row is stored or rejected with all its samples. later: samples of the rows after it.
        """
        try:
            encoded = [self._encoded(row, sample, found) for sample, found in made]
        except DataError as error:
            self._rejects.append((row.number, str(error)))
            self.has_failed = self._encoder.on_error == "fail"
            if self.has_failed and not self._sizes:
                found = chain.from_iterable(islice(later, _LOOK_ROWS))
                if all(any(isinstance(each, DataError) for each in pair) for pair in found):
                    self._rejects = [(number, f"{reason}{NONE_FITS}") for number, reason in self._rejects]
            return []
        kept = [each for each in encoded if isinstance(each, _Encoded)]
        for each in encoded:
            if not isinstance(each, _Encoded):
                self._left_out[each].append(row.number)
        for each in kept:
            self._add(row.number, each.data, each.spans)
            self._lengths.append(each.found[:AMOUNTS] if len(self._shape) > 1 else each.found.tokens)
            self._not_shown.append(each.found.not_shown)
        return [each.data for each in kept]

    def _add(self, number: int, data: bytes, spans: NDArray[np.int32] = _NO_SPANS) -> None:
        if self._encoder.hashes:
            hashed = xxhash.xxh3_128(data)
            hashed.update(spans.tobytes())
            self._hashes.append(hashed.digest())
        self._sizes.append(len(data))
        self._rows.append(number)
        if self._encoder.documents:
            self._spans.append(spans)
        self._is_full = self._encoder.limit is not None and len(self._sizes) >= self._encoder.limit

    def _encoded(self, row: Row, sample: Sample | DataError, found: Measured | DataError) -> _Encoded | Why:
        """Return a sample's bytes in a shard, or the reason to leave it out; DataError if it does not fit."""
        try:
            if isinstance(sample, DataError):
                raise sample
            if isinstance(found, DataError):
                raise found
            if self._measures is not None:
                checked(found, what="the sample")
                if found.not_shown:
                    check_shown(found.not_shown, on_dropped=self._encoder.on_dropped)
                # Rows processed in full, as in training, show errors that all rows of a kind have.
                if row.number % (self._encoder.process_each or process_each(self._encoder.on_error)) == 0:
                    check_processed(self._measures, sample, length=found.tokens)
            stored = None if self._encoder.tokenize else row.stored
            spans: NDArray[np.int32] = _NO_SPANS
            if self._encoder.documents:
                stored, spans = document_of(sample)
            data = self._encoder.format.encode(sample) if stored is None else stored
        except EmptyRowError:
            return "empty"
        tokens = found.tokens
        if self._measures and not (self._encoder.shortest or 0) <= tokens <= (self._encoder.longest or tokens):
            return "filtered"
        return _Encoded(data, spans, found)

    def encoded_unit(self) -> EncodedUnit:
        processor = self._encoder.processor
        tells = processor is not None and tells_not_shown(processor)
        return EncodedUnit(
            sizes=np.array(self._sizes, np.int64),
            rows=np.array(self._rows, np.int64),
            lengths=np.array(self._lengths, np.uint32).reshape(self._shape) if self._measures else None,
            rejects=self._rejects,
            left_out={why: np.array(numbers, np.int64) for why, numbers in self._left_out.items()},
            hashes=np.frombuffer(b"".join(self._hashes), np.uint64).reshape(-1, 2) if self._encoder.hashes else None,
            # Not needed after an early end: no unit follows.
            num_rows=0 if self.has_failed or self._is_full else self._unit.count(),
            spans=LossSpans.of(self._spans) if self._encoder.documents else None,
            unread={name: np.array(rows, np.int64) for name, rows in self._unread.items()},
            not_shown=np.array(self._not_shown, np.uint32) if tells else None,
        )
