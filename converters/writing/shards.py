"""Placed samples -> full shards -> files: copied from encoded units, with checksum, compressed, and uploaded.

A shard is full by MDSWriter's rule: one more sample would exceed the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError, StorageError
from ...processors.not_shown import counts_of
from ...storage.local import LocalStorage
from ...storage.storage import Storage
from .documents import MADE, Concatenation
from .encoding import HASH, MAX_SHARD_BYTES, ShardFormat, compress, compression_extension
from .unit_files import PlacedSamples, samples_path, temporary_beside


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """Make shard `number` of output `output` in the file `name`; a compression adds its extension.

    sizes: bytes of samples, int64[num_samples]. runs: int64[num_runs, 3], the samples' bytes in order: unit, first byte
    in the unit, bytes. made: the bytes of runs of the unit MADE.
    """

    output: int
    number: int
    name: str
    sizes: NDArray[np.int64]
    runs: NDArray[np.int64]
    made: bytes = b""


def shard_name(number: int, format: str = "mds") -> str:
    """Name of a shard's file, by MosaicML's rule."""
    return f"shard.{number:05}.{format}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Ends of shards other than by size: after a number of samples, or for a number of shards."""

    num_shards: int | None = None
    samples_per_shard: int | None = None

    @property
    def by_samples(self) -> bool:
        return self.num_shards is not None or self.samples_per_shard is not None


@dataclass(slots=True)
class Output:
    """Shards of one dataset, filled in order. number: among the outputs of a conversion.

    file_numbers: numbers in the names of the shard files, in order. rows: source rows of the samples, from packed_rows.
    concatenation: makes samples from documents; `add` then takes documents. not_shown: kind of content -> number of
    samples or documents in which the chat template does not show it.
    """

    number: int
    format: ShardFormat
    file_numbers: Iterator[int] = field(default_factory=count)
    cut: Cut = Cut()
    concatenation: Concatenation | None = None
    num_shards: int = 0
    num_samples: int = 0
    lengths: list[NDArray[np.uint32]] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    not_shown: Counter[str] = field(default_factory=Counter)
    _waiting: list[NDArray[np.int64]] = field(default_factory=list)  # for each sample: unit, first byte, size
    _bytes: int = 0  # of the shard of the waiting samples

    def add(self, placed: PlacedSamples) -> Iterator[ShardTask]:
        """Add the next samples or documents; yield full shards."""
        if placed.not_shown is not None:
            self.not_shown.update(counts_of(placed.not_shown))
        yield from self._fill(placed if self.concatenation is None else self.concatenation.add(placed))

    def end_documents(self, *, drop_tail: bool) -> Iterator[ShardTask]:
        """Store the remaining tokens of documents in a shorter last sample, or drop them; yield full shards."""
        if self.concatenation is not None:
            yield from self._fill(self.concatenation.finish(drop_tail=drop_tail))

    def _fill(self, placed: PlacedSamples) -> Iterator[ShardTask]:
        if placed.lengths is not None:
            self.lengths.append(placed.lengths)
        self.num_samples += len(placed.samples)
        self.rows.append(placed.samples[:, 3].copy())
        samples = placed.samples[:, :3]
        if self.cut.by_samples:
            self._waiting.append(samples)
            yield from self._take_counted()
            return
        ends = np.cumsum(samples[:, 2] + 4)
        first, before = 0, 0  # first sample without a shard; bytes of the samples before it
        while first < len(samples):
            if not self._waiting:
                self._bytes = self.format.empty_bytes
            room = self.format.shard_bytes - self._bytes
            end = int(np.searchsorted(ends, before + room, side="right"))
            if end <= first and not self._waiting:
                end = first + 1  # a single sample above the limit of a shard
            if end > first:
                self._waiting.append(samples[first:end])
                self._bytes += int(ends[end - 1]) - before
                first, before = end, int(ends[end - 1])
            if first < len(samples):
                yield self._take()

    def finish(self) -> Iterator[ShardTask]:
        """Yield the last shard, or all shards if num_shards is set."""
        if self.cut.num_shards is not None and self._waiting:
            yield from self._take_equal(self.cut.num_shards)
        elif self._waiting:
            yield self._take()

    def _take_counted(self) -> Iterator[ShardTask]:
        """Yield full shards of samples_per_shard samples."""
        count = self.cut.samples_per_shard
        if count is None or sum(map(len, self._waiting)) < count:
            return
        samples = np.concatenate(self._waiting)
        whole = len(samples) // count * count
        self._waiting = [samples[whole:]] if whole < len(samples) else []
        for first in range(0, whole, count):
            yield self._task(samples[first : first + count])

    def _take_equal(self, num_shards: int) -> Iterator[ShardTask]:
        """Yield num_shards shards, whose numbers of samples differ by at most 1."""
        samples = np.concatenate(self._waiting)
        self._waiting = []
        if num_shards > len(samples):
            raise DataError(f"{len(samples)} samples cannot fill {num_shards} shards: ask for fewer with --num-shards")
        for number in range(num_shards):
            first, stop = (len(samples) * each // num_shards for each in (number, number + 1))
            yield self._task(samples[first:stop])

    def _take(self) -> ShardTask:
        samples = np.concatenate(self._waiting)
        self._waiting = []
        return self._task(samples)

    def _task(self, samples: NDArray[np.int64]) -> ShardTask:
        num_bytes = self.format.empty_bytes + int(samples[:, 2].sum()) + 4 * len(samples)
        if self.cut.by_samples and num_bytes > MAX_SHARD_BYTES:
            raise DataError(
                f"a shard of {len(samples)} samples would have {num_bytes} bytes, and MDS has shards below 4 GiB: "
                "ask for fewer samples a shard, or for more shards"
            )
        self.num_shards += 1
        runs, made = (samples, b"") if self.concatenation is None else self.concatenation.runs(len(samples))
        return ShardTask(
            output=self.number,
            number=self.num_shards - 1,
            name=shard_name(next(self.file_numbers)),
            sizes=samples[:, 2].copy(),
            runs=_joined(runs),
            made=made,
        )


def _joined(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge adjacent runs into the fewest runs of the same bytes."""
    ends = samples[:, 1] + samples[:, 2]
    begins = np.ones(len(samples), bool)
    begins[1:] = (samples[1:, 0] != samples[:-1, 0]) | (samples[1:, 1] != ends[:-1])
    firsts = np.flatnonzero(begins)
    runs = samples[firsts].copy()
    runs[:, 2] = np.add.reduceat(samples[:, 2], firsts)
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMaker:
    """Makes shards of one output from the encoded units in a folder. staging: for shards until they are uploaded."""

    folder: Path
    staging: Path
    format: ShardFormat
    storage: Storage

    def make(self, task: ShardTask) -> dict[str, Any]:
        """Write the shard to a local target, or upload it; return its entry in index.json."""
        if isinstance(self.storage, LocalStorage) and not self.format.compression:
            made: list[dict[str, Any]] = []
            self.storage.write_with(task.name, lambda path: made.append(_write(path, self._pieces(task))))
            return self.format.index_entry(len(task.sizes), made[0] | {"basename": task.name}, None)
        path = temporary_beside(self.staging / f"{task.output}-{task.name}")
        try:
            raw = _write(path, self._pieces(task)) | {"basename": task.name}
            zipped = None
            if self.format.compression:
                zipped_name = f"{task.name}.{compression_extension(self.format.compression)}"
                zipped = _write(path, iter([compress(self.format.compression, path.read_bytes())]))
                zipped |= {"basename": zipped_name}
            self.storage.upload(path, (zipped or raw)["basename"])
        finally:
            path.unlink(missing_ok=True)
        return self.format.index_entry(len(task.sizes), raw, zipped)

    def _pieces(self, task: ShardTask) -> Iterator[bytes | memoryview]:
        yield self.format.shard_head(task.sizes)
        units: dict[int, NDArray[np.uint8]] = {}
        for unit, first, size in task.runs.tolist():
            if unit == MADE:
                yield task.made[first : first + size]
                continue
            if unit not in units:
                units[unit] = _mapped(samples_path(self.folder, unit))
            data = units[unit][first : first + size]
            if len(data) != size:
                raise StorageError(f"{samples_path(self.folder, unit)} was cut short: begin again with --overwrite")
            yield data.data


def _mapped(path: Path) -> NDArray[np.uint8]:
    try:
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}, which a shard is made of, cannot be read ({error}): use --overwrite") from error


def _write(path: Path, pieces: Iterator[bytes | memoryview]) -> dict[str, Any]:
    """Write a file of these bytes; return its entry in an index, without the name."""
    digest = xxhash.xxh3_64()
    num_bytes = 0
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
            num_bytes += len(piece)
    return {"bytes": num_bytes, "hashes": {HASH: digest.hexdigest()}}


def entry_bytes(entry: Mapping[str, Any]) -> int:
    """Bytes of a shard's file in the store."""
    return int((entry["zip_data"] or entry["raw_data"])["bytes"])
