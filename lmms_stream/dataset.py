"""A streaming.StreamingDataset that knows its packs. plan + shards -> [dataset] -> samples of a pack.

The only file that touches MosaicML's internals. Kept from the parent: the type, NumPy indexing, its clouds and
compressions. Replaced: the constructor's shared memory, barriers and epoch state. What is on this node is what
lies in the cache folder, and locks belong to the kernel, so a killed run leaves nothing that stops the next.
"""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import StreamingDataset
from torch.utils.data import get_worker_info

from .cache import CountsFolder, LocalCache, fetch_shard
from .errors import ConfigError, LengthsError, ObjectMissingError, ShardError, StorageError
from .lengths import LengthIndex, lengths_names, parse_description
from .order import EpochOrder, OrderConfig
from .packing import Overlong, PackingConfig
from .plan import PackPlan
from .processors import ProcessorConfig
from .processors.base import Processor, processor_fingerprint
from .shards import DATASET_NAME, INDEX_NAME, Shard, ShardInfo, parse_index
from .storage import open_storage
from .types import Sample, World

MAX_OPEN_SHARDS = 1024  # memory-mapped at a time by one process
FETCH_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """A dataset, its processor, its order and its packs, as one section of a YAML file.

    The names are those of LMMS Engine's DatasetConfig where it has the setting.
    """

    remote: str
    local: str | None = None
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    packing_length: int = 4096
    packing_strategy: str = "best_fit"
    packing_window: int = 16384
    overlong: Overlong = "error"
    max_samples_per_pack: int | None = None
    seed: int = 0
    shuffle: bool = True
    num_canonical_nodes: int | None = None
    shuffle_block_size: int = 1 << 18

    def build(self, world: World | None = None) -> PackedStreamingDataset:
        return PackedStreamingDataset(
            self.remote,
            self.local,
            processor=self.processor.build(),
            packing=PackingConfig(
                packing_length=self.packing_length,
                strategy=self.packing_strategy,
                window=self.packing_window,
                overlong=self.overlong,
                max_samples_per_pack=self.max_samples_per_pack,
            ),
            order=OrderConfig(
                seed=self.seed,
                shuffle=self.shuffle,
                num_canonical_nodes=self.num_canonical_nodes,
                shuffle_block_size=self.shuffle_block_size,
            ),
            world=world,
        )


class PackedStreamingDataset(StreamingDataset):  # type: ignore[misc]
    """Samples of an MDS dataset by number, and the plan of its packs.

    remote: a local folder or a URL (s3://, gs://, …). local: where shards are kept on this node (default: a
    folder of this user's below the system's temporary folder). processor and packing are needed for `plan`.

    `ds[i]`, `ds[-1]`, slices, lists and arrays of numbers read samples as dicts of decoded columns. Iterating
    gives this rank's and worker's share of one epoch's samples after another in the epoch order, unpacked.
    Raises StorageError, ShardError; see also `plan`.
    """

    def __init__(
        self,
        remote: str | Path,
        local: str | Path | None = None,
        *,
        processor: Processor | None = None,
        packing: PackingConfig | None = None,
        order: OrderConfig | None = None,
        world: World | None = None,
    ):
        self.storage = open_storage(remote)
        self.processor = processor
        self.packing = packing
        self.order = order or OrderConfig()
        self.world = world or World()
        source = f"{self.storage.url}/{INDEX_NAME}"
        try:
            self.shard_infos: list[ShardInfo] = parse_index(self.storage.read(INDEX_NAME), source=source)
        except ObjectMissingError as error:
            raise StorageError(
                f"{self.storage.url} holds no dataset ({INDEX_NAME} is missing): check the URL, or write it with "
                "lmms-stream convert"
            ) from error
        self.cache = LocalCache(self.storage, Path(local) if local is not None else None)
        self.samples_per_shard = np.array([info.num_samples for info in self.shard_infos], np.int64)
        self.num_samples = self.length = int(self.samples_per_shard.sum())
        self.epoch = 0
        self._first_ids: list[int] = (np.cumsum(self.samples_per_shard) - self.samples_per_shard).tolist()
        self._reset_process_state()
        if self.num_samples == 0:
            raise ShardError(f"{source} lists no samples: convert the dataset again")

    def _reset_process_state(self) -> None:
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._fetches: dict[int, Future[Path]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        dropped: dict[str, Any] = {"_shards": OrderedDict(), "_fetches": {}, "_pool": None}
        return {name: value for name, value in self.__dict__.items() if name != "plan"} | dropped

    @cached_property
    def plan(self) -> PackPlan:
        """The packs of every epoch; ConfigError without processor and packing, LengthsError without an index."""
        if self.packing is None:
            raise ConfigError("a plan needs packing: give the dataset a PackingConfig (packing_length)")
        return PackPlan(
            self.length_index(),
            self.samples_per_shard,
            order=self.order,
            packing=self.packing,
            counts_cache=CountsFolder(self.cache.folder / "_lmms" / "counts"),
        )

    def length_index(self) -> LengthIndex:
        """The lengths that this dataset's processor measured, memory-mapped; LengthsError when there is none.

        Without a processor: the index that was written last.
        """
        if self.processor is not None:
            fingerprint = processor_fingerprint(self.processor)
        else:
            fingerprint = self._last_fingerprint()
        array_name, description_name = lengths_names(fingerprint)
        try:
            description = self.storage.read(description_name)
        except ObjectMissingError as error:
            raise LengthsError(
                f"{self.storage.url} has no lengths index for this processor ({fingerprint}): write one with "
                f"lmms-stream index {self.storage.url} --tokenizer …"
            ) from error
        content_hash = parse_description(description, fingerprint=fingerprint)["content_hash"]

        def valid(path: Path) -> bool:  # 128: the header that NumPy writes for a small 1-d array
            return path.stat().st_size == 4 * self.num_samples + 128

        # Kept under its content's name, so that an index that was written again is not mistaken for the old one.
        array_path = self.cache.fetch(array_name, name=f"_lmms/lengths/{content_hash}.npy", valid=valid)
        return LengthIndex.open(array_path, description, fingerprint=fingerprint)

    def _last_fingerprint(self) -> str:
        try:
            return str(json.loads(self.storage.read(DATASET_NAME))["lengths"][-1])
        except (ObjectMissingError, LookupError, ValueError) as error:
            raise LengthsError(
                f"{self.storage.url} lists no lengths index: write one with "
                f"lmms-stream index {self.storage.url} --tokenizer …"
            ) from error

    # Samples

    def get_item(self, idx: int, retry: int = 0) -> Sample:
        """Sample `idx` (0 <= idx < size); its shard is fetched first when it is not on this node."""
        shard_id, place = self._locate(idx)
        return self._shard(shard_id)[place]

    def read(self, sample_ids: Sequence[int] | NDArray[np.int64]) -> list[Sample]:
        """The samples of these ids, in this order."""
        return [self.get_item(int(sample_id)) for sample_id in sample_ids]

    def prefetch(self, sample_ids: NDArray[np.int64]) -> None:
        """Begin to fetch, in the background, the shards of these samples that are not open or under way."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="lmms-fetch")
        for sample_id in sample_ids:
            shard_id = self._locate(int(sample_id))[0]
            if shard_id not in self._shards and shard_id not in self._fetches:
                self._fetches[shard_id] = self._pool.submit(fetch_shard, self.cache, self.shard_infos[shard_id])

    def shards_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard of each sample: int64, of the same shape."""
        return np.searchsorted(self._first_ids, sample_ids, side="right") - 1

    def _locate(self, sample_id: int) -> tuple[int, int]:
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id} of a dataset of {self.num_samples}")
        shard_id = bisect.bisect_right(self._first_ids, sample_id) - 1
        return shard_id, sample_id - self._first_ids[shard_id]

    def _shard(self, shard_id: int) -> Shard:
        shard = self._shards.get(shard_id)
        if shard is None:
            fetch = self._fetches.pop(shard_id, None)
            path = fetch_shard(self.cache, self.shard_infos[shard_id]) if fetch is None else fetch.result()
            shard = self._shards[shard_id] = Shard(path, self.shard_infos[shard_id])
            if len(self._shards) > MAX_OPEN_SHARDS:
                self._shards.popitem(last=False)
        return shard

    # Iteration without packs

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[Sample]:
        """This rank's and worker's share of the next epoch, in its order."""
        order = EpochOrder(self.samples_per_shard, config=self.order, epoch=self.epoch)
        self.epoch += 1
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        share = self.world.rank * num_workers + worker_id
        num_shares = self.world.world_size * num_workers
        for node in range(order.num_canonical_nodes):
            for block in range(order.num_blocks(node)):
                ids = order.block(node, block)[share::num_shares]
                self.prefetch(ids)
                yield from map(self.get_item, ids.tolist())

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise ConfigError("a PackedStreamingDataset keeps no place of its own: save PackedLoader.state_dict()")

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        raise ConfigError("a PackedStreamingDataset keeps no place of its own: use PackedLoader.load_state_dict()")
