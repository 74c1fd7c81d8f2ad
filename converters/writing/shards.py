"""Encoded units -> shards: the samples that a shard holds, copied, with checksum, compressed, and uploaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import StorageError
from ...storage.local import LocalStorage
from ...storage.storage import Storage
from .encoding import HASH, ShardFormat, compress, compression_extension
from .unit_files import samples_path, temporary_beside

MADE = -1  # in runs, instead of a unit: bytes that lie in none, but were made


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
