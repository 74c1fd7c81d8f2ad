"""MosaicML Streaming's streams as ours: where each lies, and how it is fetched. Stream -> StreamConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streaming
from streaming.base.registry_utils import construct_from_registry
from streaming.base.stream import streams_registry

from ..checks import local_path
from ..errors import ConfigError
from ..storage.cache import default_cache_folder
from ..storage.retry import Retry
from ..storage.storage import is_folder
from .hooked_streams import HookedStream
from .streams import StreamConfig

_HOOKS = ("get_shards", "prepare_shard", "_prepare_shard_part", "_decompress_shard_part", "_download_file")


class Stream(streaming.Stream):  # type: ignore[misc]
    """MosaicML Streaming's Stream, with its keywords; remote and local may be paths.

    Without local, shards are kept in a folder of this user's below the system's temporary folder, which may be there.
    """

    def __init__(self, *, remote: str | Path | None = None, local: str | Path | None = None, **keywords: Any):
        if remote is None and local is None:
            raise ConfigError("a dataset needs remote (a folder or a URL), or local (a folder that holds all of it)")
        remote = local_path("remote", remote) if remote is not None and is_folder(remote) else remote
        local = None if local is None else local_path("local", local)
        folder = default_cache_folder(str(remote)) if local is None else local
        super().__init__(remote=None if remote is None else str(remote), local=str(folder), **keywords)
        self._local = None if local is None else str(local)  # what the user named, as in the parent


def registered_stream(name: str, config: dict[str, Any] | None, defaults: dict[str, Any]) -> streaming.Stream:
    """The stream of a dataset that has one: ours, or of the class that is registered under the name."""
    keywords = {**(config or {}), **defaults}
    if name == "stream":
        return Stream(**keywords)
    return construct_from_registry(name, streams_registry, partial_function=False, kwargs=keywords)


def config_of(stream: streaming.Stream) -> StreamConfig:
    """Where a stream lies, and how it is fetched; what its class overrides is asked of it."""
    is_read_in_place = stream._local is None and is_folder(stream.remote)
    hooks = [name for name in _HOOKS if getattr(type(stream), name) is not getattr(streaming.Stream, name)]
    return StreamConfig(
        remote=stream.remote,
        local=None if is_read_in_place else stream.local,
        split=stream.split or None,
        retry=Retry(attempts=1 + stream.download_retry, timeout_s=float(stream.download_timeout)),
        validate_hash=stream.validate_hash,
        keep_zip=stream.keep_zip,
        source=HookedStream(stream, hooks) if hooks else None,
    )
