"""PackedStreamingDataset: MosaicML's dataset with our order, a processor and packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checks import check_collator
from ..errors import ConfigError
from ..plan.order import OrderConfig
from ..plan.pack_plan import PackPlan
from ..plan.packing import PackingConfig
from ..processors.base import Processor
from ..storage.fetch_config import FetchConfig
from ..types import Sample, World
from .core import PackedDataset, PackingMode
from .lengths import LengthIndex
from .mosaic import BLOCKS, StreamingDataset
from .streams import StreamConfig


class PackedStreamingDataset(StreamingDataset):
    """Samples of MDS datasets by number, and the plan of their packs.

    remote: a local folder or a URL (s3://, gs://, …). local: folder for shards on this node (default: a folder of this
    user below the system's temporary folder); a local dataset needs only one of the two. Other keywords are
    StreamingDataset's, with other defaults: samples are shuffled, by "blocks" and seed 0, one at a time (batch_size),
    and fetched by FetchConfig.

    processor and packing are needed for packs. With several streams a pack holds samples of all of them. packing_mode:
    "plan" takes packs from a lengths index, "lanes" packs while lengths are measured, "auto" (the default) is "plan"
    and measures a missing index once, for up to 2 million samples. order: replaces shuffle, shuffle_seed,
    num_canonical_nodes and shuffle_block_size. fetch: replaces download_retry, download_timeout and cache_limit. world:
    default from torchrun's variables.

    `ds[i]`, `ds[-1]`, slices, lists and arrays of numbers read samples as dicts of decoded columns. Iteration yields
    the share of this rank and worker in the next epoch, unpacked. Raises StorageError, ShardError; see `plan`.
    """

    def __init__(
        self,
        remote: str | Path | None = None,
        local: str | Path | None = None,
        *,
        processor: Processor | None = None,
        packing: PackingConfig | None = None,
        packing_mode: PackingMode = "auto",
        order: OrderConfig | None = None,
        fetch: FetchConfig | None = None,
        world: World | None = None,
        **keywords: Any,
    ):
        _refuse_said_twice(
            keywords, order, "order", ("shuffle", "shuffle_seed", "num_canonical_nodes", "shuffle_block_size")
        )
        _refuse_said_twice(keywords, fetch, "fetch", ("download_retry", "download_timeout", "cache_limit"))
        if world is not None and world.replication != 1:
            _refuse_said_twice(keywords, world, "world.replication", ("replication",))
        self._given: dict[str, Any] = {"processor": processor, "packing": packing, "packing_mode": packing_mode}
        self._given_fetch, self._given_world = fetch, world
        order, fetch = order or OrderConfig(), fetch or FetchConfig()
        defaults = {
            "shuffle": order.shuffle, "shuffle_seed": order.seed, "num_canonical_nodes": order.num_canonical_nodes,
            "shuffle_block_size": order.shuffle_block_size, "shuffle_algo": BLOCKS, "batch_size": 1,
            "download_retry": fetch.attempts - 1, "download_timeout": fetch.timeout_s, "cache_limit": fetch.cache_limit,
        }  # fmt: skip
        super().__init__(remote=remote, local=local, **(defaults | keywords))
        self.core.counts = tuple(int(stream.choose) for stream in self.streams)

    def _set_world(self, world: World) -> None:
        super()._set_world(self._given_world or world)

    def _open_core(self, streams: Sequence[StreamConfig], fetch: FetchConfig) -> PackedDataset:
        fetch = self._given_fetch or fetch
        return PackedDataset(streams, order=self._order, fetch=fetch, world=self.world, **self._given)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the share of this rank and worker in the next epoch, unpacked.

        ConfigError for conversations, or a dataset with a processor, in a DataLoader without a collate_fn.
        """
        names = {name for stored in self.core.stored for columns in stored.shards.columns for name in columns.names}
        is_own = type(self).get_item is StreamingDataset.get_item
        if is_own and (self.processor is not None or names & {"messages", "loss_spans"}):
            check_collator(
                type(self).__name__,
                loader="read packs with PackedLoader(dataset, global_batch=8), or pass collate_fn=list for samples as "
                "they are stored",
            )
        return super().__iter__()

    # Inputs of packs, from the core

    @property
    def processor(self) -> Processor | None:
        return self.core.processor

    @property
    def packing(self) -> PackingConfig | None:
        return self.core.packing

    @property
    def order(self) -> OrderConfig:
        return self.core.order

    @property
    def mode(self) -> str:
        """Source of packs, "plan" or "lanes"; "auto" is a plan, and measures missing lengths."""
        return self.core.mode

    @property
    def plan(self) -> PackPlan:
        """Packs of every epoch; ConfigError without processor and packing, LengthsError without an index."""
        return self.core.plan

    def length_index(self) -> LengthIndex:
        """Return the lengths index of this dataset's processor, memory-mapped; LengthsError without an index.

        Without a processor: the last written index.
        """
        return self.core.length_index()


def _refuse_said_twice(keywords: dict[str, Any], given: object, name: str, same: Sequence[str]) -> None:
    twice = [each for each in same if each in keywords]
    if given is not None and twice:
        raise ConfigError(f"{name} and {twice[0]} set the same value: leave one out")
