"""The core of a dataset: its stored streams, its samples by number, and the plan of its packs. -> loader, commands.

Loaders and workers hold the core. MosaicML's class wraps the core (mosaic.py); nothing here needs MosaicML's package.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..plan.assign import most_served
from ..plan.epoch_plan import TOKENS
from ..plan.lanes import default_lanes
from ..plan.order import OrderConfig, default_canonical_nodes, in_stored_order
from ..plan.pack_plan import PackPlan, short_digest
from ..plan.packing import PackingConfig
from ..plan.sample_order import Streams
from ..processors.base import Compared, PackFiller, Processor
from ..processors.lengths import measured_columns
from ..storage.eviction import CacheQuota, least_cache_limit
from ..storage.failures import disk_errors
from ..storage.fetch_config import FetchConfig
from ..storage.locks import file_of, leftovers, lock_of, locked, remove_leftovers, written_whole
from ..storage.storage import Storage
from ..types import Sample, World
from .auto import ensure_lengths
from .index import ShardInfo
from .lengths import LengthIndex, concatenated
from .provenance import Provenance, SourceRow
from .reader import ShardReader
from .shard_list import SourcedShards
from .streams import StoredDataset, StreamConfig

PackingMode = Literal["auto", "plan", "lanes"]
Sources = str | Path | StreamConfig | Sequence[str | Path | StreamConfig]


class PackedDataset:
    """Stored streams, read by sample number, and the plan of their packs.

    streams: a folder or a URL, or several, with consecutive sample numbers. names: of the streams (default: the last
    part of each URL). counts: samples of each stream in an epoch (default: each sample once); packs of several streams,
    or of other counts, follow the order of SampleOrder. processor, packing: needed for packs. packing_mode: see
    PackedStreamingDataset. Raises StorageError, ShardError, ConfigError.
    """

    def __init__(
        self,
        streams: Sources,
        *,
        processor: Processor | None = None,
        packing: PackingConfig | None = None,
        packing_mode: PackingMode = "auto",
        order: OrderConfig | None = None,
        fetch: FetchConfig | None = None,
        world: World | None = None,
        names: Sequence[str] = (),
        counts: Sequence[int] = (),
    ):
        self.processor = processor
        self.packing = packing
        self.packing_mode = packing_mode
        self.order = order or OrderConfig()
        self.world = world or World.detect()
        self.fetch = fetch or FetchConfig()
        self.stored = [StoredDataset(stream, config=self.fetch) for stream in _streams(streams)]
        self.num_samples = sum(stored.num_samples for stored in self.stored)
        self._provenance: dict[int, Provenance | None] = {}  # of streams, read at the first request
        parts = [stored.url.rstrip("/").rsplit("/", 1)[-1] for stored in self.stored]
        numbered = (f"{name} ({at})" if parts.count(name) > 1 else name for at, name in enumerate(parts, 1))
        self.names = tuple(names or numbered)
        self.counts = tuple(counts) or tuple(stored.num_samples for stored in self.stored)
        self._limit_cache()
        self.reader = self._open_reader(None)

    def _limit_cache(self) -> None:
        limit = self.fetch.limit_bytes
        if limit is not None:
            copied = [stored for stored in self.stored if stored.is_copied]
            quota = CacheQuota([folder for stored in copied for folder in stored.shard_folders], limit)
            for stored in copied:
                stored.limit(quota)

    def _open_reader(self, columns: Sequence[str] | None) -> ShardReader:
        shards = SourcedShards([(stored.cache, stored.shards) for stored in self.stored])
        return ShardReader(shards, config=self.fetch, columns=columns)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("plan", "pack_reader", "measure_reader")
        } | {"_provenance": {}}

    # Samples

    @property
    def url(self) -> str:
        return ", ".join(stored.url for stored in self.stored)

    @property
    def shard_infos(self) -> list[ShardInfo]:
        """The index entries of all shards, stream after stream; a list in memory."""
        return [info for stored in self.stored for info in stored.shards]

    @property
    def samples_per_shard(self) -> NDArray[np.int64]:
        return self.reader.samples_per_shard

    @property
    def num_canonical_nodes(self) -> int:
        """Canonical nodes of whole epochs in this order; for lanes see lane_order."""
        return in_stored_order(self.order).num_canonical_nodes or default_canonical_nodes(self.num_samples)

    def read(self, sample_ids: Sequence[int] | NDArray[np.int64]) -> list[Sample]:
        """Return the samples of the ids, in the given order; negative ids count from the end, like in NumPy.

        Raises ConfigError for ids that are not integers, IndexError for an id outside the dataset.
        """
        given = np.asarray(sample_ids)
        if given.size and given.dtype.kind not in "iu":  # NumPy would cut fractions, and take a mask for 0 and 1
            raise ConfigError(f"samples are read by their ids, which are integers, got an array of {given.dtype}")
        ids = given.astype(np.int64)
        wrong = ids[(ids < -self.num_samples) | (ids >= self.num_samples)]
        if len(wrong):
            raise IndexError(f"sample {wrong[0]} of a dataset of {self.num_samples}")
        return list(self.reader.samples(np.where(ids < 0, ids + self.num_samples, ids)))

    def origin_of(self, sample_id: int) -> SourceRow | None:
        """The original source row of a sample; None if the dataset does not record rows. See Provenance."""
        number, within = self.place_of(sample_id)
        if number not in self._provenance:
            stored = self.stored[number]
            self._provenance[number] = Provenance.of(stored.storage, stored.cache.folder)
        provenance = self._provenance[number]
        return None if provenance is None else provenance.source_of(within)

    def place_of(self, sample_id: int) -> tuple[int, int]:
        """Return the number of a sample's stream, and the number of the sample in the stream."""
        for number, stored in enumerate(self.stored):
            if sample_id < stored.num_samples:
                return number, sample_id
            sample_id -= stored.num_samples
        raise IndexError(f"sample {sample_id + self.num_samples} of a dataset of {self.num_samples}")

    def name_of(self, sample_id: int) -> str:
        """Return the name of a sample for errors: its number in its stream, and the stream's URL."""
        number, within = self.place_of(sample_id)
        return f"sample {within} of {self.stored[number].url}"

    def listed_name(self, source: str, sample_id: int) -> str:
        """Return a sample's name for lists and the log, SOURCE:ID; STREAM:NUMBER for a source of several streams."""
        stream, number = self.place_of(sample_id)
        return f"{source if len(self.stored) == 1 else self.names[stream]}:{number}"

    def sample_named(self, stream: str, number: int) -> int | None:
        """Return the id of a stream's sample; None for an unknown stream or number."""
        if stream not in self.names or not 0 <= number < self.stored[self.names.index(stream)].num_samples:
            return None
        return number + sum(each.num_samples for each in self.stored[: self.names.index(stream)])

    @property
    def identity(self) -> str:
        """Identity of the only stream, or of all streams together; see StoredDataset."""
        identities = [stored.identity for stored in self.stored]
        return identities[0] if len(identities) == 1 else short_digest("-".join(identities).encode())

    @property
    def is_mixed(self) -> bool:
        """Whether packs hold samples of several streams, or an epoch has other samples than each once."""
        return len(self.stored) > 1 or list(self.counts) != [stored.num_samples for stored in self.stored]

    def samples_of(self, file: str, row: int) -> list[int]:
        """Ids of the samples made from a row of a converted file, rows counted from 1; see Provenance.

        ConfigError if no stream records source rows, or no stream was made from this file.
        """
        found: list[int] = []
        reasons = ["it does not say what it was made of: convert it again"]
        first, is_known = 0, False
        for number, stored in enumerate(self.stored):
            if number not in self._provenance:
                self._provenance[number] = Provenance.of(stored.storage, stored.cache.folder)
            provenance = self._provenance[number]
            try:
                if provenance is not None:
                    ids = provenance.sample_of(file, row).tolist()
                    found += [
                        first + each for each in ids if each < stored.num_samples
                    ]  # other ids belong to later parts
                    is_known = True
            except ConfigError as error:
                reasons.append(str(error))
            first += stored.num_samples
        if not is_known:
            raise ConfigError(reasons[-1])
        return found

    def check_cache_limit(self, *, samples_ahead: int) -> None:
        """Raise ConfigError for a cache_limit at which shards would be fetched again and again.

        samples_ahead: distance between loader workers of this node, in samples.
        """
        limit = self.fetch.limit_bytes
        if limit is None or not any(stored.is_copied for stored in self.stored):
            return
        nodes = self.num_canonical_nodes
        if self.packing is not None and self.mode == "lanes":
            nodes = int(self.lane_order.num_canonical_nodes or 1)
        least = sum(
            least_cache_limit(
                stored.shards.sizes,
                stored.shards.samples,
                zip_bytes=int(stored.shards.zip_sizes.max(initial=0)),
                block=self.order.shuffle_block_size,
                num_canonical_nodes=nodes,
                num_served=most_served(nodes=self.world.group_nodes, num_canonical_nodes=nodes),
                samples_ahead=samples_ahead,
            )
            for stored in self.stored  # each reads from blocks of its own
        )
        if limit < least:
            raise ConfigError(
                f"cache_limit is {limit} bytes, and this order reads from {least} bytes of shards at a time: raise it "
                f"to {least}, or lower shuffle_block_size (now {self.order.shuffle_block_size} samples), "
                "num_canonical_nodes or the steps of balance"
            )

    def coldest_shard(self) -> int:
        """Number of the shard with our least recently used copy; ConfigError if no shard is a copy of ours."""
        uses = ((cache.last_use(info.name), shard_id) for shard_id, (cache, info) in enumerate(self.reader.shards))
        _, shard_id = min((each for each in uses if each[0]), default=(0, None))
        if shard_id is None:
            raise ConfigError("no shard on this node is a copy of ours: there is nothing to evict")
        return shard_id

    # A single stored dataset, for packs

    @property
    def one(self) -> StoredDataset:
        """The only stream; ConfigError for several streams."""
        if len(self.stored) > 1:
            raise ConfigError(
                f"this needs a dataset of one stream, and {self.url} are {len(self.stored)} streams: open each by "
                "itself, or mix whole packs of them (mixing: packs)"
            )
        return self.stored[0]

    @property
    def storage(self) -> Storage:
        return self.one.storage

    @cached_property
    def mode(self) -> Literal["plan", "lanes"]:
        """Source of packs, "plan" or "lanes"; "auto" is a plan, and measures missing lengths."""
        if self.packing_mode == "lanes" and self.is_mixed:
            raise ConfigError(
                "lanes pack a single dataset, each sample once an epoch, and cannot mix the samples of streams: write "
                "lengths indexes with lmms-stream index, and set packing_mode to auto"
            )
        if self.packing_mode != "auto":
            return self.packing_mode
        if self.processor is not None:
            for stored in self.stored:
                ensure_lengths(stored, self.processor, world=self.world)
        return "plan"

    @cached_property
    def plan(self) -> PackPlan:
        """The packs of every epoch; ConfigError without processor and packing, LengthsError without an index."""
        counts = PackCountsFolder(self.stored[0].state_folder / "_lmms" / "counts")
        return PackPlan(
            self.length_index(),
            self.samples_per_shard,
            order=self.order,
            packing=self.needed_packing,
            counts_cache=counts,
            counting=counts.counting,
            streams=self.streams,
        )

    @property
    def streams(self) -> Streams | None:
        """Streams whose samples packs mix; None for a single stream with each sample once an epoch."""
        if not self.is_mixed:
            return None
        return Streams(self.names, tuple(len(stored.shards) for stored in self.stored), self.counts)

    @property
    def needed_packing(self) -> PackingConfig:
        """The packing config; ConfigError without packing, or if packing would cut samples of answers to compare."""
        if self.packing is None:
            raise ConfigError("packs need packing: give the dataset a PackingConfig (packing_length)")
        objective = getattr(self.processor, "objective", None)
        if self.packing.overlong in ("truncate", "split") and objective in get_args(Compared):
            raise ConfigError(
                f"overlong is {self.packing.overlong}, and samples for {objective} are answers to compare, which are "
                "never cut: set overlong to drop or error"
            )
        return self.packing

    def length_index(self) -> LengthIndex:
        """The lengths index of this dataset's processor, memory-mapped; LengthsError without an index.

        Without a processor: the index written last. The lengths of several streams are joined in a file on this node, 4
        bytes a sample.
        """
        indexes = [stored.length_index(self.processor) for stored in self.stored]
        return indexes[0] if len(indexes) == 1 else concatenated(indexes, join=self._joined)

    def _joined(self, key: str, parts: Sequence[NDArray[np.integer[Any]]]) -> NDArray[np.integer[Any]]:
        """Return arrays joined in a file, memory-mapped; the first process of a node joins them."""
        if not self.num_samples:
            return np.concatenate(parts)
        key += "-" + short_digest(repr([len(each) for each in parts]).encode())
        kept = PackCountsFolder(self.stored[0].state_folder / "_lmms" / "joined", num_kept=KEPT_JOINED, is_mapped=True)
        if key not in kept:
            with kept.counting(key):
                if key not in kept:
                    kept[key] = np.concatenate(parts)
        return kept[key]

    @property
    def lane_order(self) -> OrderConfig:
        """Order of lanes, a canonical node per lane; default number of lanes by dataset size and window."""
        lanes = self.order.num_canonical_nodes or default_lanes(self.num_samples, self.needed_packing.window)
        return dataclasses.replace(self.order, num_canonical_nodes=lanes)

    @cached_property
    def measure_reader(self) -> ShardReader:
        """Reader of the columns needed for measuring, if fewer than the columns for packs."""
        columns = None if self.processor is None else measured_columns(self.processor)
        if columns is None or self.processor is None or columns == self.processor.columns:
            return self.pack_reader
        return self._open_reader(columns)

    @cached_property
    def pack_reader(self) -> ShardReader:
        """Reader of the processor's columns of each sample, for packs."""
        for stored in self.stored:
            if len(stored.shards.columns) > 1:
                raise ConfigError(f"the shards of {stored.url} differ in their columns: convert the dataset again")
        columns = [*dict.fromkeys(columns for stored in self.stored for columns in stored.shards.columns)]
        if len(columns) > 1 and isinstance(self.processor, PackFiller):
            raise ConfigError(
                f"the streams of {self.url} differ in their columns ({', '.join(columns[0].names)}, and "
                f"{', '.join(columns[1].names)}): convert them with the same options, or mix whole packs of them "
                "(mixing: packs)"
            )
        return self._open_reader(self.processor.columns if self.processor is not None else None)


class HasCore(Protocol):
    """A dataset around a core, for example PackedStreamingDataset."""

    @property
    def core(self) -> PackedDataset: ...


@runtime_checkable
class OpensLoader(Protocol):
    """A dataset without a core: packs are not known by number, and the dataset's own loader reads the packs."""

    @property
    def processor(self) -> Processor: ...

    def open_loader(self, **options: Any) -> Any:
        """Return a loader with the members of PackedLoader. options: PackedLoader's options."""
        ...


def opens_loader(dataset: object) -> TypeGuard[OpensLoader]:
    """Whether batches of a dataset come from its own loader, and not from its core."""
    return not hasattr(dataset, "core") and isinstance(dataset, OpensLoader)


def gives_packs(dataset: object) -> bool:
    """Whether loaders and trainers can read packs of a dataset, by the core or by the dataset's own loader."""
    return opens_loader(dataset) or isinstance(getattr(dataset, "core", dataset), PackedDataset)


def _streams(sources: Sources) -> list[StreamConfig]:
    """Return the streams named by sources; ConfigError for other values."""
    several = [sources] if isinstance(sources, str | Path | StreamConfig) else sources
    if not isinstance(several, Sequence) or not all(isinstance(each, str | Path | StreamConfig) for each in several):
        raise ConfigError(f"a dataset is read from a folder, a URL or StreamConfigs, got {sources!r}: give one of them")
    return [each if isinstance(each, StreamConfig) else StreamConfig(remote=each) for each in several]


def processor_of(dataset: PackedDataset | HasCore | OpensLoader) -> Processor | None:
    """Return the processor of a dataset; ConfigError for other values."""
    return dataset.processor if opens_loader(dataset) else core_of(dataset).processor  # type: ignore[arg-type]


def core_of(dataset: PackedDataset | HasCore) -> PackedDataset:
    """Return the core of a dataset, or a core itself; ConfigError for other values.

    Loaders, trainers and commands accept both, and therefore work without MosaicML's package.
    """
    core = getattr(dataset, "core", dataset)
    if not isinstance(core, PackedDataset):
        raise ConfigError(
            f"packs come from a PackedStreamingDataset, got a {type(dataset).__name__}: open its folder or URL with "
            "PackedStreamingDataset"
        )
    return core


# Pack counts of plans, and joined lengths of several streams, in folders of the dataset's copy on this node.

KEPT_FILES = 256  # most recently used files: for example sixteen epochs of sixteen plans
KEPT_JOINED = 8  # joined lengths
WAIT_S = 600.0  # longest wait for another counting process


class PackCountsFolder(MutableMapping[str, NDArray[Any]]):
    """Arrays in files `<key>.npy` of a folder: pack counts (see PackPlan's counts_cache), or joined lengths.

    Only the num_kept (0: KEPT_FILES) most recently used files stay. is_mapped: arrays are memory-mapped.
    """

    def __init__(self, folder: Path, *, num_kept: int = 0, is_mapped: bool = False):
        self._folder, self._num_kept, self._is_mapped = folder, num_kept or KEPT_FILES, is_mapped

    def __getitem__(self, key: str) -> NDArray[Any]:
        path = self._folder / f"{key}.npy"
        try:
            is_mapped = self._is_mapped or key.endswith(TOKENS)
            counts: NDArray[Any] = np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # missing or cut short: counted again
            raise KeyError(key) from None
        with suppress(OSError):  # in a read-only folder no file is removed either
            os.utime(path)
        return counts if is_mapped else np.asarray(counts, dtype=np.int64)

    def __setitem__(self, key: str, counts: NDArray[Any]) -> None:
        path = self._folder / f"{key}.npy"
        with disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as temporary, temporary.open("wb") as file:
                np.save(file, counts)
            self._remove_old()

    def __delitem__(self, key: str) -> None:
        (self._folder / f"{key}.npy").unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._folder.glob("[!.]*.npy"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @contextmanager
    def counting(self, key: str) -> Iterator[None]:
        """Hold the lock for counting the packs of a key; other processes enter after the counting.

        The lock is the kernel's: nobody waits for a killed process.
        """
        path = self._folder / f"{key}.npy"
        lock_path = lock_of(path)
        with disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(lock_path, timeout_s=WAIT_S) as lock:
                if lock is not None:
                    remove_leftovers(path)
                try:
                    yield
                finally:
                    if lock is not None:
                        lock_path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """Remove the least recently used files, and leftovers of killed processes."""
        used = []
        for path in self._folder.glob("[!.]*.npy"):
            with suppress(FileNotFoundError):  # another process removes the same
                used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used, reverse=True)[self._num_kept :]:
            path.unlink(missing_ok=True)
        unfinished = {*leftovers(self._folder), *(file_of(path) for path in self._folder.glob(".*.npy.lock"))}
        for path in unfinished:
            lock_path = lock_of(path)
            with locked(lock_path, timeout_s=0) as lock:
                if lock is not None:  # otherwise a process uses the file
                    remove_leftovers(path)
                    lock_path.unlink(missing_ok=True)
