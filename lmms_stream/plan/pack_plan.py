"""The numbered packs of an epoch. lengths + order + packing -> [plan] -> packs; integer arithmetic only.

A plan is a pure function of the lengths, the order config, the packing config and the epoch. A plan keeps only the pack
count of each shuffle block; a block's packs are computed again when they are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, LengthsError, PackingError
from .block_packs import KEPT_SEGMENTS, LEAST_SEGMENTS, MIXED_SEGMENTS, Order, PlanInputs
from .epoch_plan import Amounts, Counting, Counts, CountsCache, EpochPlan, block_counts, count_blocks
from .lengths import Lengths, hash_lengths
from .order import EpochOrder, OrderConfig, in_stored_order, shards_of, streams_digest
from .packing import PackingConfig, PackRange, no_packs
from .sample_order import SampleOrder, Streams
from .short_epochs import ShortEpochs, has_short_epochs

Epochs = int | NDArray[np.int64]  # the epoch of all packs, or the epoch of each, ascending
PLAN_VERSION = 2  # changes when the same inputs give other packs
WINDOW_VERSION = 4  # version of window_N
STREAMS_VERSION = 1  # version of the order of several streams, behind the version of the packs
_CHUNK = 1 << 22  # lengths per vectorized operation


class KnownTokens(NamedTuple):
    """Tokens of the next packs of a source, in one or more epochs. goes_on: whether the last epoch has more packs."""

    tokens: NDArray[np.int64]
    goes_on: bool


class PackPlan:
    """Random access to the packs of any epoch over a lengths index (or a plain array of lengths).

    samples_per_shard: in stored order; their sum must be the number of lengths (LengthsError otherwise). counts_cache:
    keeps pack counts by plan fingerprint and epoch (default: a dict; in datasets a folder). counting: context for
    counts that are missing in the cache, entered with their key; processes that share the cache take turns: the first
    process counts, and the others read its counts. kept_segments: segments of packs to keep in memory, 16 bytes each,
    for all canonical nodes together; more segments mean fewer replays. By default mixed plans share MIXED_SEGMENTS.
    Short epochs are packed many at a time (see short_epochs). streams: packs hold samples of several streams, in the
    order of SampleOrder; a sample may come several times in an epoch, or not at all. ConfigError for streams without
    reshuffle.
    """

    def __init__(
        self,
        lengths: Lengths | NDArray[np.integer[Any]],
        samples_per_shard: Sequence[int] | NDArray[np.int64],
        *,
        order: OrderConfig,
        packing: PackingConfig,
        counts_cache: CountsCache | None = None,
        counting: Counting = nullcontext,
        kept_segments: int | None = None,
        streams: Streams | None = None,
    ):
        if isinstance(lengths, Lengths):
            index = lengths
        else:
            index = Lengths(lengths=lengths, content_hash=hash_lengths(lengths))
        self.samples_per_shard = np.asarray(samples_per_shard, dtype=np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        if packing.later_lengths and not order.reshuffle:
            raise ConfigError("another packing_length later needs another order of each epoch: set reshuffle to true")
        if packing.later_lengths and streams is not None:
            raise ConfigError(
                "packs of samples of several datasets have one packing_length: set one, or mixing to packs"
            )
        if len(index.lengths) != self.num_samples:
            raise LengthsError(
                f"the lengths index has {len(index.lengths)} entries and the shards hold {self.num_samples} "
                "samples: write it again with lmms-stream index"
            )
        self.index = index
        self.lengths = index.view()
        self.order = in_stored_order(order)
        self.packing = packing
        self.streams = streams
        if streams is not None and not order.reshuffle:
            raise ConfigError(
                "reshuffle: false keeps the packs of the first epoch, and an epoch of several streams has other "
                "samples: leave reshuffle out, or mix whole packs of the datasets (mixing: packs)"
            )
        self.epoch_size = self.num_samples if streams is None else sum(streams.counts)  # samples of an epoch
        self.num_canonical_nodes = self.order_of(0).num_canonical_nodes
        self.fingerprint = self._fingerprint(index.content_hash + index.patches_hash)
        self._counts_cache: CountsCache = {} if counts_cache is None else counts_cache
        self._counting = counting
        self._given_kept_segments = kept_segments
        self.kept_segments = kept_segments or max(KEPT_SEGMENTS, LEAST_SEGMENTS * self.num_canonical_nodes)
        self._epochs: OrderedDict[int, EpochPlan] = OrderedDict()
        self._orders: OrderedDict[int, Order] = OrderedDict()
        # packs of epochs, each as int64[1]: `len` asks for all of them
        self._counted: dict[int, NDArray[np.int64]] = {}
        self.counts_tokens = False  # whether the tokens of each pack are counted and kept, for turns by tokens
        self.other: PackPlan | None = None  # of own_seeds: the same with the seed of a single source

    def keeping(self, num_segments: int | None) -> PackPlan:
        """Return the same plan with another number of segments kept in memory."""
        return self._with(self.packing, num_segments)

    def of_packing(self, packing: PackingConfig, *, keeps_counts: bool = True) -> PackPlan:
        """Return the same plan with another packing config. keeps_counts: whether counts enter the cache."""
        return self._with(packing, self._given_kept_segments, keeps_counts=keeps_counts)

    def _with(
        self,
        packing: PackingConfig,
        kept_segments: int | None,
        *,
        keeps_counts: bool = True,
        order: OrderConfig | None = None,
    ) -> PackPlan:
        made = PackPlan(
            self.index,
            self.samples_per_shard,
            order=order or self.order,
            packing=packing,
            counts_cache=self._counts_cache if keeps_counts else None,
            counting=self._counting if keeps_counts else nullcontext,
            kept_segments=kept_segments,
            streams=self.streams,
        )
        made.counts_tokens = self.counts_tokens
        return made

    def sharing(self, num_plans: int) -> PackPlan:
        """Return the plan for a mixture of num_plans: all keep MIXED_SEGMENTS together, unless kept_segments is set.

        At least LEAST_SEGMENTS are kept per canonical node.
        """
        share = max(MIXED_SEGMENTS // num_plans, LEAST_SEGMENTS * self.num_canonical_nodes)
        is_given = self._given_kept_segments is not None
        return self if is_given or self.kept_segments <= share else self.keeping(share)

    @cached_property
    def is_short(self) -> bool:
        """Whether the source has few samples; does not make `short`."""
        nodes = self.num_canonical_nodes
        return self.streams is None and has_short_epochs(
            self.index, self.samples_per_shard, packing=self.packing, num_canonical_nodes=nodes
        )

    @cached_property
    def short(self) -> ShortEpochs | None:
        """Epochs of a source of few samples, packed many at a time; None for other sources."""
        if not self.is_short:
            return None
        return ShortEpochs(
            self.index,
            self.samples_per_shard,
            order=self.order,
            packing=self.packing,
            num_canonical_nodes=self.num_canonical_nodes,
            kept_segments=self.kept_segments,
        )

    def num_packs(self, epoch: int) -> int:
        return int(self.known_counts(epoch)[0])

    def packs_in_turn(self, epoch: int) -> int:
        """Return the packs of an epoch, since the change if its packing_length changes."""
        return self.num_packs(epoch)

    def num_packs_of_epochs(self, first: int, stop: int) -> int:
        """Return the number of packs of the epochs [first, stop)."""
        if self.short is not None:
            return self.short.num_packs(first, stop)
        return sum(self.num_packs(epoch) for epoch in range(first, stop))

    def known_counts(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of packs of an epoch and of the next epochs counted together: int64[1 or more]."""
        if self.short is not None:
            return self.short.counts(epoch)
        if epoch not in self._counted:
            self._counted[epoch] = np.array([self._epoch(epoch).num_packs])
        return self._counted[epoch]

    def known_tokens(self, epoch: int, first: int, most: int) -> KnownTokens:
        """Return about the next `most` packs from a position on, with their tokens; see counts_tokens."""
        if self.short is not None:
            return KnownTokens(self.short.tokens(epoch)[first:], False)
        num_packs = self.num_packs(epoch)
        stop = min(num_packs, first + most)
        return KnownTokens(self._epoch(epoch).tokens(first, stop), stop < num_packs)

    def count(self, epoch: int) -> None:
        """Count the packs of an epoch ahead of time, with a single thread."""
        if not self.is_short:
            self._block_counts(*self._packed(epoch), num_threads=1)

    def _block_counts(self, key: str, order: Order, *, num_threads: int | None = None) -> Counts:
        return block_counts(
            self._inputs, order, key, counts_cache=self._counts_cache, counting=self._counting,
            num_threads=num_threads, with_tokens=self.counts_tokens,
        )  # fmt: skip

    def num_overlong(self, epoch: int) -> int:
        """Return the number of samples of the epoch longer than a pack."""
        return self._epoch(epoch).num_overlong

    def num_overlong_media(self, epoch: int) -> int:
        """Return the number of overlong samples with media, always dropped."""
        return self._epoch(epoch).num_overlong_media

    def num_tokens(self, epoch: int) -> int:
        """Return the tokens in the packs of the epoch, without the cut tokens of overlong samples."""
        return self._epoch(epoch).num_tokens

    def efficiency(self, epoch: int) -> float:
        """Return the share of the packs' tokens that samples fill, from 0 to 1."""
        return self.num_tokens(epoch) / max(1, self._room(epoch))

    def _room(self, epoch: int) -> int:
        """Return the tokens that fit into the packs of an epoch."""
        return self.num_packs(epoch) * self.packing.packing_length + self.num_tokens_over(epoch)

    def sample_chunks(self, epoch: int) -> Iterator[slice | NDArray[np.int64]]:
        """Yield the sample ids of an epoch, some at a time, in no order; each id as often as the epoch has it."""
        if self.streams is None:
            yield from (slice(at, at + _CHUNK) for at in range(0, self.num_samples, _CHUNK))
            return
        order = self.order_of(epoch)
        for node in range(order.num_canonical_nodes):
            yield from (order.block(node, block) for block in range(order.num_blocks(node)))

    def num_tokens_over(self, epoch: int) -> int:
        """Return the tokens beyond packing_length of an epoch's samples that are kept whole."""
        if self.packing.overlong != "keep":
            return 0
        chunks = (self.lengths[each].astype(np.int64) for each in self.sample_chunks(epoch))
        return sum(int(np.maximum(chunk - self.packing.packing_length, 0).sum()) for chunk in chunks)

    def num_longer_than(self, num_tokens: int) -> int:
        """Return the number of samples of the first epoch with a packed segment of more tokens."""
        if num_tokens >= self.longest_pack:
            return 0
        is_dropped = self.packing.overlong == "drop"
        return self._num_above(num_tokens) - (self._num_above(max(self.packing.lengths)) if is_dropped else 0)

    def num_overlong_later(self) -> list[tuple[int, int, int]]:
        """Return step, length and number of longer samples of each later packing_length; reads all lengths."""
        return [(step, length, self._num_above(length)) for step, length in self.packing.later_lengths]

    def has_packs(self, packing_length: int) -> bool:
        """Return whether any sample is not dropped with a packing_length."""
        if self.packing.overlong != "drop" and self.index.patches is None:
            return self.num_samples > 0
        return self._num_above(packing_length) < self.num_samples

    def _num_above(self, num_tokens: int) -> int:
        """Return the number of longer samples of the first epoch."""
        return sum(int(np.count_nonzero(self.lengths[each] > num_tokens)) for each in self.sample_chunks(0))

    @property
    def least_length(self) -> int:
        """The least packing_length of former and present packs."""
        return self.packing.packing_length

    def num_pieces(self, sample_id: int) -> int:
        """Return the most pieces of a sample in packs; 1 for an overlong sample that is dropped."""
        is_split = self.packing.overlong == "split"
        return max(1, -(-int(self.lengths[sample_id]) // self.least_length)) if is_split else 1

    @property
    def stream_shards(self) -> list[slice]:
        """Shards of each stream, in turn; a plan without streams is a single stream."""
        bounds = [0, len(self.samples_per_shard)] if self.streams is None else self.streams.first_shards.tolist()
        return [slice(first, stop) for first, stop in pairwise(bounds)]

    def streams_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the stream of each sample: int64, of the same shape; zeros without streams."""
        if self.streams is None:
            return np.zeros_like(sample_ids)
        samples = np.cumsum([0, *self.samples_per_shard])
        return shards_of(sample_ids, samples[self.streams.first_shards[:-1]])

    def tokens_of_streams(self, epoch: int) -> NDArray[np.int64]:
        """Return the tokens of each stream in the packs of an epoch: int64[num_streams]; reads the whole epoch."""
        assert self.streams is not None
        totals = np.zeros(len(self.streams.counts))
        for ids in self.sample_chunks(epoch):
            assert not isinstance(ids, slice)
            tokens = packed_tokens(self.index, ids, packing=self.packing)
            totals += np.bincount(self.streams_of(ids), tokens, minlength=len(totals))
        return totals.astype(np.int64)

    @cached_property
    def full_pack(self) -> int:
        """Maximum tokens of a pack, until packing_length changes: packing_length, or the longest sample kept whole."""
        longest = int(self.lengths.max(initial=0)) if self.packing.overlong == "keep" else 0
        return max(longest, self.packing.packing_length)

    @property
    def longest_pack(self) -> int:
        """Maximum tokens of a pack of any packing_length."""
        return max(self.full_pack, *self.packing.lengths)

    def packs(self, epoch: int, first: int, stop: int) -> PackRange:
        """Return packs [first, stop) of an epoch; PackingError if the epoch has fewer packs."""
        total = self.num_packs(epoch)
        if not 0 <= first <= stop <= total:
            raise PackingError(f"packs [{first}, {stop}) requested from epoch {epoch}, which has packs [0, {total})")
        return self.take(epoch, np.arange(first, stop))

    def take(self, epochs: Epochs, numbers: NDArray[np.int64]) -> PackRange:
        """Return packs by their numbers, ascending in each epoch and unchecked."""
        if not len(numbers):
            return no_packs(has_media=self.index.patches is not None)
        if self.short is not None:
            return self.short.packs(_each(epochs, len(numbers)), numbers)
        epoch = _only(epochs)
        for other, plan in self._epochs.items():
            if other != epoch:
                plan.forget_blocks()
        return self._epoch(epoch).packs(numbers)

    def canonical_nodes(self, epochs: Epochs, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the canonical node of each pack, without making packs."""
        if not len(numbers):
            return np.empty(0, np.int64)
        if self.short is not None:
            return self.short.canonical_nodes(_each(epochs, len(numbers)), numbers)
        return self._epoch(_only(epochs)).canonical_nodes(numbers)

    def packs_of(self, epoch: int, sample_id: int) -> NDArray[np.int64]:
        """Return the numbers of an epoch's packs with a sample: int64[n], for each occurrence one per piece.

        Whole datasets have each sample once. Empty for an overlong sample that is dropped. Only the sample's blocks are
        packed again. PackingError for an unknown id.
        """
        self.check_sample(sample_id)
        return self._epoch(epoch).packs_of(sample_id)

    def first_packs_of(self, epoch: int, sample_ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Yield the packs of an epoch with any of some samples, in order, each with the sample's id.

        Blocks are packed again as packs are requested. PackingError for an unknown id.
        """
        for sample_id in sample_ids[[int(sample_ids.argmin()), int(sample_ids.argmax())]].tolist():
            self.check_sample(sample_id)
        return self._epoch(epoch).first_packs_of(sample_ids)

    def check_sample(self, sample_id: int) -> None:
        """Raise PackingError for an unknown id."""
        if not 0 <= sample_id < self.num_samples:
            raise PackingError(f"sample {sample_id} asked of a dataset with samples [0, {self.num_samples})")

    def amounts(self, epoch: int, num_packs: int) -> Amounts:
        """Return the samples and tokens in the first packs of an epoch; packs a block per canonical node again."""
        total = self.num_packs(epoch)
        if not 0 <= num_packs <= total:
            raise PackingError(
                f"the first {num_packs} packs requested from epoch {epoch}, which has packs [0, {total})"
            )
        return self._epoch(epoch).amounts(num_packs)

    def blocks(self, epochs: Epochs, numbers: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
        """Return the blocks of these packs: index into `numbers` of the first pack, epoch, canonical node, block.

        The blocks of a canonical node are numbered in reading order.
        """
        if not len(numbers):
            return []
        if self.short is not None:
            of_packs = _each(epochs, len(numbers))
            firsts, nodes, blocks = self.short.blocks(of_packs, numbers)
            found = firsts, of_packs[firsts], nodes, blocks
            return list(zip(*(each.tolist() for each in found), strict=True))
        epoch = _only(epochs)
        return [(first, epoch, node, block) for first, node, block in self._epoch(epoch).blocks(numbers)]

    def shards_of_block(self, epoch: int, node: int, block: int) -> NDArray[np.int64]:
        """Return the shards with samples of a block; empty after a canonical node's last block."""
        if not self.is_short or not self.order.reshuffle:
            return self._epoch(epoch).shards_of_block(node, block)
        if epoch not in self._orders:  # of short epochs: no pack needs to be counted for it
            self._orders[epoch] = self._packed(epoch)[1]
            if len(self._orders) > 4:
                self._orders.popitem(last=False)
        return self._orders[epoch].shards_of_block(node, block)

    def _epoch(self, epoch: int) -> EpochPlan:
        found = self._epochs.get(epoch)
        if found is None or (self.counts_tokens and not found.has_tokens):
            key, order = self._packed(epoch)
            if self.is_short:  # counted sooner than a folder is read
                counts, tokens = count_blocks(self._inputs, order, num_threads=1, with_tokens=self.counts_tokens)
            else:
                counts, tokens = self._block_counts(key, order)
            self._epochs[epoch] = EpochPlan(self._inputs, order, counts, epoch=epoch, tokens=tokens)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> tuple[str, Order]:
        """The key and the order of the epoch whose packs an epoch has: its own, or with fixed packs the first."""
        packed = epoch if self.order.reshuffle else 0
        return f"{self.fingerprint}-{packed}", self.order_of(packed)

    def order_of(self, epoch: int) -> Order:
        """Return the order of the samples of an epoch, without counting packs."""
        if self.streams is None:
            return EpochOrder(self.samples_per_shard, config=self.order, epoch=epoch)
        sizes = np.split(self.samples_per_shard, self.streams.first_shards[1:-1])
        return SampleOrder(sizes, counts=self.streams.counts, config=self.order, epoch=epoch)

    @property
    def _inputs(self) -> PlanInputs:
        return PlanInputs(index=self.index, order=self.order, packing=self.packing, kept_segments=self.kept_segments)

    def _fingerprint(self, lengths_hash: str) -> str:
        """Return hashes joined by dashes, for comparison field by field (cursor.py)."""
        order = dataclasses.replace(self.order, num_canonical_nodes=self.num_canonical_nodes)
        version, sizes = str(WINDOW_VERSION if self.packing.is_window_n else PLAN_VERSION), self.samples_per_shard
        if self.streams is not None:
            version += f".{STREAMS_VERSION}"
            sizes = np.array([*sizes, *self.streams.num_shards, *self.streams.counts], np.int64)
        return plan_fingerprint(version, lengths_hash, sizes, order=order, packing=self.packing)


def own_seeds(plans: Mapping[str, PackPlan]) -> dict[str, PackPlan]:
    """Return the plans of a new run's sources: each of several has a stream of the seed, by the source's name.

    With one seed, datasets of equal sizes would have the same order, and related rows would come together. A single
    source has the seed itself, like in earlier releases. A source keeps its first seed, see Mixture.adopt.
    """
    found = dict(plans)
    for name, plan in plans.items() if len(plans) > 1 else ():
        found[name] = of_own_seed(plan, name)
        found[name].other = plan
    return found


def of_own_seed(plan: PackPlan, name: str) -> PackPlan:
    """Return the plan of a source with the source's own seed."""
    seed = int(short_digest(f"{plan.order.seed} {name}".encode())[:8], 16)
    order = dataclasses.replace(plan.order, seed=seed)
    return plan._with(plan.packing, plan._given_kept_segments, order=order)


def _each(epochs: Epochs, num_packs: int) -> NDArray[np.int64]:
    return np.full(num_packs, epochs) if isinstance(epochs, int) else epochs


def _only(epochs: Epochs) -> int:
    """Return the epoch of one or more packs: a plan of long epochs reads an epoch at a time."""
    return epochs if isinstance(epochs, int) else int(epochs[0])


def packed_tokens(
    index: Lengths, sample_ids: slice | NDArray[np.int64], *, packing: PackingConfig
) -> NDArray[np.int64]:
    """Return the tokens of samples in packs, all pieces together; 0 for a dropped sample: int64[n]."""
    lengths, limit = np.asarray(index.lengths[sample_ids], np.int64), packing.packing_length
    if packing.overlong == "keep":
        return lengths
    is_dropped = np.full(len(lengths), packing.overlong == "drop")
    if index.patches is not None:
        is_dropped |= np.asarray(index.patches[sample_ids]) > 0
    tokens = np.minimum(lengths, limit) if packing.overlong == "truncate" else lengths
    return np.where((lengths > limit) & is_dropped, 0, tokens)


def plan_fingerprint(
    version: str,
    lengths_hash: str,
    samples_per_shard: NDArray[np.int64],
    *,
    order: OrderConfig,
    packing: PackingConfig,
    streams: str | None = None,
) -> str:
    """Return the fingerprint of all inputs of packs: FINGERPRINT_FIELDS of cursor.py. streams: see streams_digest."""
    return "-".join(
        [
            version,
            short_digest(lengths_hash.encode()),
            short_digest(samples_per_shard.tobytes()),
            short_digest(json.dumps(order.description, sort_keys=True).encode()),
            short_digest(json.dumps(packing.description, sort_keys=True).encode()),
            streams or streams_digest(),
        ]
    )


def short_digest(data: bytes) -> str:
    """Return 64 bits as hex, enough to distinguish settings in a fingerprint."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
