"""Placed samples -> full shards -> files: copied from encoded units, with checksum, compressed, and uploaded.

A shard is full where MDSWriter would say so: with one sample more it would be larger than it may be.
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
    """Make shard `number` of output `output`, as the file `name`, to which a compression adds its extension.

    sizes: int64[num_samples]. runs: int64[num_runs, 3], the samples' bytes in turn: unit, first byte in it, bytes.
    made: the bytes of runs whose unit is MADE.
    """

    output: int
    number: int
    name: str
    sizes: NDArray[np.int64]
    runs: NDArray[np.int64]
    made: bytes = b""


def shard_name(number: int, format: str = "mds") -> str:
    """Name of a shard's file, as MosaicML's writers name their files."""
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
    """The shards of one dataset as they fill. number: among the outputs of a conversion.

    file_numbers: which the files of its shards have in their names, in turn. rows: what its samples were made of, as
    packed_rows gives it. concatenation: makes samples of documents, where what is added are those. not_shown: samples,
    or documents, whose chat template does not show some content, by the kind of content.
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
    _bytes: int = 0  # of the shard that the waiting samples will make

    def add(self, placed: PlacedSamples) -> Iterator[ShardTask]:
        """Samples that follow, or documents; gives shards that are full."""
        if placed.not_shown is not None:
            self.not_shown.update(counts_of(placed.not_shown))
        yield from self._fill(placed if self.concatenation is None else self.concatenation.add(placed))

    def end_documents(self, *, drop_tail: bool) -> Iterator[ShardTask]:
        """The tokens that are left of documents as a last, shorter sample, or dropped; gives a shard that is full."""
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
        first, before = 0, 0  # the first sample that no shard has yet; bytes of all before it
        while first < len(samples):
            if not self._waiting:
                self._bytes = self.format.empty_bytes
            room = self.format.shard_bytes - self._bytes
            end = int(np.searchsorted(ends, before + room, side="right"))
            if end <= first and not self._waiting:
                end = first + 1  # this sample alone is larger than a shard may be
            if end > first:
                self._waiting.append(samples[first:end])
                self._bytes += int(ends[end - 1]) - before
                first, before = end, int(ends[end - 1])
            if first < len(samples):
                yield self._take()

    def finish(self) -> Iterator[ShardTask]:
        """The last shard; all of them, where their number is asked for."""
        if self.cut.num_shards is not None and self._waiting:
            yield from self._take_equal(self.cut.num_shards)
        elif self._waiting:
            yield self._take()

    def _take_counted(self) -> Iterator[ShardTask]:
        """The shards of as many samples as are asked for."""
        count = self.cut.samples_per_shard
        if count is None or sum(map(len, self._waiting)) < count:
            return
        samples = np.concatenate(self._waiting)
        whole = len(samples) // count * count
        self._waiting = [samples[whole:]] if whole < len(samples) else []
        for first in range(0, whole, count):
            yield self._task(samples[first : first + count])

    def _take_equal(self, num_shards: int) -> Iterator[ShardTask]:
        """So many shards, whose numbers of samples differ by one at most."""
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
    """Merge adjacent runs: the same bytes in as few runs as possible."""
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
        """Upload the shard, or write it where it stays; its entry in index.json."""
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
