"""The epoch order of samples, block by block. shard sizes + seed -> [order] -> sample ids; integer arithmetic only.

The shards of an epoch are permuted and laid end to end. This sequence of samples is cut into C canonical nodes of equal
size (two nodes share a shard on a cut), and each canonical node into shuffle blocks. Samples are permuted within a
block. Any block can therefore be computed alone: O(shards) once an epoch, O(block) per block.

Canonical nodes and shuffle blocks are MosaicML Streaming's terms (py1b is the nearest of its shuffles).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_fields
from ..errors import ConfigError

MAX_DEFAULT_CANONICAL_NODES = 8  # a start replays a block of each node: 64 nodes took over a second
MIN_SAMPLES_PER_DEFAULT_NODE = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderConfig:
    """Order of an epoch. Two runs with the same values and the same shards have the same order.

    Without shuffle the order is the stored order for any number of nodes: the plan has a single canonical node, and
    num_canonical_nodes is only the number of lanes. Nodes and ranks share each step in order, the first node has the
    first packs. Without reshuffle each epoch has the packs of the first epoch, in a new order (see Turns).
    """

    seed: int = 0
    shuffle: bool = True
    num_canonical_nodes: int | None = None  # None: chosen from the number of samples
    shuffle_block_size: int = 1 << 18  # samples
    reshuffle: bool = True

    @property
    def description(self) -> dict[str, Any]:
        """Fields that name a plan; reshuffle only if False, because older plans were named without it."""
        values = asdict(self)
        if self.reshuffle:
            del values["reshuffle"]
        return values

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.seed < 1 << 32:  # a larger seed would be split into two words of the random stream's key
            raise ConfigError(f"seed must be from 0 to {(1 << 32) - 1}, got {self.seed}")
        if self.num_canonical_nodes is not None and self.num_canonical_nodes < 1:
            raise ConfigError(f"num_canonical_nodes must be at least 1, got {self.num_canonical_nodes}")
        if not 1 <= self.shuffle_block_size <= 1 << 30:
            raise ConfigError(f"shuffle_block_size must be from 1 to {1 << 30} samples, got {self.shuffle_block_size}")


class BegunBlock(NamedTuple):
    """The rest of a shuffle block, in order: sample ids, first tokens and tokens, int64[num_pieces] each.

    is_new: bool[num_pieces], False for pieces of samples with another piece in an earlier pack.
    """

    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    is_new: NDArray[np.bool_]


class LeftOfNode(NamedTuple):
    """The rest of an epoch in a canonical node: blocks from first_block on. begun: rest of first_block; None: whole."""

    first_block: int
    begun: BegunBlock | None


def default_canonical_nodes(num_samples: int) -> int:
    """Return a power of two that leaves each canonical node at least 2**17 samples, and at most 8.

    The number depends only on the dataset: any number of machines gets the same packs. With more than 8 nodes, set
    num_canonical_nodes to a multiple of the number of nodes; then each node downloads only its own share.

    >>> [default_canonical_nodes(n) for n in (0, 10_000, 1 << 18, 10**9)]
    [1, 1, 2, 8]
    """
    nodes = max(1, min(MAX_DEFAULT_CANONICAL_NODES, num_samples // MIN_SAMPLES_PER_DEFAULT_NODE))
    return 1 << (nodes.bit_length() - 1)


def in_stored_order(config: OrderConfig) -> OrderConfig:
    """Return the config for whole epochs: without shuffle a single canonical node, which keeps the stored order.

    (Each lane reads its own canonical node in any order.)
    """
    return config if config.shuffle else replace(config, num_canonical_nodes=1)


def streams_digest() -> str:
    """Return a digest of the first numbers of NumPy's random streams for orders and packs.

    NumPy promises the numbers of a bit generator for good, but the numbers of a Generator's methods only within a
    release.
    """
    rng = np.random.default_rng([1, 2, 3, 4])
    shuffled = np.arange(1000, dtype=np.int64)
    rng.shuffle(shuffled)
    seed = np.random.SeedSequence([1, 2, 3, 4, 1]).generate_state(1, np.uint64)
    drawn = (rng.permutation(1000).astype(np.int64), shuffled, seed)
    return hashlib.blake2b(b"".join(numbers.tobytes() for numbers in drawn), digest_size=8).hexdigest()


class EpochOrder:
    """The order of one epoch over shards of the given sizes.

    Sample ids count through the shards in their stored order: shard k holds the ids
    [sum(sizes[:k]), sum(sizes[:k + 1])).
    """

    def __init__(self, samples_per_shard: Sequence[int] | NDArray[np.int64], *, config: OrderConfig, epoch: int):
        sizes = np.asarray(samples_per_shard, dtype=np.int64)
        self.config = config
        self.epoch = epoch
        self.num_samples = int(sizes.sum())
        self.num_canonical_nodes = config.num_canonical_nodes or default_canonical_nodes(self.num_samples)
        permutation = np.arange(len(sizes))
        if config.shuffle:
            permutation = np.random.default_rng([config.seed, epoch]).permutation(len(sizes))
        self._permutation = permutation
        # A position in the laid-out sequence, minus its shard's start there, plus its shard's first id.
        self._starts = np.cumsum(sizes[permutation]) - sizes[permutation]
        self._first_ids = (np.cumsum(sizes) - sizes)[permutation]

    def node_bounds(self, node: int) -> tuple[int, int]:
        """Return the first and one-past-last position of a canonical node in the laid-out sequence."""
        count = self.num_canonical_nodes
        return self.num_samples * node // count, self.num_samples * (node + 1) // count

    def num_blocks(self, node: int) -> int:
        first, stop = self.node_bounds(node)
        return -(-(stop - first) // self.config.shuffle_block_size)

    def block(self, node: int, block: int) -> NDArray[np.int64]:
        """Return the sample ids of a shuffle block of a canonical node, in epoch order: int64[up to block size]."""
        first, stop = self.node_bounds(node)
        start = first + block * self.config.shuffle_block_size
        ids = self._ids(start, min(stop, start + self.config.shuffle_block_size))
        if self.config.shuffle:
            # node + 1: SeedSequence pads with zeros, so [seed, epoch, 0, 0] would be the stream of the shards.
            np.random.default_rng([self.config.seed, self.epoch, node + 1, block]).shuffle(ids)
        return ids

    def locate(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the canonical node of each sample, and its shuffle block in the node: int64, shaped as sample_ids."""
        by_id = np.argsort(self._first_ids, kind="stable")
        by_id = by_id[np.diff(self._starts, append=self.num_samples)[by_id] > 0]  # shards with samples
        shards = by_id[shards_of(sample_ids, self._first_ids[by_id])]
        positions = self._starts[shards] + sample_ids - self._first_ids[shards]
        bounds = np.array([self.node_bounds(node) for node in range(self.num_canonical_nodes)], np.int64)
        nodes: NDArray[np.int64] = np.searchsorted(bounds[:, 1], positions, side="right")
        blocks: NDArray[np.int64] = (positions - bounds[nodes, 0]) // self.config.shuffle_block_size
        return nodes, blocks

    def occurrences(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return the samples, and node and block of each as from locate: each is once in an epoch; see SampleOrder."""
        return sample_ids, *self.locate(sample_ids)

    def repeats(self, node: int, block: int) -> None:
        """No sample comes again in an epoch; see SampleOrder."""

    def shards_of_block(self, node: int, block: int) -> NDArray[np.int64]:
        """Return the shards with samples of a block, in laid-out order; an empty array beyond the last block."""
        first, stop = self.node_bounds(node)
        start = first + block * self.config.shuffle_block_size
        if start >= stop:
            return np.empty(0, np.int64)
        shards: NDArray[np.int64] = self._permutation[
            self._runs(start, min(stop, start + self.config.shuffle_block_size))
        ]
        return shards

    def pieces(self, blocks_together: int = 1) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard, canonical node and shuffle block of each part of a shard in a block, in laid-out order.

        int64[num_pieces] each, at least a piece for each shard with samples. blocks_together: number of consecutive
        blocks to merge, for fewer pieces with small blocks.
        """
        bounds = np.array([self.node_bounds(node) for node in range(self.num_canonical_nodes)], np.int64)
        span = self.config.shuffle_block_size * blocks_together
        starts = [np.arange(first, stop, span) for first, stop in bounds.tolist()]
        cuts = np.unique(np.concatenate([self._starts, *starts]))
        cuts = cuts[cuts < self.num_samples]
        shards = self._permutation[np.searchsorted(self._starts, cuts, side="right") - 1]
        nodes: NDArray[np.int64] = np.searchsorted(bounds[:, 1], cuts, side="right")
        return shards, nodes, (cuts - bounds[nodes, 0]) // span * blocks_together

    def total_before(
        self, positions: NDArray[np.int64], total_below: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Return the total of any additive quantity over the samples before each position of the laid-out sequence.

        total_below: total over all samples with smaller ids than given, int64[n] -> int64[n].
        """
        ends = self._first_ids + np.diff(self._starts, append=self.num_samples)
        of_shards = total_below(ends) - total_below(self._first_ids)
        before_shard = np.cumsum(of_shards) - of_shards
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        first_ids = self._first_ids[shards]
        ids = first_ids + positions - self._starts[shards]
        found: NDArray[np.int64] = before_shard[shards] + total_below(ids) - total_below(first_ids)
        return found

    def _runs(self, start: int, stop: int) -> slice:
        """Return the shards with positions [start, stop) of the laid-out sequence, by their index in the sequence."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        return slice(first, int(np.searchsorted(self._starts, stop, side="left")))

    def _ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample ids at positions [start, stop) of the laid-out sequence, a run per shard."""
        here = self._runs(start, stop)
        starts = np.maximum(self._starts[here], start)
        shifts = self._first_ids[here] - self._starts[here]
        run_lengths = np.diff(starts, append=stop)
        ids: NDArray[np.int64] = np.arange(start, stop, dtype=np.int64) + np.repeat(shifts, run_lengths)
        return ids


class RestOrder(EpochOrder):
    """The order of the rest of an epoch. lefts: the rest of each canonical node. Blocks keep their numbers."""

    def __init__(
        self, samples_per_shard: NDArray[np.int64], *, config: OrderConfig, epoch: int, lefts: Sequence[LeftOfNode]
    ):
        super().__init__(samples_per_shard, config=config, epoch=epoch)
        self.lefts = lefts

    def begun(self, node: int, block: int) -> BegunBlock | None:
        """Return the rest of a begun block; None for a whole block."""
        left = self.lefts[node]
        return left.begun if left.first_block == block else None

    def block(self, node: int, block: int) -> NDArray[np.int64]:
        if block < self.lefts[node].first_block:
            return np.empty(0, np.int64)
        begun = self.begun(node, block)
        return super().block(node, block) if begun is None else begun.sample_ids


class StreamPasses:
    """Samples of a stream by canonical node, in endless passes."""

    def __init__(self, samples_per_shard: NDArray[np.int64], *, config: OrderConfig, first_id: int):
        self._samples_per_shard = samples_per_shard
        self._config = config
        self._first_id = first_id
        self._orders: dict[int, EpochOrder] = {}
        self._blocks: dict[int, tuple[int, int, NDArray[np.integer[Any]]]] = {}
        self._begun: NDArray[np.int64] | None = None  # see _are_before
        self._lock = threading.Lock()  # threads count the packs of several blocks at a time
        order = self._order(0)
        self._num_samples = order.num_samples
        self._sections = np.diff([order.node_bounds(node) for node in range(order.num_canonical_nodes)]).ravel()

    def dealt(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of each canonical node's samples among the first `count` of the passes: int64[C]."""
        passes, left = divmod(count, max(1, self._num_samples))
        rounds, turns = divmod(left, len(self._sections))
        takes: NDArray[np.int64] = passes * self._sections + np.minimum(self._sections, rounds)
        takes[np.flatnonzero(self._sections > rounds)[:turns]] += 1
        return takes

    def ids(self, node: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at ascending indices into a canonical node's sections, pass after pass."""
        ids = np.empty_like(indices)
        section, block_size = int(self._sections[node]), self._config.shuffle_block_size
        at = 0
        while at < len(indices):
            number, index = divmod(int(indices[at]), section)
            start = int(indices[at]) - index % block_size
            end = int(np.searchsorted(indices, min(start + block_size, (number + 1) * section)))
            ids[at:end] = self._block(node, number, index // block_size)[indices[at:end] - start]
            at = end
        ids += self._first_id
        return ids

    def repeats(self, node: int, indices: NDArray[np.int64], *, first: int, starts: Sequence[int]) -> NDArray[np.int64]:
        """Return how often the passes have each sample before its pass, from the nodes' indices `starts` on.

        indices: of the samples, ascending. first: pass of the starts, the same in every call.
        """
        repeats = indices // int(self._sections[node]) - first
        again = np.flatnonzero(repeats > 0)
        if len(again):
            ids = self.ids(node, indices[again]) - self._first_id
            repeats[again] -= self._are_before(ids, first, np.array(starts, np.int64) - first * self._sections)
        return repeats

    def _are_before(self, ids: NDArray[np.int64], number: int, stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples a pass has before the nodes' indices `stops`, counted from the begin of the pass."""
        size, order = self._config.shuffle_block_size, self._order(number)
        if self._begun is None:
            cut = [(node, stop // size, stop % size) for node, stop in enumerate(stops.tolist()) if stop % size]
            begun = [order.block(node, block)[:count] for node, block, count in cut]
            self._begun = np.concatenate([np.empty(0, np.int64), *begun])
        nodes, blocks = order.locate(ids)
        before: NDArray[np.bool_] = blocks < stops[nodes] // size
        cut_at = np.flatnonzero(blocks == stops[nodes] // size)
        before[cut_at] = np.isin(ids[cut_at], self._begun)
        return before

    def shards(self, node: int, first: int, stop: int) -> NDArray[np.int64]:
        """Return the shards of the shuffle blocks with a canonical node's indices [first, stop), each once."""
        found: dict[int, None] = {}
        section, size = int(self._sections[node]), self._config.shuffle_block_size
        num_shards = int(np.count_nonzero(self._samples_per_shard))
        while first < stop and len(found) < num_shards:
            number, index = divmod(first, section)
            shards = self._order(number).shards_of_block(node, index // size)
            found |= dict.fromkeys(shards[self._samples_per_shard[shards] > 0].tolist())
            first = min(first + size - index % size, (number + 1) * section)
        return np.array([*found], np.int64)

    def places(
        self, sample_ids: NDArray[np.int64], starts: Sequence[int], counts: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield canonical node, sample id and index of each occurrence of samples at a node's next indices.

        starts, counts: first index, and number of indices, of each canonical node.
        """
        wanted = sample_ids - self._first_id
        wanted = wanted[(wanted >= 0) & (wanted < self._num_samples)]
        nodes = [node for node, count in enumerate(counts) if count] if len(wanted) else []
        ends = {node: starts[node] + counts[node] for node in nodes}
        first = min((starts[node] // int(self._sections[node]) for node in nodes), default=0)
        stop = max((-(-ends[node] // int(self._sections[node])) for node in nodes), default=0)
        for number in range(first, stop):
            located = self._order(number).locate(wanted)
            for node, block in dict.fromkeys(zip(*(each.tolist() for each in located), strict=True)):
                begin = number * int(self._sections[node]) + block * self._config.shuffle_block_size
                if node not in ends or begin >= ends[node] or begin + self._config.shuffle_block_size <= starts[node]:
                    continue
                ids = self._block(node, number, block)
                for at in np.flatnonzero(np.isin(ids, wanted)).tolist():
                    if starts[node] <= begin + at < ends[node]:
                        yield node, int(ids[at]) + self._first_id, begin + at

    def _block(self, node: int, number: int, block: int) -> NDArray[np.integer[Any]]:
        kept = self._blocks.get(node)
        if kept is None or kept[:2] != (number, block):
            ids = self._order(number).block(node, block)
            kept = number, block, ids.astype(np.uint32) if self._num_samples <= 1 << 32 else ids
            self._blocks[node] = kept
        return kept[2]

    def _order(self, number: int) -> EpochOrder:
        with self._lock:
            order = self._orders.get(number)
            if order is None:
                # A chunk holds many short passes, and canonical nodes read them one after the other.
                if len(self._orders) >= max(2, 4096 // (len(self._samples_per_shard) + 1)):
                    del self._orders[next(iter(self._orders))]
                order = self._orders[number] = EpochOrder(self._samples_per_shard, config=self._config, epoch=number)
            return order


def shards_of(sample_ids: NDArray[np.int64], first_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the shard of each sample, from the first id of every shard: int64, of the same shape.

    >>> shards_of(np.array([0, 4, 5]), np.array([0, 5]))
    array([0, 0, 1])
    """
    shard_ids: NDArray[np.int64] = np.searchsorted(first_ids, sample_ids, side="right") - 1
    return shard_ids


# Packs made once: an epoch's order of the first epoch's packs. counts -> [this] -> block, pack.
#
# The blocks of each canonical node, and the packs of each block, have a new order in each epoch. Both orders follow
# from the seed, the epoch and the numbers of node and block: any pack can be found without the others.

_PACKS, _BLOCKS = 2, 3  # the last words of the streams' keys; 1 is block_seed's
_KEPT_BLOCKS = 64  # orders of packs, of blocks of all canonical nodes


class Turns:
    """The turn of a block is its position in the order of its canonical node's blocks; 0 is read first.

    blocks_of_turns: row of the block at each turn, node after node. Rows count the blocks of all nodes.
    """

    def __init__(self, config: OrderConfig, epoch: int, num_blocks: list[int]):
        self._shuffles = config.shuffle and epoch > 0
        self._key = (config.seed, epoch)
        firsts = np.cumsum([0, *num_blocks])[:-1].tolist()
        orders = [self._permutation(count, node, 0, _BLOCKS) for node, count in enumerate(num_blocks)]
        rows = [order + first for order, first in zip(orders, firsts, strict=True)]
        self.blocks_of_turns: NDArray[np.int64] = np.concatenate(rows) if rows else np.empty(0, np.int64)
        self._orders = orders
        self._kept = lru_cache(_KEPT_BLOCKS)(self._order_of)

    def block(self, node: int, turn: int) -> int:
        """Return the block of a canonical node at a turn."""
        return int(self._orders[node][turn])

    def turn(self, node: int, block: int) -> int:
        """Return the turn of a block of a canonical node."""
        return int(np.flatnonzero(self._orders[node] == block)[0])

    def packs(self, node: int, turn: int, positions: NDArray[np.int64], *, num_packs: int) -> NDArray[np.int64]:
        """Return the numbers in their block of the packs at these positions of a turn. num_packs: of the block."""
        found: NDArray[np.int64] = self._kept(node, turn, num_packs)[positions]
        return found

    def _order_of(self, node: int, turn: int, num_packs: int) -> NDArray[np.int64]:
        return self._permutation(num_packs, node, self.block(node, turn), _PACKS)

    def _permutation(self, size: int, node: int, block: int, stream: int) -> NDArray[np.int64]:
        if not self._shuffles:
            return np.arange(size)
        return np.random.default_rng([*self._key, node + 1, block, stream]).permutation(size)
