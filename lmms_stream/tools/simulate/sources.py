"""Datasets of a run for the simulation: plans, and shards from index.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...checks import parse_bytes
from ...errors import ConfigError
from ...mds.core import HasCore, PackedDataset, core_of
from ...mds.mixed import plans_of
from ...mds.shard_list import ShardList
from ...plan.block_packs import KEPT_SEGMENTS, LEAST_SEGMENTS
from ...plan.cursor import SOURCE
from ...plan.order import OrderConfig
from ...plan.pack_plan import PackPlan
from ...plan.source_ranges import Weights
from ...plan.windows import DEAL, WindowedMixture
from ...processors.base import PackFiller
from .cluster import Cluster

Datasets = PackedDataset | HasCore | Mapping[str, PackedDataset | HasCore]
WALKED = 1 << 26  # segments of packs that are kept while steps are looked at: 1 GiB
COMPARED = ("num_canonical_nodes", "shuffle_block_size", "packing_length", "shard_bytes")


@dataclass(frozen=True, slots=True)
class ShardCosts:
    """Shards of all sources: bytes on a node, downloaded bytes, and requests per shard. int64[n]."""

    stored: NDArray[np.int64]
    loaded: NDArray[np.int64]
    requests: NDArray[np.int64]

    @staticmethod
    def joined(parts: Sequence[ShardCosts]) -> ShardCosts:
        return ShardCosts(*(np.concatenate([getattr(each, name) for each in parts]) for name in ShardCosts.__slots__))

    def part(self, shards: slice) -> ShardCosts:
        return ShardCosts(self.stored[shards], self.loaded[shards], self.requests[shards])


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Plans by name, with the shards of all of them. limits: the cache_limit of each, in bytes.

    zip_bytes: of the largest compressed shard of each stream of each plan. fills: workers only fetch shards, for their
    processors read packs straight from them. reads_media: of any source. downloads_at_once, shards_ahead: of each
    worker, see FetchConfig's threads and ahead. make_plan: a plan of other settings, from what PackPlan takes.
    """

    plans: Mapping[str, PackPlan]
    shards: Mapping[str, ShardCosts]
    limits: Mapping[str, int | None]
    zip_bytes: Mapping[str, Sequence[int]]
    index_bytes: int
    fills: bool
    reads_media: bool
    downloads_at_once: int
    shards_ahead: int
    weights: Weights | Mapping[int, Weights] | None = None
    max_epochs: Mapping[str, int] | None = None
    balance: str | int = DEAL
    make_plan: Callable[..., PackPlan] = PackPlan

    @staticmethod
    def of(
        dataset: Datasets,
        *,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
        balance: str | int = DEAL,
    ) -> Sources:
        """Return the sources of a run; ConfigError for a run in lanes, with packs unknown in advance."""
        named = dataset if isinstance(dataset, Mapping) else {SOURCE: dataset}
        cores = {name: core_of(each) for name, each in named.items()}
        for name, core in cores.items():
            if core.packing_mode == "lanes":
                raise ConfigError(
                    f"packs of lanes are not known beforehand ({name!r}): set packing_mode plan, and write a lengths "
                    "index with lmms-stream index"
                )
        listed = {name: [stored.shards for stored in core.stored] for name, core in cores.items()}
        plans = plans_of(cores)
        num_bytes = sum(each.index_bytes for streams in listed.values() for each in streams)
        return Sources(
            plans=plans,
            shards={name: ShardCosts.joined([_shards(each) for each in streams]) for name, streams in listed.items()},
            limits={name: core.fetch.limit_bytes for name, core in cores.items()},
            zip_bytes={name: [int(each.zip_sizes.max()) for each in streams] for name, streams in listed.items()},
            index_bytes=num_bytes + sum(plan.lengths.nbytes for plan in plans.values()),
            fills=all(_fills(core) for core in cores.values()),
            reads_media=any(plan.index.patches is not None for plan in plans.values()),
            downloads_at_once=sum(core.fetch.threads for core in cores.values()),
            shards_ahead=sum(core.fetch.ahead for core in cores.values()),
            weights=weights,
            max_epochs=max_epochs,
            balance=balance,
        )

    @cached_property
    def mixture(self) -> WindowedMixture:
        return self._mixed(self.plans)

    @cached_property
    def walked(self) -> WindowedMixture:
        """Mixture for walks over many steps: complete blocks are kept, within a memory limit."""
        return self._mixed({name: plan.keeping(self._kept_segments(plan)) for name, plan in self.plans.items()})

    def _mixed(self, plans: Mapping[str, PackPlan]) -> WindowedMixture:
        return WindowedMixture(plans, weights=self.weights, max_epochs=self.max_epochs, balance=self.balance)

    def _kept_segments(self, plan: PackPlan) -> int:
        of_blocks = plan.num_canonical_nodes * plan.order.shuffle_block_size
        return max(KEPT_SEGMENTS, LEAST_SEGMENTS * plan.num_canonical_nodes, min(of_blocks, WALKED // len(self.plans)))

    @cached_property
    def all_shards(self) -> ShardCosts:
        """Shards of all sources, concatenated."""
        return ShardCosts.joined([*self.shards.values()])

    def limits_on(self, cluster: Cluster) -> Mapping[str, int | None]:
        """The cache_limit of each source on a cluster: of caches of their own, as those of loaders are."""
        return self.limits if cluster.cache is None else dict.fromkeys(self.plans, cluster.cache_bytes)

    @property
    def num_samples(self) -> int:
        return sum(plan.num_samples for plan in self.plans.values())

    @property
    def epoch_size(self) -> int:
        """Number of samples of an epoch of all sources."""
        return sum(plan.epoch_size for plan in self.plans.values())

    def with_setting(self, name: str, value: int | str) -> Sources:
        """Return the sources with another value of a setting in COMPARED; ConfigError for other settings."""
        if name not in COMPARED:
            raise ConfigError(f"{name} cannot be compared: choose one of {', '.join(COMPARED)}")
        plans, shards = dict(self.plans), dict(self.shards)
        for source, plan in self.plans.items():
            samples, order, packing, streams = plan.samples_per_shard, plan.order, plan.packing, plan.streams
            if name == "shard_bytes":
                num_bytes = parse_bytes(value, name=name)
                cut = [_cut_anew(samples[at], shards[source].part(at), num_bytes) for at in plan.stream_shards]
                samples = np.concatenate([each for each, _ in cut])
                shards[source] = ShardCosts.joined([each for _, each in cut])
                if streams is not None:
                    streams = streams._replace(num_shards=tuple(len(each) for each, _ in cut))
            elif name == "packing_length":
                packing = packing.of_length(_count(name, value))
            else:
                order = _with_order(order, name, _count(name, value))
            of_streams = {} if streams is None else {"streams": streams}
            plans[source] = self.make_plan(plan.index, samples, order=order, packing=packing, **of_streams)
        return dataclasses.replace(self, plans=plans, shards=shards)


def _with_order(order: OrderConfig, name: str, value: int) -> OrderConfig:
    if name == "num_canonical_nodes":
        return dataclasses.replace(order, num_canonical_nodes=value)
    return dataclasses.replace(order, shuffle_block_size=value)


def _count(name: str, value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value} is no whole number") from None


def _fills(core: PackedDataset) -> bool:
    """Whether packs are made straight from the shards; without a processor: whether they hold tokens."""
    if core.processor is not None:
        return isinstance(core.processor, PackFiller)
    return all("input_ids" in stored.shards[0].columns.names for stored in core.stored)


def _shards(listed: ShardList) -> ShardCosts:
    if listed[0].meta is not None:  # shards of two files, which few datasets have: entry by entry
        files = [[info, *([] if info.meta is None else [info.meta])] for info in listed]
        return ShardCosts(
            stored=np.array([sum(each.size for each in mine) for mine in files], np.int64),
            loaded=np.array([sum(each.zip_size or each.size for each in mine) for mine in files], np.int64),
            requests=np.array([len(mine) for mine in files], np.int64),
        )
    sizes, zip_sizes = listed.sizes, listed.zip_sizes
    loaded = np.where(zip_sizes > 0, zip_sizes, sizes)
    return ShardCosts(stored=sizes, loaded=loaded, requests=np.ones(len(sizes), np.int64))


def _cut_anew(samples: NDArray[np.int64], shards: ShardCosts, shard_bytes: int) -> tuple[NDArray[np.int64], ShardCosts]:
    """Return the same samples in shards of about shard_bytes, each sample with the mean size of its shard."""
    ends = np.cumsum(samples)
    total = int(shards.stored.sum())
    num_shards = min(int(ends[-1]), max(1, round(total / shard_bytes)))
    bytes_before = np.concatenate([[0.0], np.cumsum(shards.stored)])
    cuts = np.linspace(0, total, num_shards + 1)
    bounds = np.interp(cuts, bytes_before, np.concatenate([[0], ends])).round().astype(np.int64)
    bounds = np.unique(bounds)
    at = np.interp(bounds, np.concatenate([[0], ends]), bytes_before)
    loaded_before = np.concatenate([[0.0], np.cumsum(shards.loaded)])
    loaded = np.interp(bounds, np.concatenate([[0], ends]), loaded_before)
    count = len(bounds) - 1
    return np.diff(bounds), ShardCosts(
        stored=np.diff(at.round().astype(np.int64)),
        loaded=np.diff(loaded.round().astype(np.int64)),
        requests=np.full(count, int(shards.requests.max())),
    )
