"""A streaming.StreamingDataset that knows its packs. plan + shards -> [dataset] -> samples, and what packs them.

The only file that touches MosaicML's internals. Kept from the parent: the type, NumPy indexing, streams and their
shares, the state that StreamingDataLoader saves, its clouds and compressions. Replaced: the constructor's shared
memory, barriers and epoch state. What is on this node is what lies in the cache folder, and locks belong to the
kernel, so a killed run leaves nothing that stops the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from streaming import StreamingDataset
from torch.utils.data import get_worker_info

from ..errors import ConfigError, CursorError
from ..plan.lanes import default_lanes
from ..plan.order import OrderConfig, default_canonical_nodes, in_stored_order
from ..plan.pack_plan import PackPlan
from ..plan.packing import PackingConfig
from ..plan.sample_order import Reader, SampleOrder
from ..plan.shares import StreamShare, samples_chosen
from ..processors.base import Processor
from ..storage.fetch_config import FetchConfig
from ..storage.room import CacheRoom, least_room
from ..storage.storage import Storage
from ..types import Sample, World
from .auto import ensure_lengths
from .epochs import EpochCounter
from .index import ShardInfo
from .lengths import LengthIndex
from .pack_counts import PackCountsFolder
from .reader import CHUNK, ShardReader
from .streams import StoredDataset, Stream

PackingMode = Literal["auto", "plan", "lanes"]


class PackedStreamingDataset(StreamingDataset):  # type: ignore[misc]
    """Samples of MDS datasets by number, and the plan of their packs.

    remote: a local folder or a URL (s3://, gs://, …). local: where shards are kept on this node (default: a
    folder of this user's below the system's temporary folder); one of the two will do for a local dataset. streams:
    several datasets instead of one, iterated as one; epoch_size: samples of an epoch of theirs.

    processor and packing are needed for packs. packing_mode: "plan" takes packs from a lengths index, "lanes" packs
    as lengths are measured, "auto" (the default) takes them from the index, which it measures once where there is none.

    `ds[i]`, `ds[-1]`, slices, lists and arrays of numbers read samples as dicts of decoded columns. Iterating
    gives this rank's and worker's share of one epoch after another in the epoch order, unpacked: batch_size samples
    at a time, of which each replication of ranks reads the same. Raises StorageError, ShardError; see also `plan`.
    """

    def __init__(
        self,
        remote: str | Path | None = None,
        local: str | Path | None = None,
        *,
        streams: Sequence[Stream] | None = None,
        split: str | None = None,
        processor: Processor | None = None,
        packing: PackingConfig | None = None,
        packing_mode: PackingMode = "auto",
        order: OrderConfig | None = None,
        epoch_size: int | None = None,
        batch_size: int = 1,
        replication: int | None = None,
        world: World | None = None,
        fetch: FetchConfig | None = None,
    ):
        if streams is not None and (remote is not None or local is not None or split is not None):
            raise ConfigError("a dataset has either streams, or remote, local and split")
        if streams is not None and not streams:
            raise ConfigError("streams is empty: name at least one")
        self.processor = processor
        self.packing = packing
        self.packing_mode = packing_mode
        self.order = order or OrderConfig()
        self.world = world or World.detect()
        if replication is not None:
            self.world = dataclasses.replace(self.world, replication=replication)
        self.replication = self.world.replication
        self.batch_size = batch_size
        self.fetch = fetch or FetchConfig()
        chosen = list(streams) if streams is not None else [Stream(remote=remote, local=local, split=split)]
        self.stored = [StoredDataset(stream, config=self.fetch) for stream in chosen]
        self.counts = samples_chosen(
            [stored.num_samples for stored in self.stored],
            [StreamShare(proportion=s.proportion, repeat=s.repeat, choose=s.choose) for s in chosen],
            epoch_size=epoch_size,
        )
        self.epoch_size = sum(self.counts)
        self.num_samples = sum(stored.num_samples for stored in self.stored)
        self._limit_cache()
        self.reader = self._open_reader(None)
        self._epochs = EpochCounter()

    def _limit_cache(self) -> None:
        limit = self.fetch.limit_bytes
        if limit is not None:
            copied = [stored for stored in self.stored if stored.is_copied]
            room = CacheRoom([folder for stored in copied for folder in stored.shard_folders], limit)
            for stored in copied:
                stored.limit(room)

    def _open_reader(self, columns: Sequence[str] | None) -> ShardReader:
        shards = [(stored.cache, info) for stored in self.stored for info in stored.shards]
        return ShardReader(shards, config=self.fetch, columns=columns)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("plan", "pack_reader")}

    # One stored dataset, as packs need it

    @property
    def one(self) -> StoredDataset:
        """The only stream; ConfigError where there are several, which packs do not mix."""
        if len(self.stored) > 1:
            raise ConfigError(
                f"a pack holds samples of one dataset, this one has {len(self.stored)} streams: give PackedLoader a "
                "dataset for each, by name, and weights"
            )
        return self.stored[0]

    @property
    def storage(self) -> Storage:
        return self.one.storage

    @cached_property
    def mode(self) -> Literal["plan", "lanes"]:
        """Where packs come from: what packing_mode says; "auto" is a plan, whose lengths it measures if need be."""
        if self.packing_mode != "auto":
            return self.packing_mode
        if self.processor is not None:
            ensure_lengths(self.one, self.processor, world=self.world)
        return "plan"

    @property
    def url(self) -> str:
        return ", ".join(stored.url for stored in self.stored)

    @cached_property
    def plan(self) -> PackPlan:
        """The packs of every epoch; ConfigError without processor and packing, LengthsError without an index."""
        counts = PackCountsFolder(self.one.cache.folder / "_lmms" / "counts")
        return PackPlan(
            self.length_index(),
            self.samples_per_shard,
            order=self.order,
            packing=self.needed_packing,
            counts_cache=counts,
            counting=counts.counting,
        )

    @property
    def needed_packing(self) -> PackingConfig:
        if self.packing is None:
            raise ConfigError("packs need packing: give the dataset a PackingConfig (packing_length)")
        return self.packing

    def length_index(self) -> LengthIndex:
        """The lengths that this dataset's processor measured, memory-mapped; LengthsError when there is none.

        Without a processor: the index that was written last.
        """
        return self.one.length_index(self.processor)

    @property
    def lane_order(self) -> OrderConfig:
        """The order in which lanes read: a canonical node each, as many as are set or fit the dataset."""
        lanes = self.order.num_canonical_nodes or default_lanes(self.num_samples, self.needed_packing.window)
        return dataclasses.replace(self.order, num_canonical_nodes=lanes)

    @cached_property
    def pack_reader(self) -> ShardReader:
        """Reads what packs are made of: of each sample the processor's columns."""
        columns = {info.columns for info in self.one.shards}
        if len(columns) > 1:
            raise ConfigError(f"the shards of {self.url} differ in their columns: convert the dataset again")
        return self._open_reader(self.processor.columns if self.processor is not None else None)

    # Samples

    @property
    def shard_infos(self) -> list[ShardInfo]:
        """The index entries of all shards, stream after stream."""
        return [info for stored in self.stored for info in stored.shards]

    @property
    def samples_per_shard(self) -> NDArray[np.int64]:
        return self.reader.samples_per_shard

    def get_item(self, idx: int, retry: int = 0) -> Sample:
        """Sample `idx` (0 <= idx < size); its shard is fetched first when it is not on this node."""
        return self.reader[idx]

    def read(self, sample_ids: Sequence[int] | NDArray[np.int64]) -> list[Sample]:
        """The samples of these ids, in this order."""
        return list(self.reader.samples(np.asarray(sample_ids, np.int64)))

    def check_cache_limit(self, *, samples_ahead: int) -> None:
        """ConfigError for a cache_limit under which shards would be fetched again and again.

        samples_ahead: how far loader workers of this node read ahead of one another.
        """
        limit = self.fetch.limit_bytes
        if limit is None or not any(stored.is_copied for stored in self.stored):
            return
        infos = self.shard_infos
        nodes = in_stored_order(self.order).num_canonical_nodes or default_canonical_nodes(self.num_samples)
        if self.packing is not None and self.mode == "lanes":
            nodes = int(self.lane_order.num_canonical_nodes or 1)
        num_nodes = self.world.num_group_nodes
        served = nodes // num_nodes if nodes % num_nodes == 0 else nodes
        block = min(self.order.shuffle_block_size, -(-self.num_samples // nodes))
        least = least_room(
            np.array([info.size for info in infos]),
            self.samples_per_shard,
            num_spans=served,
            span=2 * block + samples_ahead // nodes,
        ) + max(info.zip_size or 0 for info in infos)
        if limit < least:
            raise ConfigError(
                f"cache_limit is {limit} bytes, and this order reads from {least} bytes of shards at a time: raise it "
                f"to {least}, or lower shuffle_block_size (now {self.order.shuffle_block_size} samples) or "
                "num_canonical_nodes"
            )

    # Iteration without packs

    def __len__(self) -> int:
        """Samples of an epoch for each group of ranks that read the same; some groups have one less."""
        return -(-self.epoch_size // self.world.num_groups)

    def __iter__(self) -> Iterator[Sample]:
        """This rank's and worker's share of the next epoch, in its order, from where a loaded state says."""
        worker = get_worker_info()
        epoch, start = self._epochs.begin(worker)
        self.check_cache_limit(samples_ahead=CHUNK)
        order = SampleOrder(
            [np.array([info.num_samples for info in stored.shards], np.int64) for stored in self.stored],
            counts=self.counts,
            config=self.order,
            epoch=epoch,
        )
        share = Reader(
            batch_size=self.batch_size,
            num_groups=self.world.num_groups,
            group=self.world.group,
            num_workers=worker.num_workers if worker else 1,
            worker=worker.id if worker else 0,
            num_nodes=self.world.num_group_nodes,
        )
        yield from self.reader.read_all(order.share(start, reader=share))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The state after `num_samples` samples of all ranks; counted from the epoch's start, or from a loaded state.

        It is what MosaicML's StreamingDataLoader saves. It fits any number of ranks and workers, exactly where
        batch_size is the loader's. Packs have a cursor of their own: PackedLoader.state_dict.
        """
        epoch, start = self._epochs.current()
        position = num_samples if from_beginning else start + num_samples
        return {"epoch": epoch, "sample_in_epoch": position, "seed": self.order.seed, "epoch_size": self.epoch_size}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Go on from a state that state_dict gave; CursorError when it belongs to another order."""
        for name, ours in (("seed", self.order.seed), ("epoch_size", self.epoch_size)):
            if obj.get(name) != ours:
                raise CursorError(
                    f"the saved state has {name} {obj.get(name)!r}, this dataset has {ours}: restore it, or start over"
                )
        try:
            epoch, position = index(obj["epoch"]), index(obj["sample_in_epoch"])
        except (KeyError, TypeError) as error:
            raise CursorError(f"the saved state is damaged ({error!r}): use another checkpoint") from error
        if position >= self.epoch_size:
            epoch, position = epoch + 1, 0
        self._epochs.resume(epoch, position)
