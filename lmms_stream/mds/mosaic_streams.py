"""Streams of StreamingDataset as in MosaicML's package: locations of shards, fetching, and shares of an epoch.

Also the parts of MosaicML's loaders that our classes need, and the package itself, if imported by the program. Only
doors/mosaicml.py imports the package.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ..checks import local_path, shortened_wait
from ..errors import ConfigError
from ..plan.sample_order import StreamShare, samples_chosen
from ..storage.cache import default_cache_folder
from ..storage.retry import Retry
from ..storage.storage import is_folder
from .hooked_streams import HookedStream
from .streams import StreamConfig

logger = logging.getLogger("lmms_stream")
HOOKS = ("get_shards", "prepare_shard", "_prepare_shard_part", "_decompress_shard_part", "_download_file")


class PlainStream:
    """Location of a stream's shards, settings for fetching, and the share of samples in an epoch."""

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
    ):
        if download_retry is not None and download_retry < 0:
            raise ConfigError(f"download_retry must be 0 or more, got {download_retry}")
        if download_timeout is not None and download_timeout <= 0:
            raise ConfigError(f"download_timeout must be more than 0 seconds, got {download_timeout}")
        StreamShare(proportion=proportion, repeat=repeat, choose=choose)
        self.remote, self.local, self.split = remote, local, split or ""
        self._local = local
        self._proportion, self._repeat, self._choose = proportion, repeat, choose
        self._download_retry, self._download_timeout, self._keep_zip = download_retry, download_timeout, keep_zip
        self.validate_hash = validate_hash
        shares = {"proportion": proportion, "repeat": repeat, "choose": choose}
        fetching = {"download_retry": download_retry, "download_timeout": download_timeout, "keep_zip": keep_zip}
        for name, value in (shares | fetching).items():
            if value is not None:
                setattr(self, name, value)

    def apply_default(self, default: Mapping[str, Any]) -> None:
        """Take missing settings of the stream from its dataset."""
        self.split = self.split or default["split"] or ""
        self.validate_hash = self.validate_hash or default["validate_hash"] or None
        for name in ("download_retry", "download_timeout", "keep_zip"):
            if getattr(self, f"_{name}") is None:
                setattr(self, name, default[name])

    if TYPE_CHECKING:  # set by the keywords, and by the dataset
        proportion: float
        repeat: float
        choose: int
        download_retry: int
        download_timeout: float
        keep_zip: bool


class PlainLoader(DataLoader[Any]):
    """A DataLoader that counts its samples since the start of the iteration, or since a state was loaded."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.num_samples_yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_samples_yielded = 0
        for num_samples, batch in DataLoader.__iter__(self):  # not super(): MosaicML's loader would count again
            self.num_samples_yielded += num_samples
            yield batch

    def _get_iterator(self) -> Any:
        """Return torch's iterator, which takes the function for batches from the loader."""
        collate_fn = self.collate_fn
        self.collate_fn = _Counted(collate_fn, self._samples_of())
        try:
            return super()._get_iterator()
        finally:
            self.collate_fn = collate_fn

    def _samples_of(self) -> Callable[[Any, Any], int]:
        """Return the function for the number of samples, from the inputs of a batch, and the batch."""
        return _in_list if self.batch_sampler is not None else _in_batch

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        if hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(obj)
            self.num_samples_yielded = 0

    def __del__(self) -> None:
        iterator = getattr(self, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()


class _Counted:
    """A collate_fn that also returns the number of samples, because some batches do not show the number."""

    def __init__(self, collate_fn: Callable[[Any], Any], samples_of: Callable[[Any, Any], int]):
        self.collate_fn, self.samples_of = collate_fn, samples_of

    def __call__(self, given: Any) -> tuple[int, Any]:
        batch = self.collate_fn(given)
        return self.samples_of(given, batch), batch


def one_sample(given: Any, batch: Any) -> int:
    return 1


def _in_list(given: Any, batch: Any) -> int:
    return len(given)


def _in_batch(given: Any, batch: Any) -> int:
    """Return the number of samples in a batch made by a dataset, counted in MosaicML's way."""
    if isinstance(batch, Mapping):  # a tokenizer's, too
        if not batch:
            raise ConfigError(
                "a batch is an empty dict: let collate_fn give at least one list or tensor of its samples"
            )
        return len(next(iter(batch.values())))
    return len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])


class OfPackage:
    """Base of classes whose new objects are of the types in doors/mosaicml.py if MosaicML's package is imported.

    Most programs import lmms_stream before streaming, in alphabetical order. MosaicML's loader saves the state of a
    dataset only if the dataset is of MosaicML's types.
    """

    _is_warned_of = False

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        is_new = bool(arguments or keywords)  # copies and unpickled objects keep their type
        if is_new and package() is not None and cls.__module__.startswith(f"{__package__}."):
            # The only import from a folder that imports from this folder; only if the program has imported the package.
            cls = getattr(import_module("..doors.mosaicml", __package__), cls.__name__)
        made = super().__new__(cls)
        if is_new:
            made._warn_of_late_package()
        return made

    def _warn_of_late_package(self) -> None:
        """Warn once if MosaicML's package is imported, and this object is not of its types."""
        found = package()
        if found is None or self._is_warned_of or isinstance(self, (found.StreamingDataset, found.StreamingDataLoader)):
            return
        self._is_warned_of = True
        logger.warning(
            "This %s is of a class of lmms_stream that was taken before `streaming` was imported, so MosaicML's "
            "classes do not know it, and its StreamingDataLoader neither saves nor loads a state of it: import "
            "streaming before a dataset is made, and derive classes from those of lmms_stream.doors.mosaicml",
            type(self).__name__,
        )


class Numbered:
    """Items by number as in NumPy, for classes with `size`, and with `get_item` for 0 <= number < size."""

    if TYPE_CHECKING:

        @property
        def size(self) -> int: ...
        def get_item(self, number: int) -> Any: ...

    def __getitem__(self, at: Any) -> Any:
        """Return an item by number, or a list of items by a slice, a list or an array of numbers, or by a mask."""
        if isinstance(at, slice):
            return [self.get_item(number) for number in range(*at.indices(self.size))]
        if isinstance(at, list | np.ndarray):
            return [self[each] for each in self._unmasked(at)]
        if not isinstance(at, int | np.integer) or isinstance(at, bool):
            raise ConfigError(f"items are named by a number, a slice, a list or an array of numbers, got {at!r}")
        at = int(at)  # a number of 8 bits may be too small for the size
        return self.get_item(at + self.size if -self.size <= at < 0 else at)

    def _unmasked(self, at: list[Any] | NDArray[Any]) -> Iterable[Any]:
        """Return the numbers of a list or an array; of a mask, the numbers of its true values."""
        is_mask = at.dtype == bool if isinstance(at, np.ndarray) else at and all(isinstance(each, bool) for each in at)
        if not is_mask:
            return at
        mask = np.asarray(at)
        if mask.shape != (self.size,):
            raise ConfigError(f"a mask has a boolean for each of the {self.size} items, got one of shape {mask.shape}")
        return np.flatnonzero(mask)


def package() -> Any:
    """Return MosaicML's package if the program has imported it, else None, also for other modules of this name."""
    found = sys.modules.get("streaming")
    return found if getattr(found, "__name__", "") == "streaming" and hasattr(found, "StreamingDataset") else None


if TYPE_CHECKING:
    StreamBase = PlainStream
else:
    StreamBase = object  # streams are of our class, of MosaicML's, or of both


class OfPaths(StreamBase):
    """Keywords of a Stream; remote and local may be paths."""

    def __init__(self, *, remote: str | Path | None = None, local: str | Path | None = None, **keywords: Any):
        if remote is None and local is None:
            raise ConfigError("a dataset needs remote (a folder or a URL), or local (a folder that holds all of it)")
        remote = local_path("remote", remote) if remote is not None and is_folder(remote) else remote
        local = None if local is None else local_path("local", local)
        folder = default_cache_folder(str(remote)) if local is None else local
        super().__init__(remote=None if remote is None else str(remote), local=str(folder), **keywords)
        self._local = None if local is None else str(local)  # the user's own value, as in the parent


class Stream(OfPaths, PlainStream):
    """MosaicML Streaming's Stream, with the same keywords; remote and local may be paths.

    Without local, shards are kept in a folder of this user below the system's temporary folder, which may exist.
    """


def registered_stream(name: str, keywords: dict[str, Any]) -> StreamBase:
    """Return a stream of the class registered with MosaicML's package under a name."""
    if package() is None:
        raise ConfigError(
            f"stream_name {name!r} is registered with MosaicML's package, which is not imported: first import the "
            "module that registers it, or pass streams"
        )
    from streaming.base.registry_utils import construct_from_registry
    from streaming.base.stream import streams_registry

    stream: StreamBase = construct_from_registry(name, streams_registry, partial_function=False, kwargs=keywords)
    return stream


def config_of(stream: StreamBase) -> StreamConfig:
    """Return location and fetch settings of a stream; overridden methods of the stream's class are used."""
    is_read_in_place = stream._local is None and is_folder(stream.remote)
    hooks = _hooks_of(stream)
    return StreamConfig(
        remote=stream.remote,
        local=None if is_read_in_place else stream.local,
        split=stream.split or None,
        retry=Retry(attempts=1 + stream.download_retry, timeout_s=shortened_wait(stream.download_timeout)),
        validate_hash=stream.validate_hash,
        keep_zip=stream.keep_zip,
        source=HookedStream(stream, hooks) if hooks else None,
    )


def _hooks_of(stream: StreamBase) -> list[str]:
    """Return the overridden methods for fetching in the class of a stream."""
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
    """Set the samples of each stream in an epoch (choose), and the resulting proportion and repeat of the stream.

    Return the samples of an epoch. sizes: samples of each stream. seed: of the draw that distributes the remainders of
    rounding over streams, as in MosaicML; None: streams with the largest remainders get a sample more. Raises the
    ConfigErrors of samples_chosen.
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
    """Return the samples by repeat or choose, rounded in MosaicML's way."""
    return int(size if share.repeat is None else share.repeat * size) if share.choose is None else int(share.choose)
