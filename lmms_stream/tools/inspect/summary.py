"""Summary of a stored dataset for people. dataset -> columns, sizes, lengths, some samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...converters.stored.catalog import Catalog, columns_of, local_file, open_lengths, read_catalog, stored_processor
from ...converters.stored.sample_view import SampleView, Viewer
from ...errors import ConfigError, LengthsError, LmmsStreamError, ShardError, StorageError
from ...mds.index import ShardInfo, decoded_columns
from ...mds.provenance import Provenance
from ...mds.shard import AnyShard, fetch_shard, open_shard
from ...processors import ProcessorChoice
from ...processors.base import IGNORED_LABEL, Processor
from ...processors.not_shown import counts_text
from ...processors.text import TokensProcessor
from ...storage.cache import LocalCache
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage

MAX_HEADERS = 4096  # headers of local shards to read for the sizes of samples
MAX_FETCHED = 4  # shards to download or decompress for the sizes of samples
MAX_LENGTHS_BYTES = 1 << 28  # of a remote lengths index to download
NUM_BINS = 16
NUM_SHARES = 10  # bins of shares from 0 to 1
MAX_DRAWN = 128  # samples read for the histograms of images and of tokens that are trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    minimum: int
    median: float
    maximum: int

    @staticmethod
    def of(values: NDArray[np.integer[Any]]) -> Spread:
        return Spread(minimum=int(values.min()), median=float(np.median(values)), maximum=int(values.max()))


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsView:
    """One lengths index. counts[i]: samples with edges[i] <= tokens < edges[i + 1]. not_shown: number of samples with
    content left out by the chat template, by kind of content.
    """

    fingerprint: str
    processor: Mapping[str, Any]
    num_tokens: int
    tokens: Spread
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    not_shown: Mapping[str, int]


class Histogram(NamedTuple):
    """counts[i]: values with edges[i] <= value < edges[i + 1]; the last bin has its upper edge, too."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnView:
    """Facts of samples drawn evenly from the shards that are read.

    image_sides: longer side of each of their images, in pixels; None without images. trained_shares: share of each
    sample's tokens that is trained on, 0 to 1; None without a processor.
    """

    num_samples: int
    image_sides: Histogram | None
    trained_shares: Histogram | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """num_bytes: decompressed bytes of all shards; stored_bytes: compressed bytes. sample_bytes: sizes of the samples
    in num_measured_shards shards. compression: None without compression. not_shown: number of samples with content left
    out by the chat template during the conversion, by kind of content. notes: omissions of this summary, with reasons.
    """

    url: str
    schema: str | None
    columns: Mapping[str, str]
    compression: str | None
    num_samples: int
    num_shards: int
    num_bytes: int
    stored_bytes: int
    num_measured_shards: int
    sample_bytes: Spread
    lengths: tuple[LengthsView, ...]
    drawn: DrawnView
    samples: tuple[SampleView, ...]
    not_shown: Mapping[str, int]
    notes: tuple[str, ...]


def inspect_dataset(
    remote: str,
    *,
    first: int = 0,
    num_samples: int = 1,
    source: str | None = None,
    tokenizer: str | None = None,
    processor: Processor | None = None,
    on_start: Callable[[int], None] = lambda count: None,
    on_shard: Callable[[], None] = lambda: None,
) -> Inspection:
    """Inspect the dataset at a folder or URL: its index, and `num_samples` samples starting at `first`.

    first: negative numbers count from the end. source: "FILE:ROW", a row of a source, counted from 1; show the samples
    made from this row instead. tokenizer: folder or hub id of a tokenizer or media processor, to show the tokens
    trained on. processor: processor of the samples (default: by schema).
    For remote or compressed datasets, a few shards are downloaded or decompressed into a temporary folder, one at a
    time. on_start: called with the number of shards to read. on_shard: called after each shard. Raises ConfigError,
    StorageError, ShardError, DataError for samples with invalid content for their schema.
    """
    storage = open_storage(remote)
    refused: dict[str, str] = {}
    catalog = read_catalog(storage, refused=refused)
    chosen: Sequence[int] = _choose(first, num_samples, total=catalog.num_samples)
    if processor is None and tokenizer is not None and catalog.schema not in (None, TokensProcessor.schema):
        processor = stored_processor(remote, ProcessorChoice(tokenizer=tokenizer))
    viewer = Viewer.load(catalog.schema, tokenizer, processor)
    notes = [*refused.values(), *_other_columns(catalog)]
    with TemporaryDirectory(prefix="lmms_stream-inspect-", ignore_cleanup_errors=True) as folder:
        if source is not None:
            chosen = samples_of_row(storage, Path(folder), source)
        lengths = [
            view
            for key in catalog.fingerprints
            if (view := _view_lengths(catalog, key, Path(folder), notes)) is not None
        ]
        cache = LocalCache(storage, Path(folder))
        drawing = Drawing(viewer)
        sizes, read = _read_shards(
            catalog, chosen, viewer, drawing=drawing, cache=cache, notes=notes, on_start=on_start, on_shard=on_shard
        )
        samples = with_sources(read, storage, Path(folder), notes)
    kinds = sorted({info.compression or "none" for info in catalog.shards})
    return Inspection(
        url=storage.url,
        schema=catalog.schema,
        columns=columns_of(catalog.shards),
        compression=None if kinds == ["none"] else ", ".join(kinds),
        num_samples=catalog.num_samples,
        num_shards=len(catalog.shards),
        num_bytes=sum(info.size for info in catalog.shards),
        stored_bytes=sum(info.zip_size or info.size for info in catalog.shards),
        num_measured_shards=len(sizes),
        sample_bytes=Spread.of(np.concatenate(sizes)),
        lengths=tuple(lengths),
        drawn=drawing.view(notes),
        samples=samples,
        not_shown=(catalog.dataset or {}).get("not_shown", {}),
        notes=tuple(notes),
    )


def inspect_sample(remote: str, number: int, *, processor: Processor | None = None) -> tuple[SampleView, int]:
    """Return one sample of the dataset at a folder or URL, and the number of samples; only one shard is read.

    processor: processor of the sample (default: by schema). Raises the errors of inspect_dataset.
    """
    catalog = read_catalog(open_storage(remote), refused={})
    number = _choose(number, 1, total=catalog.num_samples).start
    viewer = Viewer.load(catalog.schema, None, processor)
    first_ids = list(accumulate((info.num_samples for info in catalog.shards), initial=0))
    index = bisect_right(first_ids, number) - 1
    info, within = catalog.shards[index], number - first_ids[index]
    with TemporaryDirectory(prefix="lmms_stream-inspect-", ignore_cleanup_errors=True) as folder:
        path = fetch_shard(LocalCache(catalog.storage, Path(folder)), info)
        shard = open_shard(path, info, columns=decoded_columns(info))
        view = viewer.view(shard[within], number=number, shard=info, num_bytes=int(shard.sample_bytes[within]))
    return with_source(view, Provenance.of(catalog.storage)), catalog.num_samples


def summary(inspection: Inspection) -> dict[str, str]:
    """Summary lines of a dataset: label -> value."""
    sizes = inspection.sample_bytes
    is_partial = inspection.num_measured_shards < inspection.num_shards
    stored = (
        "" if inspection.compression is None else f", {inspection.stored_bytes:,} as stored ({inspection.compression})"
    )
    is_said = any(lengths.not_shown for lengths in inspection.lengths)
    return {
        "schema": inspection.schema or "none of ours",
        "samples": f"{inspection.num_samples:,}",
        "shards": f"{inspection.num_shards:,}",
        "bytes": f"{inspection.num_bytes:,}{stored}",
        "compression": inspection.compression or "none",
        "bytes of a sample": f"{sizes.minimum:,} to {sizes.maximum:,}, median {sizes.median:,.0f}"
        + (f" (in {inspection.num_measured_shards:,} of the {inspection.num_shards:,} shards)" if is_partial else ""),
        **({"supervision": counts_text(inspection.not_shown)} if inspection.not_shown and not is_said else {}),
    }


def describe_lengths(lengths: LengthsView) -> dict[str, str]:
    """Summary lines of one lengths index: label -> value."""
    tokens = lengths.tokens
    return {
        "fingerprint": lengths.fingerprint,
        "tokens": f"{lengths.num_tokens:,}",
        "tokens of a sample": f"{tokens.minimum:,} to {tokens.maximum:,}, median {tokens.median:,.0f}",
        **({"supervision": counts_text(lengths.not_shown)} if lengths.not_shown else {}),
    }


def describe_processor(settings: Mapping[str, Any], *, section: str = "") -> dict[str, str]:
    """Lines of a processor's settings, its class first: dotted name -> value.

    >>> describe_processor({"frames": {"fps": 2.0, "end": None}, "class": "Media", "tokens": ["a", "b"]})
    {'class': 'Media', 'frames.fps': '2.0', 'frames.end': 'none', 'tokens': 'a, b'}
    """
    lines: dict[str, str] = {}
    for name, value in sorted(settings.items(), key=lambda item: item[0] != "class"):
        if isinstance(value, Mapping) and value:
            lines |= describe_processor(value, section=f"{section}{name}.")
        else:
            shown = value if isinstance(value, list | tuple) else [value]
            lines[section + name] = ", ".join("none" if each is None else str(each) for each in shown) or "none"
    return lines


def save_media(inspection: Inspection, folder: Path) -> list[Path]:
    """Write the media of the shown samples as `sample-<number>-<part>.<extension>`; return the files."""
    saved = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for sample in inspection.samples:
            for number, part in enumerate(sample.media):
                path = folder / f"sample-{sample.number}-{number}{part.extension}"
                path.write_bytes(part.data)
                saved.append(path)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}: name another folder with --save-media") from error
    return saved


def _choose(first: int, num_samples: int, *, total: int) -> range:
    if num_samples < 1:
        raise ConfigError(f"the number of samples must be at least 1, got {num_samples}")
    if not total:
        raise ShardError("the dataset lists no samples: convert it again")
    if not -total <= first < total:
        raise ConfigError(
            f"there is no sample {first} in a dataset of {total}: choose one from {-total} to {total - 1}"
        )
    start = first % total
    return range(start, min(start + num_samples, total))


def _read_shards(
    catalog: Catalog,
    chosen: Sequence[int],
    viewer: Viewer,
    *,
    drawing: Drawing,
    cache: LocalCache,
    notes: list[str],
    on_start: Callable[[int], None],
    on_shard: Callable[[], None],
) -> tuple[list[NDArray[np.int64]], list[SampleView]]:
    """Return the bytes of each sample in some shards, and the chosen samples. chosen: ascending numbers.

    Raises for an unreadable shard with chosen samples; other unreadable shards add a note.
    """
    storage, shards = catalog.storage, catalog.shards
    first_ids = list(accumulate((info.num_samples for info in shards), initial=0))
    chosen_of: dict[int, list[int]] = {}  # shard -> numbers of chosen samples
    for number in chosen:
        chosen_of.setdefault(bisect_right(first_ids, number) - 1, []).append(number)
    shown = list(chosen_of)
    in_place = isinstance(storage, LocalStorage) and not any(info.zip_name for info in shards)
    limit = MAX_HEADERS if in_place else MAX_FETCHED
    measured = evenly(len(shards), limit)
    measured = sorted({*measured, *shown}) if in_place else sorted({*measured[: max(0, limit - len(shown))], *shown})
    on_start(len(measured))
    sizes, samples, num_unread = [], [], 0
    every = -(-len(measured) // MAX_DRAWN)  # a sample from each, or several
    for position, index in enumerate(measured):
        info = shards[index]
        try:
            is_fetched = not in_place or index in chosen_of
            path = fetch_shard(cache, info) if is_fetched else local_file(storage, info.name, cache.folder)
            shard = open_shard(path, info, columns=decoded_columns(info))
        except (ShardError, StorageError, OSError):
            if index in chosen_of:
                raise
            num_unread += 1
        else:
            sizes.append(shard.sample_bytes)
            for number in chosen_of.get(index, ()):
                within = number - first_ids[index]
                num_bytes = int(sizes[-1][within])
                samples.append(viewer.view(shard[within], number=number, shard=info, num_bytes=num_bytes))
            if position % every == 0:
                for within in evenly(len(shard), max(1, MAX_DRAWN // len(measured))):
                    drawing.add(shard, within, info)
            if path.is_relative_to(cache.folder):
                path.unlink()
        on_shard()
    if num_unread:
        notes.append(f"{num_unread} of {len(measured)} shards cannot be read: lmms-stream verify lists what is wrong")
    return sizes, samples


def evenly(total: int, most: int) -> list[int]:
    """Return at most `most` numbers below a total, evenly spread, with the first and the last.

    >>> evenly(10, 4)
    [0, 3, 6, 9]
    """
    numbers: list[int] = np.unique(np.linspace(0, total - 1, min(most, total)).astype(int)).tolist()
    return numbers


class Drawing:
    """Collects facts of drawn samples."""

    def __init__(self, viewer: Viewer):
        self._viewer = viewer
        self._every = 8 if hasattr(viewer.processor, "see_media") else 1  # media are decoded in full
        self._num_samples = 0
        self._sides: list[int] = []
        self._shares: list[float] = []
        self._unread: list[str] = []  # reasons

    def add(self, shard: AnyShard, within: int, info: ShardInfo) -> None:
        """Add a sample; an unreadable sample is counted, for a note."""
        self._num_samples += 1
        try:
            sample = shard[within]
            media = replace(self._viewer, processor=None).view(sample, number=within, shard=info, num_bytes=0).media
            sizes = [(part.width, part.height) for part in media if part.kind == "image"]
            self._sides += [max(width, height) for width, height in sizes if width and height]
            if self._viewer.processor is not None and (self._num_samples - 1) % self._every == 0:
                labels = np.asarray(self._viewer.processed(sample)["labels"])
                self._shares += [float((labels != IGNORED_LABEL).mean())] if len(labels) else []
        except Exception as error:  # noqa: BLE001 - a chat template may refuse a sample with any error
            self._unread.append(f"{info.name}: {error if isinstance(error, LmmsStreamError) else repr(error)}")

    def view(self, notes: list[str]) -> DrawnView:
        """Return the histograms; add a note if samples could not be read."""
        if self._unread:
            notes.append(
                f"{len(self._unread)} of {self._num_samples} drawn samples are in no histogram, as they cannot be "
                f"read; the first: {self._unread[0]}"
            )
        sides = histogram(np.array(self._sides)) if self._sides else None
        counts, edges = np.histogram(self._shares, bins=np.linspace(0, 1, NUM_SHARES + 1))
        shares = Histogram(tuple(edges.round(2).tolist()), tuple(counts.tolist())) if self._shares else None
        return DrawnView(num_samples=self._num_samples, image_sides=sides, trained_shares=shares)


def _other_columns(catalog: Catalog) -> Iterator[str]:
    """Yield a note if some shards have other columns than the first shard; the summary shows the first's columns."""
    others = [info for info in catalog.shards if info.encodings != columns_of(catalog.shards)]
    if others:
        what = f"{len(others)} of {len(catalog.shards)} shards have other columns than the first"
        yield f"{what}: {others[0].name} has {others[0].shown_columns}"


def _view_lengths(catalog: Catalog, fingerprint: str, folder: Path, notes: list[str]) -> LengthsView | None:
    """Return a lengths index with its histogram; add a note and return None if the index is too large or unreadable."""
    if not isinstance(catalog.storage, LocalStorage) and 4 * catalog.num_samples > MAX_LENGTHS_BYTES:
        notes.append(f"lengths index {fingerprint} is not shown: it has more than {MAX_LENGTHS_BYTES} bytes")
        return None
    try:
        index = open_lengths(catalog.storage, fingerprint, folder=folder, num_samples=catalog.num_samples)
    except LengthsError as error:
        notes.append(str(error))
        return None
    if index is None:
        return None
    edges, counts = histogram(np.asarray(index.lengths))
    return LengthsView(
        fingerprint=fingerprint,
        processor=dict(index.processor),
        num_tokens=int(index.lengths.sum(dtype=np.int64)),
        tokens=Spread.of(index.lengths),
        edges=edges,
        counts=counts,
        not_shown=dict(index.not_shown),
    )


def histogram(lengths: NDArray[np.integer[Any]]) -> Histogram:
    """Integer edges with a constant growth factor (rounded), and the number of lengths in each bin.

    >>> histogram(np.array([1, 1, 2, 3]))
    Histogram(edges=(1, 2, 3, 4), counts=(2, 1, 1))
    """
    low, high = int(lengths.min()), int(lengths.max()) + 1
    between = np.geomspace(max(low, 1), high, NUM_BINS + 1).round().astype(np.int64)
    edges = np.unique([low, *between, high])
    counts, _ = np.histogram(lengths, bins=edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


# Sample -> its source row, and source row -> its samples.


def with_source(sample: SampleView, provenance: Provenance | None) -> SampleView:
    """Add the source row to a sample, if known."""
    return sample if provenance is None else replace(sample, source=str(provenance.source_of(sample.number)))


def with_sources(
    samples: Sequence[SampleView], storage: Storage, folder: Path, notes: list[str]
) -> tuple[SampleView, ...]:
    """Add the source row to each sample; add a note if the stored provenance is damaged. folder: for copies."""
    try:
        provenance = Provenance.of(storage, folder)
        return tuple(with_source(sample, provenance) for sample in samples)
    except (ShardError, StorageError) as error:
        notes.append(f"the rows that samples were made of are not shown: {error}")
        return tuple(samples)


def samples_of_row(storage: Storage, folder: Path, text: str) -> list[int]:
    """Numbers of the samples made from a row, in order; ConfigError without any sample.

    text: "FILE:ROW", the row counted from 1. folder: for copies.
    """
    source, _, row = text.rpartition(":")
    if not source or not row.isdecimal() or not int(row):
        raise ConfigError(f"--source {text}: expected FILE:ROW, the row counted from 1")
    provenance = Provenance.of(storage, folder)
    if provenance is None:
        raise ConfigError(
            f"{storage.url} has no record of the sources of its samples: convert it again with this release, or leave "
            "--source out"
        )
    found: list[int] = provenance.sample_of(source, int(row)).tolist()
    if not found:
        raise ConfigError(
            f"no sample of {storage.url} was made of row {row} of {provenance.named(source)}: the source does not have "
            "this row, or the row was left out (_lmms/rejects.jsonl has the reasons for unfit rows); a sample of "
            "--concat is found only by its first row"
        )
    return found
