"""MosaicML Streaming's streams as ours: where each lies, and how it is fetched. Stream -> StreamConfig."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks import local_path
from ..errors import ConfigError
from ..plan.sample_order import StreamShare, samples_chosen
from ..storage.cache import default_cache_folder
from ..storage.retry import Retry
from ..storage.storage import is_folder
from .hooked_streams import HookedStream
from .mosaic_bases import HOOKS, PlainStream, package
from .streams import StreamConfig

if TYPE_CHECKING:
    StreamBase = PlainStream
else:
    StreamBase = object  # streams are of our class, of MosaicML's, or of both


class OfPaths(StreamBase):
    """The keywords of a Stream, of which remote and local may be paths."""

    def __init__(self, *, remote: str | Path | None = None, local: str | Path | None = None, **keywords: Any):
        if remote is None and local is None:
            raise ConfigError("a dataset needs remote (a folder or a URL), or local (a folder that holds all of it)")
        remote = local_path("remote", remote) if remote is not None and is_folder(remote) else remote
        local = None if local is None else local_path("local", local)
        folder = default_cache_folder(str(remote)) if local is None else local
        super().__init__(remote=None if remote is None else str(remote), local=str(folder), **keywords)
        self._local = None if local is None else str(local)  # what the user named, as in the parent


class Stream(OfPaths, PlainStream):
    """MosaicML Streaming's Stream, with its keywords; remote and local may be paths.

    Without local, shards are kept in a folder of this user's below the system's temporary folder, which may be there.
    """


def registered_stream(name: str, keywords: dict[str, Any]) -> StreamBase:
    """A stream of the class that a program has registered with MosaicML's package under a name."""
    if package() is None:
        raise ConfigError(
            f"stream_name {name!r} is registered with MosaicML's package, which is not imported: import the module "
            "that registers it first, or give streams"
        )
    from streaming.base.registry_utils import construct_from_registry
    from streaming.base.stream import streams_registry

    stream: StreamBase = construct_from_registry(name, streams_registry, partial_function=False, kwargs=keywords)
    return stream


def config_of(stream: StreamBase) -> StreamConfig:
    """Where a stream lies, and how it is fetched; what its class overrides is asked of it."""
    is_read_in_place = stream._local is None and is_folder(stream.remote)
    hooks = _hooks_of(stream)
    return StreamConfig(
        remote=stream.remote,
        local=None if is_read_in_place else stream.local,
        split=stream.split or None,
        retry=Retry(attempts=1 + stream.download_retry, timeout_s=float(stream.download_timeout)),
        validate_hash=stream.validate_hash,
        keep_zip=stream.keep_zip,
        source=HookedStream(stream, hooks) if hooks else None,
    )


def _hooks_of(stream: StreamBase) -> list[str]:
    """The methods by which the class of a stream fetches in its own way."""
    parent = getattr(package(), "Stream", None)
    own = {name: getattr(type(stream), name, None) for name in HOOKS}
    hooks = [name for name, method in own.items() if method and method is not getattr(parent, name, None)]
    if hooks and not (parent and isinstance(stream, parent)):
        raise ConfigError(
            f"{type(stream).__name__}.{hooks[0]} is a way to fetch of MosaicML's streams: derive the class from "
            "streaming.Stream, or from the Stream of lmms_stream.doors.mosaicml"
        )
    return hooks


def weigh(streams: Sequence[StreamBase], sizes: NDArray[np.int64], *, epoch_size: int | None, seed: int | None) -> int:
    """Set how many samples an epoch takes of each stream (choose), and what that makes of it (proportion, repeat).

    Return the samples of an epoch. sizes: samples of each stream. seed: of the draw that gives streams what rounding
    leaves, as MosaicML has it; None: the largest remainders get it. Raises ConfigError as samples_chosen does.
    """
    shares = [StreamShare(proportion=each._proportion, repeat=each._repeat, choose=each._choose) for each in streams]
    counts = np.array(samples_chosen(sizes.tolist(), shares, epoch_size=epoch_size), np.int64)
    is_relative = shares[0].proportion is not None or epoch_size is not None
    if seed is not None and not is_relative:
        counts = np.array([_count(share, size) for share, size in zip(shares, sizes.tolist(), strict=True)], np.int64)
    weights = [
        size if share.proportion is None else share.proportion for share, size in zip(shares, sizes, strict=True)
    ]
    proportions = np.array(weights if is_relative else counts, np.float64)
    proportions /= proportions.sum()
    if seed is not None and is_relative:
        total = epoch_size or int(sizes.sum())
        counts = (total * proportions).astype(np.int64)
        counts[np.random.default_rng(seed).choice(len(counts), total - counts.sum(), False)] += 1
    for stream, proportion, size, count in zip(streams, proportions, sizes, counts, strict=True):
        stream.proportion, stream.repeat, stream.choose = proportion, count / max(1, size), count
    return int(counts.sum())


def _count(share: StreamShare, size: int) -> int:
    """Samples by repeat or choose, rounded as MosaicML does it."""
    return int(size if share.repeat is None else share.repeat * size) if share.choose is None else int(share.choose)
