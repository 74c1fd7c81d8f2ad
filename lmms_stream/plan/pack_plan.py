"""The numbered packs of an epoch. lengths + order + packing -> [plan] -> packs; integer arithmetic only.

A plan is a pure function of the lengths, the order config, the packing config and the epoch. What it keeps is
one pack count per shuffle block; a block's packs are computed again when they are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LengthsError, PackingError
from .block_counts import Counting, CountsCache, block_counts
from .block_packs import KEPT_SEGMENTS, LEAST_SEGMENTS, BlockPacks, PlanInputs
from .fixed_packs import Turns
from .lengths import Lengths, hash_lengths
from .order import EpochOrder, OrderConfig, in_stored_order, streams_digest
from .pack_range import PackRange, ends_of, runs
from .packing import PackingConfig

PLAN_VERSION = 2  # changes when the same inputs give other packs

_NODE_BITS = 40  # below a canonical node's number; its packs are fewer


class PackPlan:
    """Random access to the packs of any epoch over a lengths index (or a plain array of lengths).

    samples_per_shard: in stored order; their sum must be the number of lengths (LengthsError otherwise).
    counts_cache: keeps pack counts by plan fingerprint and epoch; a dict unless given, a folder in the dataset.
    counting: entered with the key of counts that the cache lacks, while they are made; one process after another where
    several share the cache, so that the first one counts and the others find what it kept. kept_segments: of packs
    that are kept in memory, 16 bytes each, for all canonical nodes together; more of them are replayed less often.
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
    ):
        if isinstance(lengths, Lengths):
            index = lengths
        else:
            index = Lengths(lengths=lengths, content_hash=hash_lengths(lengths))
        self.samples_per_shard = np.asarray(samples_per_shard, dtype=np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        if len(index.lengths) != self.num_samples:
            raise LengthsError(
                f"the lengths index has {len(index.lengths)} entries and the shards hold {self.num_samples} "
                "samples: write it again with lmms-stream index"
            )
        self.index = index
        self.lengths = np.asarray(index.lengths)  # a plain view: a memmap is slow to index
        self.order = in_stored_order(order)
        self.packing = packing
        first_epoch = EpochOrder(self.samples_per_shard, config=self.order, epoch=0)
        self.num_canonical_nodes = first_epoch.num_canonical_nodes
        self.fingerprint = self._fingerprint(index.content_hash + index.patches_hash)
        self._counts_cache: CountsCache = {} if counts_cache is None else counts_cache
        self._counting = counting
        self._kept_segments = kept_segments or max(KEPT_SEGMENTS, LEAST_SEGMENTS * self.num_canonical_nodes)
        self._epochs: OrderedDict[int, _EpochPlan] = OrderedDict()

    def num_packs(self, epoch: int) -> int:
        return self._epoch(epoch).num_packs

    def count(self, epoch: int) -> None:
        """See that the pack counts of an epoch are kept, before anybody needs them: by one thread, for it has time."""
        key, order = self._packed(epoch)
        block_counts(self._inputs, order, key, counts_cache=self._counts_cache, counting=self._counting, num_threads=1)

    def num_overlong(self, epoch: int) -> int:
        """Samples of the epoch that are longer than a pack, and dropped or truncated as configured."""
        return self._epoch(epoch).num_overlong

    def num_overlong_media(self, epoch: int) -> int:
        """Those of them with media: dropped, however others are cut."""
        return self._epoch(epoch).num_overlong_media

    def num_tokens(self, epoch: int) -> int:
        """Tokens in the packs of the epoch: int, what overlong samples lose not counted."""
        return self._epoch(epoch).num_tokens

    def efficiency(self, epoch: int) -> float:
        """Tokens in packs over tokens the packs could hold, from 0 to 1."""
        return self.num_tokens(epoch) / max(1, self.num_packs(epoch) * self.packing.packing_length)

    def packs(self, epoch: int, first: int, stop: int) -> PackRange:
        """Packs [first, stop) of an epoch; raises PackingError when the epoch has fewer."""
        total = self.num_packs(epoch)
        if not 0 <= first <= stop <= total:
            raise PackingError(f"packs [{first}, {stop}) asked of epoch {epoch}, which has packs [0, {total})")
        return self.take(epoch, np.arange(first, stop))

    def take(self, epoch: int, numbers: NDArray[np.int64]) -> PackRange:
        """The packs of an epoch with these numbers, which ascend and are not checked."""
        for other, plan in self._epochs.items():
            if other != epoch:
                plan.forget_blocks()
        return self._epoch(epoch).packs(numbers)

    def blocks(self, epoch: int, numbers: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """The blocks that these packs come from: index into `numbers` of the first pack, canonical node, block.

        The blocks of a canonical node are numbered in the order in which the epoch reads them.
        """
        return self._epoch(epoch).blocks(numbers)

    def shards_of_block(self, epoch: int, node: int, block: int) -> NDArray[np.int64]:
        """The shards that hold samples of a block; none beyond a canonical node's last block."""
        return self._epoch(epoch).shards_of_block(node, block)

    def _epoch(self, epoch: int) -> _EpochPlan:
        if epoch not in self._epochs:
            key, order = self._packed(epoch)
            counts = block_counts(self._inputs, order, key, counts_cache=self._counts_cache, counting=self._counting)
            self._epochs[epoch] = _EpochPlan(self._inputs, order, counts, epoch=epoch)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> tuple[str, EpochOrder]:
        """The key and the order of the epoch whose packs an epoch has: its own, or with fixed packs the first."""
        packed = epoch if self.order.reshuffle else 0
        order = EpochOrder(self.samples_per_shard, config=self.order, epoch=packed)
        return f"{self.fingerprint}-{packed}", order

    @property
    def _inputs(self) -> PlanInputs:
        return PlanInputs(index=self.index, order=self.order, packing=self.packing, kept_segments=self._kept_segments)

    def _fingerprint(self, lengths_hash: str) -> str:
        """Hashes with dashes between them, so that two can be compared field by field (cursor.py)."""
        order = dataclasses.replace(self.order, num_canonical_nodes=self.num_canonical_nodes)
        return plan_fingerprint(
            str(PLAN_VERSION), lengths_hash, self.samples_per_shard, order=order, packing=self.packing
        )


def plan_fingerprint(
    version: str,
    lengths_hash: str,
    samples_per_shard: NDArray[np.int64],
    *,
    order: OrderConfig,
    packing: PackingConfig,
    streams: str | None = None,
) -> str:
    """All that packs follow from; the fields are cursor.py's FINGERPRINT_FIELDS. streams: see streams_digest."""
    return "-".join(
        [
            version,
            short_digest(lengths_hash.encode()),
            short_digest(samples_per_shard.tobytes()),
            short_digest(json.dumps(order.description, sort_keys=True).encode()),
            short_digest(json.dumps(dataclasses.asdict(packing), sort_keys=True).encode()),
            streams or streams_digest(),
        ]
    )


def short_digest(data: bytes) -> str:
    """64 bits as hex, enough to tell settings apart in a fingerprint."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class _EpochPlan:
    """One epoch of a plan: the map from a pack's number to its node, block and position.

    order, counts: of the epoch whose packs these are (see block_counts). Blocks are told by their turn in this epoch.
    """

    def __init__(self, inputs: PlanInputs, order: EpochOrder, counts: NDArray[np.int64], *, epoch: int):
        self._inputs = inputs
        self.order = order
        self._blocks: dict[int, BlockPacks] = {}  # of each canonical node one
        num_blocks = [self.order.num_blocks(node) for node in range(self.order.num_canonical_nodes)]
        self._turns = None if order.config.reshuffle else Turns(order.config, epoch, num_blocks)
        if self._turns is not None:
            counts = counts[self._turns.blocks_of_turns]
        self._counts = counts[:, 0]
        self._num_blocks = num_blocks
        self.num_packs, self.num_tokens, self.num_overlong = (int(n) for n in counts[:, :3].sum(axis=0))
        self.num_overlong_media = int(counts[:, 3:].sum())
        patches = inputs.index.patches
        self._patches = None if patches is None else np.asarray(patches)  # a plain view: a memmap is slow to index
        ends = np.cumsum(num_blocks)
        self._first_blocks = ends - num_blocks  # of each canonical node, in the row of all blocks of all
        packs_before = np.cumsum(counts[:, 0]) - counts[:, 0]
        nodes = np.repeat(np.arange(len(num_blocks)), num_blocks)
        # The number of its canonical node's packs before each block; and that behind the node's number, to search in.
        self._packs_before_block = packs_before - packs_before[self._first_blocks[nodes]]
        self._block_keys = nodes << _NODE_BITS | self._packs_before_block
        self._interleave([int(counts[end - count : end, 0].sum()) for count, end in zip(num_blocks, ends, strict=True)])

    def _interleave(self, packs_per_node: list[int]) -> None:
        """Rounds take one pack of every canonical node that has packs left.

        Rounds [r, s) between two successive node sizes have the same nodes, so a few phases say it all:
        nodes with 5, 2 and 5 packs give phase 0 (rounds 0-1, nodes 0 1 2) and phase 1 (rounds 2-4, nodes 0 2).
        """
        self._phase_nodes: list[NDArray[np.int64]] = []
        phase_starts, phase_rounds = [], []
        start = previous = 0
        for size in sorted({size for size in packs_per_node if size}):
            nodes = np.array([node for node, count in enumerate(packs_per_node) if count >= size], np.int64)
            self._phase_nodes.append(nodes)
            phase_starts.append(start)
            phase_rounds.append(previous)
            start += (size - previous) * len(nodes)
            previous = size
        self._phase_starts = np.array(phase_starts, np.int64)
        self._phase_rounds = np.array(phase_rounds, np.int64)

    def _locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Canonical node, block and position in the block of each pack."""
        nodes, positions = np.empty_like(numbers), np.empty_like(numbers)
        phases = np.searchsorted(self._phase_starts, numbers, side="right") - 1
        for phase in range(phases[0], phases[-1] + 1):
            here = phases == phase
            rounds, turns = np.divmod(numbers[here] - self._phase_starts[phase], len(self._phase_nodes[phase]))
            nodes[here] = self._phase_nodes[phase][turns]
            positions[here] = self._phase_rounds[phase] + rounds
        found = np.searchsorted(self._block_keys, nodes << _NODE_BITS | positions, side="right") - 1
        return nodes, found - self._first_blocks[nodes], positions - self._packs_before_block[found]

    def blocks(self, numbers: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        if not len(numbers):
            return []
        nodes, blocks, _ = self._locate(numbers)
        firsts = np.sort(np.unique(nodes << _NODE_BITS | blocks, return_index=True)[1])
        return list(zip(firsts.tolist(), nodes[firsts].tolist(), blocks[firsts].tolist(), strict=True))

    def packs(self, numbers: NDArray[np.int64]) -> PackRange:
        if not len(numbers):
            nothing = np.empty(0, np.int64)
            return PackRange(
                sample_ids=nothing, starts=nothing, lengths=nothing, offsets=np.zeros(1, np.int64),
                canonical_nodes=nothing, sources=nothing, patches=None if self._patches is None else nothing,
            )  # fmt: skip
        nodes, blocks, positions = self._locate(numbers)
        copied = []  # of each stretch: which packs, and their segments, copied before the next one is replayed
        counts = np.empty(len(numbers), np.int64)
        for node, block in dict.fromkeys(zip(nodes.tolist(), blocks.tolist(), strict=True)):
            left = np.flatnonzero((nodes == node) & (blocks == block))
            if self._turns is not None:
                positions[left] = self._turned(node, block, positions[left])
                left = left[np.argsort(positions[left])]
            while len(left):
                packs = self._block(node, block)
                packs.replay_to(int(positions[left[0]]))
                num_here = int(np.searchsorted(positions[left], packs.stop))
                here, left = left[:num_here], left[num_here:]
                begins = packs.offsets[positions[here] - packs.first]
                counts[here] = packs.offsets[positions[here] - packs.first + 1] - begins
                source = runs(begins, counts[here])
                copied.append((here, packs.sample_ids[source], packs.lengths[source], packs.starts_of(source)))
        offsets = ends_of(counts)
        sample_ids, lengths = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
        starts = np.zeros(offsets[-1], np.int64)
        for here, ids_here, lengths_here, starts_here in copied:
            target = runs(offsets[:-1][here], counts[here])
            sample_ids[target] = ids_here
            lengths[target] = lengths_here
            starts[target] = starts_here
        return PackRange(
            sample_ids=sample_ids,
            starts=starts,
            lengths=lengths,
            offsets=offsets,
            canonical_nodes=nodes,
            sources=np.zeros(len(numbers), np.int64),
            patches=None
            if self._patches is None
            else np.add.reduceat(self._patches[sample_ids], offsets[:-1], dtype=np.int64),
        )

    def shards_of_block(self, node: int, block: int) -> NDArray[np.int64]:
        if self._turns is not None and block < self._num_blocks[node]:
            block = self._turns.block(node, block)
        return self.order.shards_of_block(node, block)

    def _turned(self, node: int, block: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self._turns is not None
        num_packs = int(self._counts[self._first_blocks[node] + block])
        return self._turns.packs(node, block, positions, num_packs=num_packs)

    def forget_blocks(self) -> None:
        """Let go of the blocks that were replayed, all but their counts."""
        self._blocks.clear()

    def _block(self, node: int, block: int) -> BlockPacks:
        """The packs of a block; of each canonical node the last one is kept, for packs are read one after another."""
        if self._turns is not None:
            block = self._turns.block(node, block)
        kept = self._blocks.get(node)
        if kept is None or kept.block != block:
            self._blocks.pop(node, None)
            kept = self._blocks[node] = BlockPacks(self._inputs, self.order, node, block, before=kept)
        return kept
