"""Shards as files on this node: fetched through the cache, checked, decompressed. index entry -> path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..storage.cache import LocalCache
from ..storage.local import LocalStorage
from ..storage.wanted import Wanted
from .decoding import decompress
from .hooked_streams import HookedStream
from .index import ShardInfo, file_matches


def fetch_shard(cache: LocalCache, info: ShardInfo) -> Path:
    """The local path of a shard with the size and checksum of its index entry, decompressed."""
    path = try_fetch_shard(cache, info, wait=True)
    assert path is not None
    return path


def try_fetch_shard(cache: LocalCache, info: ShardInfo, *, wait: bool = False) -> Path | None:
    """fetch_shard, but None at once when another process downloads it (unless `wait`)."""
    if info.meta is not None and _fetch(cache, info.meta, wait=wait) is None:
        return None
    return _fetch(cache, info, wait=wait)


def _fetch(cache: LocalCache, info: ShardInfo, *, wait: bool) -> Path | None:
    """One file of a shard; where compressed files are kept, it is made of the one that is kept."""
    if info.zip_name is not None and cache.keep_zip and not isinstance(cache.storage, LocalStorage):
        zipped = Wanted(
            name=info.zip_name,
            identity=f"{info.zip_size} {info.zip_checksum}",
            num_bytes=info.zip_size or 0,
            valid=lambda path: file_matches(path, size=info.zip_size, checksum=info.zip_checksum),
            by_size=info.zip_checksum is None,
        )
        if cache.fetch(info.zip_name, zipped, wait=wait) is None:
            return None
        if not _is_prepared(cache):
            cache = cache.of_kept()
    if _is_prepared(cache):
        return cache.fetch(info.name, replace(_wanted(info), decode=None), wait=wait)
    return cache.fetch(info.zip_name or info.name, _wanted(info), wait=wait)


def _is_prepared(cache: LocalCache) -> bool:
    """Whether a class of the user's decompresses shards itself."""
    return isinstance(cache.storage, HookedStream) and cache.storage.prepares_shards


def shard_at_hand(cache: LocalCache, info: ShardInfo) -> Path | None:
    """The local path of a shard that was fetched before, by whatever process; None when it must be fetched."""
    if info.meta is not None and shard_at_hand(cache, info.meta) is None:
        return None
    return cache.at_hand(info.zip_name or info.name, _wanted(info))


def _wanted(info: ShardInfo) -> Wanted:
    def valid(path: Path) -> bool:
        return file_matches(path, size=info.size, checksum=info.checksum)

    def decode(data: bytes) -> bytes:
        return decompress(str(info.compression), data, size=info.size)

    return Wanted(
        name=info.name,
        identity=f"{info.size} {info.checksum}",  # in records of copies that users have
        num_bytes=info.size + (info.zip_size or 0),
        valid=valid,
        by_size=info.checksum is None,
        remember=info.checksum is not None,
        decode=None if info.zip_name is None else decode,
    )
