"""Samples -> bytes of MDS shards, as MosaicML's MDSWriter makes them, byte for byte."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError, LmmsStreamError
from ...mds.decoding import COMPRESSIONS as CODECS
from ...mds.decoding import decoder
from ...types import Sample
from .column_encoders import column_encoder, fixed_size

MAX_SAMPLE_BYTES = (1 << 31) - 1  # MDS counts a shard's bytes in 32 bits
MAX_SHARD_BYTES = (1 << 32) - 1
HASH = "xxh3_64"
_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
COMPRESSIONS = {*_LEVELS, *(f"{kind}:{level}" for kind, levels in _LEVELS.items() for level in levels)}  # MosaicML's


class ShardFormat:
    """The columns of a dataset, and what its shards and their index say of themselves.

    columns: name -> MDS encoding. shard_bytes: of a shard before it is compressed, at most, unless one sample has more;
    None where the index says no limit. compression: as MDSWriter takes it ("zstd", "zstd:7", …), or None. hashes: kinds
    of checksums.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        *,
        shard_bytes: int | None,
        compression: str | None = None,
        hashes: Sequence[str] = (HASH,),
    ):
        self.columns = dict(columns)
        self.shard_bytes = MAX_SHARD_BYTES if shard_bytes is None else shard_bytes
        self.compression = compression
        self.hashes = hashes
        self._size_limit = shard_bytes
        self.names = sorted(columns)
        self._encoders = [column_encoder(columns[name]) for name in self.names]
        self._sizes = [fixed_size(columns[name]) for name in self.names]
        self.header = json.dumps(self.config, sort_keys=True).encode()

    def __reduce__(self) -> tuple[Callable[[], ShardFormat], tuple[()]]:
        settings: dict[str, Any] = {"compression": self.compression, "hashes": self.hashes}
        return partial(ShardFormat, self.columns, shard_bytes=self._size_limit, **settings), ()

    @property
    def config(self) -> dict[str, Any]:
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(self.hashes),
            "size_limit": self._size_limit,
            "column_names": self.names,
            "column_encodings": [self.columns[name] for name in self.names],
            "column_sizes": self._sizes,
        }

    def encode(self, sample: Sample) -> bytes:
        """DataError when a value is not of its column's type, and for a sample of 2 GiB or more.

        Bytes for any column are a value that is encoded already, as MDSWriter takes them.
        """
        data, sizes = [], []
        for name, encode, fixed in zip(self.names, self._encoders, self._sizes, strict=True):
            try:
                value = encode(sample[name])
            except LmmsStreamError:
                raise
            except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
                value = self._encoded(name, sample[name], error)
            data.append(value)
            if fixed is None:
                sizes.append(len(value))
        total = sum(map(len, data))
        if total > MAX_SAMPLE_BYTES:
            raise DataError(f"the sample has {total} bytes, a shard holds at most {MAX_SAMPLE_BYTES}: split it")
        return b"".join([struct.pack(f"<{len(sizes)}I", *sizes), *data])

    def _encoded(self, name: str, value: Any, error: Exception) -> bytes:
        """The value if it is bytes that decode as its column's encoding; else DataError. error: of its encoder."""
        try:
            if isinstance(value, bytes):
                decoder(self.columns[name])(memoryview(value), 0, len(value))
                return value
        except ValueError as damage:
            error = damage
        raise DataError(
            f"column {name!r} holds {str(value)[:80]!r}, which is not {self.columns[name]!r} ({error})"
        ) from error

    def shard_head(self, sizes: NDArray[np.int64]) -> bytes:
        """What comes before the samples in a shard. sizes: their bytes, int64[num_samples]."""
        first = 4 + 4 * (len(sizes) + 1) + len(self.header)
        offsets = first + np.concatenate([[0], np.cumsum(sizes)])
        return np.uint32(len(sizes)).tobytes() + offsets.astype("<u4").tobytes() + self.header

    @property
    def empty_bytes(self) -> int:
        """Bytes of a shard without samples; each sample takes 4 more than its own."""
        return 8 + len(self.header)

    def index_entry(self, num_samples: int, raw: Mapping[str, Any], zipped: Mapping[str, Any] | None) -> dict[str, Any]:
        """A shard in index.json. raw, zipped: basename, bytes and hashes of its file, and of that compressed."""
        return {"samples": num_samples, "raw_data": dict(raw), "zip_data": zipped and dict(zipped), **self.config}


def index_json(entries: Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps({"version": 2, "shards": list(entries)}, sort_keys=True).encode()


def compress(compression: str, data: bytes) -> bytes:
    """A shard's file, compressed as MDSWriter does it; of more than 8 MiB its zstd may cut the frame elsewhere."""
    kind, _, level = compression.partition(":")
    if kind == "gz":
        return gzip.compress(data, int(level or 9))
    if kind == "bz2":
        return bz2.compress(data, int(level or 9))
    import pyarrow

    chosen = {"br": int(level or 11), "zstd": int(level or 3)}.get(kind)
    return bytes(pyarrow.Codec(CODECS[kind], compression_level=chosen).compress(data, asbytes=True))


def check_compression(compression: str | None) -> None:
    """ConfigError for one that MDS does not have."""
    if compression is not None and compression not in COMPRESSIONS:
        known = ", ".join(sorted(_LEVELS))
        raise ConfigError(f"the compression {compression!r} is not one of {known} (with a level: zstd:7)")


def compression_extension(compression: str) -> str:
    return compression.partition(":")[0]
