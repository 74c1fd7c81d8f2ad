"""Sources that do not exist yet, from a few numbers each. descriptions -> [this] -> plans and shards.

Lengths are drawn once for 2**20 samples and come again and again, so that they take 8 MiB whatever the number of
samples. How many packs a block has follows from its tokens, which are sums of that table, and from how full packs are,
which some blocks tell that are packed. So 10**10 samples are open in seconds; what is read of them is packed as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...checks import check_fields, parse_bytes
from ...errors import ConfigError
from ...plan.block_packs import KEPT_SEGMENTS, PlanInputs, pack_block
from ...plan.epoch_plan import TOKENS
from ...plan.lengths import Lengths
from ...plan.order import EpochOrder, OrderConfig
from ...plan.pack_plan import PackPlan
from ...plan.packing import MAX_LENGTH, PackingConfig
from ...storage.fetch_config import FetchConfig
from .sources import ShardCosts, Sources

TABLE = 1 << 20  # lengths that are drawn
SIGMA = 1.0  # of a lognormal distribution of which the mean alone is given: half of the samples are below 0.6 of it
INDEX_ENTRY_BYTES = 350  # of a shard in index.json
LENGTH_BYTES = 4  # of a sample in the lengths index
COUNTED = 1 << 22  # samples of a source whose packs are counted as ever; those of more are told from some blocks
TRIED_BLOCKS = 4  # that are packed to see how full packs are
_COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedSource:
    """A source that is to be converted. One of samples and tokens, one of mean_length and percentiles.

    samples, tokens: as 7e9, "7b" or "10.5t" (of 1000). mean_length: tokens of a sample. percentiles: {percent: tokens},
    {5: 120, 50: 650, 95: 4200}: lengths between them grow evenly by their logarithm, those beyond are as the outermost.
    bytes_per_token: as stored; 4 for tokens, about 4 to 5 for English text. tokenized: whether the shards hold tokens.
    compression: bytes of a compressed shard over those of the shard; 1 for none.
    """

    samples: float | str | None = None
    tokens: float | str | None = None
    mean_length: float | None = None
    percentiles: Mapping[float, float] = field(default_factory=dict)
    bytes_per_token: float = 4.0
    shard_bytes: int | str = "64mb"
    tokenized: bool = True
    compression: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.samples is None) == (self.tokens is None):
            raise ConfigError("a described source needs exactly one of samples and tokens")
        if (self.mean_length is None) == (not self.percentiles):
            raise ConfigError("a described source needs exactly one of mean_length and percentiles")
        if self.mean_length is not None and not 1 <= self.mean_length <= MAX_LENGTH:
            raise ConfigError(f"mean_length must be from 1 to {MAX_LENGTH} tokens, got {self.mean_length}")
        points = sorted(self.percentiles.items())
        values = [value for _, value in points]
        if points and not (
            0 <= points[0][0] <= points[-1][0] <= 100
            and all(before <= after for before, after in pairwise((1, *values, MAX_LENGTH)))  # NaN is in no order
        ):
            raise ConfigError(
                f"percentiles must map percents from 0 to 100 to lengths that do not fall, from 1, got {dict(points)}"
            )
        for name, low, high in (("bytes_per_token", 0, 1e9), ("compression", 0, 1)):
            if not low < getattr(self, name) <= high:
                raise ConfigError(f"{name} must be above {low} and at most {high:g}, got {getattr(self, name)}")
        _ = self.num_shard_bytes, self.num_samples

    @property
    def num_shard_bytes(self) -> int:
        return parse_bytes(self.shard_bytes, name="shard_bytes")

    @property
    def num_samples(self) -> int:
        """Number of samples of the source; computed from the tokens if given."""
        if self.samples is not None:
            return parse_count(self.samples, name="samples")
        return max(1, round(parse_count(self.tokens or 0, name="tokens") / float(self.table(0).mean())))

    def table(self, seed: int) -> NDArray[np.uint32]:
        """Lengths of TABLE samples: the distribution at evenly spaced shares, shuffled. uint32[TABLE]."""
        shares = (np.arange(TABLE) + 0.5) / TABLE
        if self.percentiles:
            points = sorted(self.percentiles.items())
            at = np.array([percent / 100 for percent, _ in points])
            lengths = np.exp(np.interp(shares, at, np.log([value for _, value in points])))
        else:
            assert self.mean_length is not None
            normal = np.sort(np.random.default_rng(0).standard_normal(TABLE))
            lengths = np.exp(SIGMA * normal)
            lengths *= self.mean_length / lengths.mean()
        drawn = np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.uint32)
        return np.random.default_rng([seed, TABLE]).permutation(drawn)


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedSources:
    """Sources to be converted and mixed, by name. weights, max_epochs: like in a run."""

    sources: dict[str, DescribedSource]
    weights: dict[str, float] | None = None
    max_epochs: dict[str, int] | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("describe at least one source")


def describe(
    described: DescribedSources | Mapping[str, DescribedSource],
    *,
    packing: PackingConfig,
    order: OrderConfig | None = None,
    fetch: FetchConfig | None = None,
) -> Sources:
    """Return the sources for `simulate`, all with the same settings of packs and order."""
    if not isinstance(described, DescribedSources):
        described = DescribedSources(sources=dict(described))
    order, fetch = order or OrderConfig(), fetch or FetchConfig()
    plans, shards = {}, {}
    for number, (name, source) in enumerate(described.sources.items()):
        index = _DrawnLengths.of(source, number)
        samples, shards[name] = _shards(source, float(index.table.mean()))
        plans[name] = described_plan(index, samples, order=order, packing=packing)
    of_index = sum(len(plan.samples_per_shard) * INDEX_ENTRY_BYTES for plan in plans.values())
    of_lengths = sum(plan.num_samples * LENGTH_BYTES for plan in plans.values())
    return Sources(
        plans=plans,
        shards=shards,
        limits=dict.fromkeys(plans, fetch.limit_bytes),
        zip_bytes={
            name: [int(shards[name].loaded.max()) if source.compression < 1 else 0]
            for name, source in described.sources.items()
        },
        index_bytes=of_index + of_lengths,
        fills=all(source.tokenized for source in described.sources.values()),
        reads_media=False,
        downloads_at_once=fetch.threads * len(plans),
        shards_ahead=fetch.ahead * len(plans),
        weights=described.weights,
        max_epochs=described.max_epochs,
        make_plan=described_plan,
    )


def _shards(source: DescribedSource, mean_length: float) -> tuple[NDArray[np.int64], ShardCosts]:
    """Samples of each shard, and the shards: all of as many samples but the last."""
    of_sample = mean_length * source.bytes_per_token
    per_shard = max(1, round(source.num_shard_bytes / of_sample))
    samples = np.full(-(-source.num_samples // per_shard), per_shard, np.int64)
    samples[-1] = source.num_samples - per_shard * (len(samples) - 1)
    stored = np.maximum(1, np.rint(samples * of_sample)).astype(np.int64)
    loaded = np.maximum(1, np.rint(stored * source.compression)).astype(np.int64)
    return samples, ShardCosts(stored=stored, loaded=loaded, requests=np.ones(len(samples), np.int64))


def described_plan(
    index: Lengths, samples_per_shard: NDArray[np.int64], *, order: OrderConfig, packing: PackingConfig
) -> PackPlan:
    """Plan over drawn lengths; for many samples, packs are not counted block by block."""
    assert isinstance(index, _DrawnLengths)
    if index.num_samples <= COUNTED:
        return PackPlan(index, samples_per_shard, order=order, packing=packing)
    counts = _Estimates(index, packing)
    plan = PackPlan(index, samples_per_shard, order=order, packing=packing, counts_cache=counts)
    counts.plan = plan
    return plan


@dataclass(frozen=True, kw_only=True)
class _DrawnLengths(Lengths):
    """Lengths of num_samples: sample i has the length table[i % TABLE]."""

    table: NDArray[np.uint32]
    num_samples: int

    @staticmethod
    def of(source: DescribedSource, seed: int) -> _DrawnLengths:
        table = source.table(seed)
        drawn = cast(NDArray[np.integer[Any]], _Repeated(table, source.num_samples))
        content = hashlib.blake2b(table.tobytes() + str(source.num_samples).encode(), digest_size=16)
        return _DrawnLengths(
            lengths=drawn, content_hash=content.hexdigest(), table=table, num_samples=source.num_samples
        )

    def view(self) -> NDArray[np.integer[Any]]:
        return self.lengths


class _Repeated:
    """Array of lengths with the operations used by plans: number of lengths, and lengths of some samples."""

    def __init__(self, table: NDArray[np.uint32], size: int):
        self._table, self._size = table, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        found: NDArray[np.uint32] = self._table[sample_ids & (len(self._table) - 1)]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all lengths, in memory."""
        return self[np.arange(self._size)].astype(dtype or np.uint32)


class _Estimates(dict[str, NDArray[np.int64]]):
    """Pack counts of any epoch of a plan, each made when it is asked for.

    A block may have a few packs more than is said here, and never fewer: those are not read.
    """

    plan: PackPlan

    def __init__(self, index: _DrawnLengths, packing: PackingConfig):
        super().__init__()
        table, limit = index.table.astype(np.int64), packing.packing_length
        is_long = table > limit
        kept = {"drop": np.where(is_long, 0, table), "truncate": np.minimum(table, limit)}.get(packing.overlong, table)
        self._inputs = PlanInputs(index=index, order=OrderConfig(), packing=packing, kept_segments=KEPT_SEGMENTS)
        self._tokens = partial(_total_below, sums=np.concatenate([[0], np.cumsum(kept)]))
        packed = np.minimum(kept, limit) if packing.overlong == "keep" else kept
        self._packed = partial(_total_below, sums=np.concatenate([[0], np.cumsum(packed)]))
        self._long = partial(_total_below, sums=np.concatenate([[0], np.cumsum(is_long)]))

    def get(self, key: str, default: Any = None) -> Any:
        if key.endswith(TOKENS):
            packs, tokens = self.get(key.removesuffix(TOKENS)).T[:2]
            return np.repeat(tokens // np.maximum(1, packs), packs)
        if key not in self:
            self[key] = self._estimate(int(key.rpartition("-")[2]))
        return self[key]

    def _estimate(self, epoch: int) -> NDArray[np.int64]:
        """int64[num_blocks, 3], as block_counts."""
        config = self.plan.order
        order = EpochOrder(self.plan.samples_per_shard, config=config, epoch=epoch)
        bounds = [order.node_bounds(node) for node in range(order.num_canonical_nodes)]
        starts = np.concatenate([np.arange(first, stop, config.shuffle_block_size) for first, stop in bounds])
        cuts = np.append(starts, order.num_samples)
        kinds = self._tokens, self._packed, self._long
        tokens, packed, num_long = (np.diff(order.total_before(cuts, below)) for below in kinds)
        packs = packed // self.plan.packing.packing_length
        is_whole = np.diff(cuts) > config.shuffle_block_size // 2
        packs[is_whole] = (packs[is_whole] * self._overhead(order, packed, bounds)).astype(np.int64)
        return np.stack([packs, tokens, num_long], axis=1)

    def _overhead(self, order: EpochOrder, packed: NDArray[np.int64], bounds: list[tuple[int, int]]) -> float:
        """Packs over the fewest that could hold as many tokens, at least 1: a little less than in any block tried."""
        size = order.config.shuffle_block_size
        rows = np.cumsum([0, *[-(-(stop - first) // size) for first, stop in bounds]])[:-1]
        least = np.inf
        for node in np.unique(np.linspace(0, len(bounds) - 1, TRIED_BLOCKS).astype(int)).tolist():
            packs = pack_block(self._inputs, order, node, 0)
            fewest = int(packed[rows[node]]) // self.plan.packing.packing_length
            least = min(least, len(packs) / max(1, fewest))
        return 1 + 0.9 * max(0.0, least - 1)


def _total_below(sample_ids: NDArray[np.int64], *, sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum over all samples with smaller ids. sums: over the table up to each of its entries, int64[TABLE + 1]."""
    rounds, rest = np.divmod(sample_ids, TABLE)
    found: NDArray[np.int64] = rounds * sums[-1] + sums[rest]
    return found


def parse_count(text: float | str, *, name: str) -> int:
    """Parse a whole number of samples or tokens, at least 1, for example "7b"; ConfigError for anything else.

    >>> parse_count("10.5t", name="tokens"), parse_count(7e9, name="samples")
    (10500000000000, 7000000000)
    """
    number = str(text).strip().lower().replace("_", "")
    unit = number[-1:] if number[-1:] in _COUNTS else ""
    try:
        said = float(number.removesuffix(unit)) * _COUNTS.get(unit, 1)
        found = round(said)
    except (ValueError, OverflowError):
        said, found = 0.0, 0
    if found < 1 or abs(said - found) > 1e-9 * said:  # what is no whole number
        raise ConfigError(f"{name} {text!r} is not a number: write for example 7e9, 300m, 7b or 10.5t")
    return found
