"""MosaicML Streaming's classes over our core: the same keywords and samples, our reader, cache and errors.

Partitions, shuffles, sampling and weights of streams follow MosaicML's arithmetic (plan/mosaic_order): orders are equal
sample by sample, and checkpoints load. Our core replaces named shared memory, barriers, polling threads and the cache.
The files in the cache folder are the only record of fetched shards, and locks belong to the kernel: a killed run leaves
nothing that stops the next run. doors/mosaicml.py has these classes as subclasses of the classes of MosaicML's package.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from ..checks import NamedLikeTheirs, check_arguments, shortened_wait
from ..errors import ConfigError, CursorError
from ..plan.mosaic_order import ALGORITHMS, BATCHING_METHODS, PARTITIONS, Readers, check_position, sampled
from ..plan.order import OrderConfig
from ..plan.pack_plan import short_digest
from ..plan.sample_order import Reader, SampleOrder
from ..storage.fetch_config import FetchConfig
from ..types import Sample, World
from .core import PackedDataset
from .epochs import EpochCounter, EqualWorld, check_state, epoch_work, order_of, sources_of
from .mosaic_shards import StoredSamples
from .mosaic_streams import (
    Numbered,
    OfPackage,
    PlainLoader,
    Stream,
    StreamBase,
    config_of,
    one_sample,
    registered_stream,
    weigh,
)
from .reader import CHUNK
from .shard import try_fetch_shard
from .streams import StreamConfig

# Settings in a state besides MosaicML's: with other values a position belongs to another order.
_SAVED = ("shuffle", "shuffle_algo", "batching_method", "sampling_method", "sampling_granularity", "epoch_size")
_FEW_SHARDS = 4  # of the largest size: MosaicML's class refuses a smaller cache_limit


_STREAMS, _ITEMS = "override the methods of a Stream that fetch", "override __getitem__ or get_item"


class StreamingDataset(NamedLikeTheirs, OfPackage, StoredSamples, IterableDataset[Any]):
    """MosaicML Streaming's StreamingDataset: its keywords, defaults, samples, order, lengths and checkpoints.

    See MosaicML's documentation, and docs/mosaicml.md for differences. shuffle_algo: also "blocks", our own order,
    without an array of the epoch: a dataset of any size begins at once. All processes of a node share cache_limit.
    Raises ConfigError, CursorError, StorageError, ShardError.
    """

    NOT_CALLED: ClassVar = {
        **dict.fromkeys(("prepare_shard", "evict_shard", "evict_coldest_shard", "_evict_shard"), _STREAMS),
        **dict.fromkeys(("_evict_coldest_shard", "_prepare_thread", "_ready_thread", "on_exception"), _STREAMS),
        **dict.fromkeys(("_each_sample_id", "_get_work", "_share_work", "_attach_work", "resample_streams"), _ITEMS),
        **dict.fromkeys(("_resume_incr_epoch", "_set_shuffle_block_size"), "set next_epoch, or shuffle_block_size"),
    }
    Stream: Callable[..., StreamBase] = Stream  # class of the stream made from remote and local

    def __init__(
        self,
        *,
        streams: Sequence[StreamBase] | None = None,
        remote: str | Path | None = None,
        local: str | Path | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60.0,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | str | None = None,
        predownload: int | None = None,
        cache_limit: int | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str = "py1e",
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        stream_name: str = "stream",
        stream_config: dict[str, Any] | None = None,
    ):
        check_arguments(StreamingDataset.__init__, locals())
        self.sampling_method = sampling_method
        self.sampling_granularity = sampling_granularity
        self.partition_algo = partition_algo
        self.num_canonical_nodes = num_canonical_nodes
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.shuffle_algo = shuffle_algo
        self.shuffle_seed = shuffle_seed
        self.shuffle_block_size = self._asked_block_size = shuffle_block_size
        self.batching_method = batching_method
        self.allow_unsafe_types = allow_unsafe_types
        self.replication = replication
        self.initial_physical_nodes = None
        self.saved_ranks = 0  # ranks of the run that saved the loaded state
        self.epoch_seed_change = shuffle and sampling_method == "balanced"
        self.predownload = predownload or (CHUNK if self._is_ours else 8 * (batch_size or 8))
        check_settings(self)
        self._set_world(World.detect())
        if streams and not (remote is None and local is None):
            raise ConfigError("a dataset has either streams, or remote and local: leave one of them out")
        if streams is not None and not streams and remote is None and local is None:
            raise ConfigError("streams is empty: name at least one")
        defaults = {
            "remote": remote, "local": local, "split": split, "download_retry": download_retry,
            "download_timeout": download_timeout, "validate_hash": validate_hash, "keep_zip": keep_zip,
        }  # fmt: skip
        self.streams = (
            list(streams) if streams else [self._one_stream(stream_name, {**(stream_config or {}), **defaults})]
        )
        for stream in self.streams:
            stream.apply_default(defaults)
        fetch = FetchConfig(
            attempts=1 + download_retry, timeout_s=shortened_wait(download_timeout), cache_limit=cache_limit or None
        )
        self.core = self._open_core([config_of(stream) for stream in self.streams], fetch)
        self.cache_limit = self.core.fetch.limit_bytes
        self._asked_epoch_size = whole_number(epoch_size)
        self._set_sizes()
        self._check_cache_limit()
        self._epochs = EpochCounter()

    def _one_stream(self, name: str, keywords: dict[str, Any]) -> StreamBase:
        return type(self).Stream(**keywords) if name == "stream" else registered_stream(name, keywords)

    @property
    def _is_ours(self) -> bool:
        return self.shuffle_algo == BLOCKS

    def _set_world(self, world: World) -> None:
        if self.replication is not None:
            world = dataclasses.replace(world, replication=self.replication)
        self.world = world
        nodes = 1 if world.ranks_per_node else world.num_nodes  # the parent's nodes are equal
        ranks = EqualWorld(num_nodes=nodes, ranks_per_node=world.world_size // nodes, worker=world.rank)
        self._unique_rank_world = ranks
        self._parallel_rank_world = ranks.replicate(world.replication)

    def _open_core(self, streams: Sequence[StreamConfig], fetch: FetchConfig) -> PackedDataset:
        return PackedDataset(streams, order=self._order if self._is_ours else None, fetch=fetch, world=self.world)

    @property
    def _order(self) -> OrderConfig:
        """Our order config, from the keywords."""
        block_size: dict[str, Any] = (
            {} if self.shuffle_block_size is None else {"shuffle_block_size": self.shuffle_block_size}
        )
        return OrderConfig(
            seed=self.shuffle_seed, shuffle=self.shuffle, num_canonical_nodes=self.num_canonical_nodes, **block_size
        )

    def _set_sizes(self) -> None:
        """Set the numbers of streams, shards and samples, and the samples of each stream in an epoch."""
        streams = self.core.stored
        self.num_samples = self.core.num_samples
        self.num_streams, self.num_shards = len(streams), len(self.core.reader.shards)
        self.samples_per_shard = self.core.samples_per_shard
        self.sample_offset_per_shard = np.cumsum(self.samples_per_shard) - self.samples_per_shard
        self.shards_per_stream = np.array([len(stream.shards) for stream in streams], np.int64)
        self.shard_offset_per_stream = np.cumsum(self.shards_per_stream) - self.shards_per_stream
        self.stream_per_shard = np.repeat(np.arange(len(streams)), self.shards_per_stream)
        self.samples_per_stream = np.array([stream.num_samples for stream in streams], np.int64)
        self.sample_offset_per_stream = np.cumsum(self.samples_per_stream) - self.samples_per_stream
        self._weigh()
        self.streams = [copy.copy(stream) for stream in self.streams]  # the user's streams may get other weights
        self.length = math.ceil(self.epoch_size / self._parallel_rank_world.num_ranks)

    def _weigh(self) -> None:
        self.epoch_size = weigh(
            self.streams,
            self.samples_per_stream,
            epoch_size=self._asked_epoch_size,
            seed=None if self._is_ours else self.shuffle_seed,
        )

    def _check_cache_limit(self) -> None:
        if self._is_ours or self.cache_limit is None:
            return
        largest = max(int((each.shards.sizes + each.shards.zip_sizes).max()) for each in self.core.stored)
        if self.cache_limit < largest:
            raise ConfigError(
                f"cache_limit is {self.cache_limit} bytes and the largest shard takes {largest}: raise it to at least "
                "this size, or to many times this size for a shuffled order"
            )
        if self.shuffle and self.cache_limit < _FEW_SHARDS * largest:
            warnings.warn(
                f"cache_limit is {self.cache_limit} bytes, fewer than {_FEW_SHARDS} of the largest shard ({largest}) "
                "take: in a shuffled order nearly each sample fetches its shard again: raise it, or take shuffle_algo "
                "'blocks'",
                stacklevel=3,
            )

    # Samples by number

    def __len__(self) -> int:
        """Return the number of samples of this rank in an epoch; size is the number in the streams."""
        return self.length

    def read(self, sample_ids: Sequence[int] | NDArray[np.int64]) -> list[Sample]:
        """Return the samples of the ids, in the given order; negative ids count from the end."""
        return self.core.read(sample_ids)

    # Iteration

    def __iter__(self) -> Iterator[Sample]:
        """Yield the share of this rank and worker in the next epoch, in order, from the position of a loaded state."""
        self.world.refuse_guess("start as many ranks on each node, or read with PackedLoader, which takes a world")
        worker = get_worker_info()
        if self.world.rank == 0 and (worker is None or worker.id == 0):
            self._warn_of_late_package()
        world = self._parallel_rank_world.with_workers(worker)
        epoch, position = self._resume(world, self._epochs.begin(worker))
        share = self._our_share if self._is_ours else self._share
        chunks = _pieces(share(world, epoch, position), self.predownload)
        reader, mine = self.core.reader, type(self)
        if mine.__getitem__ is Numbered.__getitem__ and mine.get_item is StreamingDataset.get_item:
            yield from reader.read_all(chunks)
            return
        for sample_ids, *_ in reader.ahead(chunks):
            yield from map(self.__getitem__, sample_ids.tolist())

    def _share(self, world: EqualWorld, epoch: int, position: int) -> Iterator[NDArray[np.int64]]:
        """Yield the sample ids of this rank and worker, in an order of MosaicML."""
        if not isinstance(self.batch_size, int):
            raise ConfigError(
                f"Please pass `batch_size` to StreamingDataset, got {self.batch_size!r}: its order depends on it. "
                "Write DataLoader(StreamingDataset(…, batch_size=8), batch_size=8), with the number of your DataLoader"
            )
        yield epoch_work(self, world, epoch, position, folder=self.core.stored[0].state_folder)

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sizes of pieces of shards in an epoch, and their sample ids, of a stream or of all streams."""
        sources = sources_of(self)
        return sampled(order_of(self), sources if stream_id is None else [sources[stream_id]], epoch)

    def _our_share(self, world: EqualWorld, epoch: int, position: int) -> Iterator[NDArray[np.int64]]:
        self.core.check_cache_limit(samples_ahead=CHUNK)
        share = Reader(
            batch_size=self.batch_size or 1,
            num_groups=self.world.num_groups,
            group=self.world.group,
            num_workers=world.workers_per_rank,
            worker=world.worker_of_rank,
            num_nodes=self.world.num_equal_nodes,
        )
        order = SampleOrder(
            [stored.shards.samples for stored in self.core.stored],
            counts=[int(stream.choose) for stream in self.streams],
            config=self.core.order,
            epoch=epoch,
        )
        return order.share(min(position, self.epoch_size), reader=share)

    # State

    @property
    def next_epoch(self) -> int:
        """Epoch of the next iteration."""
        return self._epochs.next_epoch

    @next_epoch.setter
    def next_epoch(self, next_epoch: int) -> None:
        self._epochs.next_epoch = next_epoch

    def _resume(self, world: EqualWorld, epoch: int) -> tuple[int, int]:
        """Return the epoch of an iteration and the first position, by the last loaded state.

        The settings of the state also count for later epochs, for agreement with ranks and workers that start later.
        """
        saved, position = self._epochs.loaded(), 0
        if saved is not None:
            self.num_canonical_nodes = saved["num_canonical_nodes"]
            if saved["shuffle_seed"] != self.shuffle_seed:
                self.shuffle_seed = saved["shuffle_seed"]
                self._weigh()
            self.initial_physical_nodes = saved.get("initial_physical_nodes")
            self.saved_ranks = saved.get("num_ranks") or 0
            self.shuffle_block_size = self._asked_block_size or saved.get("shuffle_block_size")
            if saved["epoch"] >= epoch:
                epoch, position = saved["epoch"], saved["sample_in_epoch"]
        if self._is_ours:
            self.num_canonical_nodes = self.core.num_canonical_nodes
            self.shuffle_block_size = self.core.order.shuffle_block_size
        elif not self.num_canonical_nodes:
            self.num_canonical_nodes = (64 if self.shuffle_algo in ("py1s", "py2s") else 1) * world.num_nodes
        if self.shuffle_block_size is None:
            self.shuffle_block_size = max(4_000_000 // int(self.num_canonical_nodes or 1), 1 << 18)
        return epoch, position

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the state after `num_samples` samples of all ranks, from the epoch's start or from a loaded state.

        StreamingDataLoader saves this state: the parent's state, and the other settings of the order. The state fits
        any number of ranks and workers. Packs have their own cursor: PackedLoader.state_dict.
        """
        world = self._parallel_rank_world
        epoch, position = self._resume(world, max(self.next_epoch - 1, 0))  # before the first epoch: the first epoch
        initial_nodes = self.initial_physical_nodes
        state = {
            "epoch": epoch,
            "sample_in_epoch": num_samples if from_beginning else position + num_samples,
            "num_canonical_nodes": self.num_canonical_nodes,
            "shuffle_seed": self.shuffle_seed,
            "initial_physical_nodes": world.num_nodes if initial_nodes is None else initial_nodes,
            "num_ranks": max(world.num_ranks, self.saved_ranks),
        }
        return state | self._saved | {"shuffle_block_size": self.shuffle_block_size}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Resume from a state of state_dict or of the parent; CursorError for another order, or beyond the epoch.

        As in the parent, the dataset takes num_canonical_nodes and shuffle_seed from the state; with "blocks" they must
        equal ours.
        """
        ours = self._saved
        if self._is_ours:
            ours["shuffle_seed"] = self.shuffle_seed
            ours["num_canonical_nodes"] = self.core.num_canonical_nodes
            ours["shuffle_block_size"] = self.core.order.shuffle_block_size
            state = check_state(obj, ours, unsaved={"shuffle_algo": "one of MosaicML's"})
        else:
            if self._asked_block_size is not None:
                ours["shuffle_block_size"] = self._asked_block_size
            state = check_state(obj, ours, unsaved=ours)
        order = dataclasses.replace(
            order_of(self),
            num_canonical_nodes=1 if self._is_ours else state["num_canonical_nodes"],
            initial_physical_nodes=state.get("initial_physical_nodes"),
            saved_ranks=state.get("num_ranks") or 0,
        )
        world, num_streams = self._parallel_rank_world, len(self.streams)
        readers = Readers(world.num_nodes, world.ranks_per_node, 1)
        try:
            check_position(order, self.epoch_size, readers, state["sample_in_epoch"], num_streams)
        except ValueError as error:
            raise CursorError(str(error)) from error
        self._epochs.load(state)

    @property
    def _saved(self) -> dict[str, Any]:
        """Settings in a state besides MosaicML's, and a digest of the samples of each stream's shards."""
        shards = short_digest(self.samples_per_shard.tobytes() + self.shards_per_stream.tobytes())
        return {name: getattr(self, name) for name in _SAVED} | {"shards": shards}

    # Shards

    @property
    def cache_usage(self) -> int:
        """Bytes of the shards on this node, in the cache folders, with their indexes."""
        return sum(stored.cache_usage for stored in self.core.stored)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard. Not blocking: skip a shard that another process fetches."""
        cache, info = self.core.reader.shards[shard_id]
        try_fetch_shard(cache, info, wait=blocking)

    def evict_shard(self, shard_id: int) -> None:
        """Delete our downloaded copy of a shard; other files stay."""
        cache, info = self.core.reader.shards[shard_id]
        cache.evict(info.name)

    def evict_coldest_shard(self) -> None:
        """Evict the shard with the least recently used copy; ConfigError without any copy."""
        self.evict_shard(self.core.coldest_shard())


def _pieces(chunks: Iterable[NDArray[np.int64]], size: int) -> Iterator[NDArray[np.int64]]:
    for chunk in chunks:
        yield from (chunk[first : first + size] for first in range(0, len(chunk), size))


def clean_stale_shared_memory() -> None:
    """MosaicML Streaming's call, without effect: our shared memory has no names, and a kill leaves no memory behind."""


# The keywords of a StreamingDataset, checked.

BLOCKS = "blocks"  # our order, as a shuffle_algo
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def check_settings(dataset: Any) -> None:
    """Raise ConfigError for a keyword with an unknown value, or incompatible with another keyword."""
    choices = {
        "sampling_method": ("balanced", "fixed"),
        "batching_method": BATCHING_METHODS,
        "shuffle_algo": (*ALGORITHMS, BLOCKS),
        "partition_algo": PARTITIONS,
    }
    for name, valid in choices.items():
        if getattr(dataset, name) not in valid:
            raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {getattr(dataset, name)!r}")
    least = {"sampling_granularity": 1, "shuffle_seed": 0, "batch_size": 1, "predownload": 1, "num_canonical_nodes": 0}
    for name, number in least.items():
        value = getattr(dataset, name)
        if value is not None and value < number:
            raise ConfigError(f"{name} must be {f'at least {number}' if number else '0 or more'}, got {value}")
    if dataset.allow_unsafe_types:
        raise ConfigError(
            "allow_unsafe_types is refused, because unpickling can run any code in the data: write such columns again "
            "with another encoding"
        )
    if dataset.shuffle_algo == BLOCKS and (dataset.batching_method, dataset.sampling_method) != ("random", "balanced"):
        raise ConfigError(
            f"shuffle_algo {BLOCKS!r} needs batching_method 'random' and sampling_method 'balanced', got "
            f"{dataset.batching_method!r} and {dataset.sampling_method!r}: choose another shuffle_algo"
        )


def whole_number(epoch_size: int | str | None) -> int | None:
    """Convert an epoch_size, possibly a text, to a number; None (also for 0) leaves the size to the streams."""
    text = str(epoch_size or 0).strip().lower()
    unit = _UNITS.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * unit if unit > 1 else int(text)) or None
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"epoch_size must be a number of samples, such as 100000 or '100k', got {epoch_size!r}"
        ) from error


# MosaicML Streaming's DataLoader over our dataset: batches, and the state of the dataset after them.


class StreamingDataLoader(OfPackage, PlainLoader):
    """MosaicML Streaming's StreamingDataLoader, with correct states in any world of its dataset.

    ConfigError if several workers or ranks share batches of another size than the dataset's: samples read would differ
    from the position in a state.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        dataset, size = self.dataset, 1 if self._gives_samples else self.batch_size
        if not isinstance(dataset, StreamingDataset) or size is None:
            return
        without = 1 if dataset.shuffle_algo == BLOCKS else size  # MosaicML's orders raise an error without a batch size
        own = dataset.batch_size or without
        if size != own and (self.num_workers > 1 or dataset.world.num_groups > 1):
            raise ConfigError(
                f"the loader's batches have {size} samples and the dataset's {own}, so a state would not match the "
                f"samples that workers and ranks have read: give the dataset batch_size={size}"
            )

    @property
    def _gives_samples(self) -> bool:
        """Whether neither the loader nor the dataset makes batches."""
        dataset = self.dataset
        is_ours = isinstance(dataset, StreamingDataset) and type(dataset).__iter__ is StreamingDataset.__iter__
        return self.batch_sampler is None and is_ours

    def _samples_of(self) -> Callable[[Any, Any], int]:
        return one_sample if self._gives_samples else super()._samples_of()

    def state_dict(self) -> dict[str, Any] | None:
        if not isinstance(self.dataset, StreamingDataset):
            return super().state_dict()
        return self.dataset.state_dict(self.num_samples_yielded * self.dataset.world.num_groups, False)
