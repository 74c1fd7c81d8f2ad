"""The first rows of sources -> the expected result of a conversion of all rows. Nothing is written.

This process reads, maps, measures and encodes the rows in memory, in the same way as the conversion; only fetched files
are stored in a temporary folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..mds.index import parse_index
from ..mds.shard import Shard
from ..processes.pool import num_cores
from ..processors.not_shown import added, counts_of
from .append import new_sources
from .columns import check_processor, stored_columns, stored_schema, with_processor
from .convert import look
from .dropping import dropped_rows
from .options import ConvertOptions, changed
from .repeats import check_repeats
from .rows import schemas
from .sources.files import Fetch
from .sources.specs import Spec
from .sources.units import NoRowsError, Source, Unit
from .stored.row_counts import RowCounts, UnreadNames, joined_unread, unread_of
from .stored.sample_view import SampleView, Viewer
from .weighted import weighted_parts
from .writing.dropped_rows import DroppedRows, without
from .writing.encoded_units import UnitEncoder, process_each
from .writing.encoding import ShardFormat, compress, index_json
from .writing.placement import Seen
from .writing.reading import LOOK_ROWS, Reading
from .writing.unit_files import EncodedUnit

NUM_ROWS = 10_000
NUM_SAMPLES = 3
_UNIT_BYTES = 1 << 20  # read at once: less than in a conversion, to read few rows more than requested
_NONE = np.empty(0, np.int64)
_COMPRESSED_BYTES = 1 << 23  # of samples, to estimate the size of compressed shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Expected result of a complete conversion, from its first rows; exact if `is_exact`: all rows were read.

    num_bytes: of shards after compression. num_tokens: None without a measuring processor. seconds: on num_workers
    processes.
    """

    num_rows: int
    num_samples: int
    num_bytes: int
    num_tokens: int | None
    num_shards: int
    seconds: float
    num_workers: int
    is_exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun(RowCounts):
    """Result for the first num_rows rows.

    found: for each kind of rows, its first source and the columns read. rejects: "source:row: reason". expected: None
    if the size of a source is unknown. With `concat`, num_samples and samples are documents, and `expected` describes
    the concatenated samples. unread, not_shown: see ConvertReport.
    """

    schema: str
    columns: Mapping[str, str]
    found: tuple[str, ...]
    num_sources: int
    num_sources_read: int
    num_rows: int
    num_samples: int
    rejects: tuple[str, ...]
    samples: tuple[SampleView, ...]
    expected: Expected | None
    unread: UnreadNames
    not_shown: Mapping[str, int]


def dry_run(
    sources: Sequence[str | Path | Spec],
    *,
    options: ConvertOptions | None = None,
    num_rows: int = NUM_ROWS,
    num_samples: int = NUM_SAMPLES,
    num_workers: int | None = None,
    append_to: str | None = None,
    target: str | None = None,
    **changes: Any,
) -> DryRun:
    """Read the first rows of `sources`; return the samples, rejects, requirements and cost of `convert`.

    options, changes: see ConvertOptions. num_rows: minimum of rows to read, the same number per source and at least 100
    per source; of many sources, evenly spread ones are read. num_samples: number of samples to show. num_workers:
    processes for the estimate of time. append_to: dataset; its own sources are passed over. target: of the conversion.

    Raise the errors of `convert` up to its first rows, and DataError for unreadable rows and rows of no known kind.
    """
    num_workers = changes.pop("workers", num_workers)
    options = changed(options, changes)
    if append_to is None and len(parts := weighted_parts(sources, options)) > 0:
        raise ConfigError(
            f"{sources[0]}: its entries have weights, so each of {', '.join(part.name for part in parts[:5])} becomes "
            "a dataset of its own: call dry_runs, or leave the weights out"
        )
    with TemporaryDirectory(prefix="lmms_stream-dry-run-") as folder:
        opened = look(
            sources,
            Path(folder) / "sources",
            options=replace(options, unit_bytes=_UNIT_BYTES),
            target=target or append_to,
        )
        options = with_processor(options, opened)
        if append_to is not None:
            names = [each.name for each in opened]
            opened = new_sources(opened, append_to, options)
            if not opened:
                raise ConfigError(f"{', '.join(names)}: all rows are in {append_to} already: name sources that are new")
        said: list[str] = []
        check_repeats(opened, options, say=said.append)
        read = beginnings(opened, num_rows)
        dropped = dropped_rows(opened, options)
        with closing(Reading(read, options.schema, say=said.append)) as reading:
            check_processor(options.processor, reading.mapper)
            columns = stored_columns(options, reading.mapper)
            if options.concat is not None:  # documents are shown and counted
                columns = schemas.TOKENS.columns
            format = ShardFormat(columns, shard_bytes=options.most_shard_bytes, compression=options.compression)
            tried = _Tried(
                reading, _encoder(format, options), dropped and replace(dropped, sources=[each.name for each in read])
            )
            tried.read_all(read)
        schema = stored_schema(options, reading.mapper)
        samples = tuple(_shown(tried.samples[:num_samples], format, schema, options, folder=Path(folder)))
    return DryRun(
        schema=schema,
        columns=dict(columns),
        found=tuple(said),
        num_sources=len(opened),
        num_sources_read=len(read),
        num_rows=tried.num_rows,
        num_samples=tried.num_samples,
        **tried.left_out.as_dict(),
        rejects=tuple(tried.rejects),
        samples=samples,
        expected=_expected(opened, read, tried, format, options, num_workers),
        unread=tried.unread,
        not_shown=tried.not_shown,
    )


def dry_runs(sources: Sequence[str | Path], *, options: ConvertOptions, **settings: Any) -> dict[str, DryRun]:
    """Return a dry run of each dataset of `convert`, by its name below the target; "" for a single dataset.

    With weights in a list of sources, each weighted entry is a dataset. settings: see dry_run.
    """
    parts = [] if settings.get("append_to") is not None else weighted_parts(sources, options)
    if not parts:
        return {"": dry_run(sources, options=options, **settings)}
    return {part.name: dry_run([part.spec], options=options, **settings) for part in parts}


def _encoder(format: ShardFormat, options: ConvertOptions) -> UnitEncoder:
    """Return the conversion's encoder without a limit; rows that do not fit are skipped."""
    return UnitEncoder(
        folder=Path(),  # no file is written
        format=format,
        processor=options.processor,
        tokenize=options.stores_tokens,
        on_error="skip",
        limit=None,
        shortest=options.shortest,
        longest=options.longest,
        hashes=options.dedup is not None,
        process_each=process_each(options.on_error),
        on_dropped=options.on_dropped,
    )


@dataclass(slots=True)
class _Tried:
    """Counts of the rows read so far. samples: the first encoded samples, at most _COMPRESSED_BYTES."""

    reading: Reading
    encoder: UnitEncoder
    dropped: DroppedRows | None = None
    samples: list[bytes] = field(default_factory=list)
    rejects: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_samples: int = 0
    num_bytes: int = 0  # of samples
    num_tokens: int | None = None
    left_out: RowCounts = field(default_factory=RowCounts)
    unread: UnreadNames = field(default_factory=dict)
    not_shown: Mapping[str, int] = field(default_factory=dict)
    source_bytes: int = 0
    timed: list[tuple[int, float]] = field(default_factory=list)  # bytes of sources and seconds of each unit
    _kept_bytes: int = 0
    _seen: Seen = field(default_factory=Seen)

    def read_all(self, read: Sequence[Beginning]) -> None:
        for task in self.reading.units():
            assert task is not None  # only remote sources are waited for
            started = time.perf_counter()
            samples, encoded = self.encoder.encoded(task)
            self.timed.append((task.unit.num_bytes, time.perf_counter() - started))
            self.reading.has_read(task)
            first = self.reading.rows_before(task)
            stop = first + encoded.num_rows
            numbers = _NONE if self.dropped is None else self.dropped.of_unit(task.source, first, stop)
            encoded, num_dropped = without(encoded, numbers)
            rejects = [f"{name}:{row}: {why}" for name, row, why in self.reading.rejects(task, encoded)]
            self.rejects += rejects
            self.unread = joined_unread(
                [self.unread, unread_of(encoded.unread, source=task.source_name, first_row=first)]
            )
            self.left_out += RowCounts(num_rejected=len(rejects), num_dropped=num_dropped)
            self._count(samples, encoded, ~np.isin(encoded.rows, numbers))
        self.num_rows = sum(each.rows_read for each in read)

    def _count(self, samples: Sequence[bytes], encoded: EncodedUnit, is_kept: NDArray[np.bool_]) -> None:
        """Count the samples of a unit. is_kept: bool[num_samples], False for rows in the drop list."""
        num_left = int(is_kept.sum())
        if encoded.hashes is not None:
            is_kept[is_kept] = self._seen.add(encoded.hashes[is_kept])
        num_duplicates = num_left - int(is_kept.sum())
        self.left_out += RowCounts.of_unit(encoded.left_out, num_rejected=0, num_duplicates=num_duplicates)
        samples = [data for data, keep in zip(samples, is_kept.tolist(), strict=True) if keep]
        for data in samples:
            if self._kept_bytes < _COMPRESSED_BYTES:
                self.samples.append(data)
                self._kept_bytes += len(data)
        self.num_samples += len(samples)
        self.num_bytes += sum(map(len, samples))
        if encoded.lengths is not None:
            lengths = encoded.lengths[is_kept]
            tokens = lengths if lengths.ndim == 1 else lengths[:, 0]
            self.num_tokens = (self.num_tokens or 0) + int(tokens.sum(dtype="int64"))
        if encoded.not_shown is not None:
            self.not_shown = added([self.not_shown, counts_of(encoded.not_shown[is_kept])])

    def seconds_a_byte(self) -> float:
        """Return seconds per byte of the sources; the first unit includes loading, and counts only without others."""
        timed = self.timed[1:] or self.timed
        return sum(seconds for _, seconds in timed) / max(1, sum(num_bytes for num_bytes, _ in timed))


def _expected(
    opened: Sequence[Source],
    read: Sequence[Beginning],
    tried: _Tried,
    format: ShardFormat,
    options: ConvertOptions,
    num_workers: int | None,
) -> Expected | None:
    bytes_read = sum(each.bytes_read for each in read)
    is_exact = len(read) == len(opened) and all(each.is_whole for each in read)
    if not is_exact and not all(source.num_bytes or source.identity.get("tag") for source in opened):
        return None
    rows_a_byte = tried.num_rows / max(1, bytes_read)
    known = sum(each.expected_rows(rows_a_byte) for each in read)
    others = sum(source.num_bytes for source in opened) - sum(each.num_bytes for each in read)
    num_rows = known + others * rows_a_byte
    num_samples = round(num_rows * tried.num_samples / max(1, tried.num_rows))
    if options.limit is not None and options.limit < num_samples:
        num_rows, num_samples = num_rows * options.limit / num_samples, options.limit
    share = num_samples / max(1, tried.num_samples)  # samples of the conversion per sample read
    raw = round(share * (tried.num_bytes + 4 * tried.num_samples))
    num_tokens = None if tried.num_tokens is None else round(share * tried.num_tokens)
    if options.concat is not None and num_tokens is not None:
        is_exact, num_samples = False, -(-num_tokens // options.concat)  # of about the same bytes as the documents
    ratio, seconds_a_raw_byte = _compressed(tried.samples, format)
    workers = num_workers or min(num_cores(), int(share * bytes_read) // options.unit_bytes + 1)
    seconds = share * bytes_read * tried.seconds_a_byte() + raw * seconds_a_raw_byte
    return Expected(
        num_rows=round(num_rows),
        num_samples=num_samples,
        num_bytes=round(raw * ratio),
        num_tokens=num_tokens,
        num_shards=options.num_shards or -(-num_samples // (options.samples_per_shard or num_samples or 1))
        if options.cut.by_samples
        else -(-raw // format.shard_bytes),
        seconds=seconds / workers,
        num_workers=workers,
        is_exact=is_exact,
    )


def _compressed(samples: Sequence[bytes], format: ShardFormat) -> tuple[float, float]:
    """Return bytes after compression per byte of samples, and seconds of compression per byte."""
    data = b"".join(samples)
    if not format.compression or not data:
        return 1.0, 0.0
    started = time.perf_counter()
    size = len(compress(format.compression, data))
    return size / len(data), (time.perf_counter() - started) / len(data)


def _shown(
    samples: Sequence[bytes], format: ShardFormat, schema: str, options: ConvertOptions, *, folder: Path
) -> Iterator[SampleView]:
    """Yield samples in the view of `inspect`, read from a shard in a temporary folder."""
    if not samples:
        return
    path = folder / "shard.00000.mds"
    data = format.shard_head(np.array([len(each) for each in samples], np.int64)) + b"".join(samples)
    path.write_bytes(data)
    plain = ShardFormat(format.columns, shard_bytes=format.shard_bytes)
    entry = plain.index_entry(len(samples), {"basename": path.name, "bytes": len(data), "hashes": {}}, None)
    (info,) = parse_index(index_json([entry]), source="the samples")
    viewer = Viewer(
        schema=schema, processor=options.measured_by, tokenizer=getattr(options.processor, "tokenizer", None)
    )
    shard = Shard(path, info)
    for number, sample in enumerate(samples):
        yield viewer.view(shard[number], number=number, shard=info, num_bytes=len(sample))


# Sources -> the first units of some sources, for a dry run's estimate of all sources.

_MOST_BYTES = 1 << 28  # read of all sources


class Beginning:
    """The first units of a source, as a local source: no worker fetches it."""

    fetch: Fetch | None = None

    def __init__(self, source: Source, *, num_rows: int, num_bytes: int):
        self._source, self._num_rows, self._num_bytes = source, num_rows, num_bytes
        self.name, self.identity = source.name, source.identity
        self.num_bytes, self.rows, self.settings = source.num_bytes, source.rows, source.settings
        self.is_part = source.is_part
        self.rows_read = self.bytes_read = 0
        self.is_whole = False  # True after all rows were read

    @property
    def first_row(self) -> int:
        return self._source.first_row

    def units(self) -> Iterator[Unit]:
        try:
            for unit in self._source.units():
                if self.rows_read >= self._num_rows or self.bytes_read >= self._num_bytes:
                    return
                yield unit
                self.rows_read += unit.count()  # known after reading the unit
                self.bytes_read += unit.num_bytes
        except NoRowsError:
            self.is_whole = True
            raise
        self.is_whole = True

    def close(self) -> None:
        self._source.close()

    def expected_rows(self, rows_a_byte: float) -> float:
        """Rows of the complete source. rows_a_byte: density of all rows read, for a source of which no row was read."""
        if self.is_whole:
            return self.rows_read
        density = self.rows_read / self.bytes_read if self.bytes_read else rows_a_byte
        start, stop, _ = self.rows.indices(int(self.num_bytes * density))
        return max(self.rows_read, stop - start)


def beginnings(sources: Sequence[Source], num_rows: int) -> list[Beginning]:
    """Return the first units of evenly spread sources: the most sources with LOOK_ROWS rows each within num_rows."""
    count = min(len(sources), max(1, num_rows // LOOK_ROWS))
    chosen = [sources[number * len(sources) // count] for number in range(count)]
    return [Beginning(source, num_rows=num_rows // count, num_bytes=_MOST_BYTES // count) for source in chosen]
