"""The order of samples over one or several streams. shard sizes + counts -> [sample order] -> sample ids.

Integer arithmetic only: O(shards) at a start, O(block) for a range of positions, nothing of the size of an epoch.

A stream is an endless sequence of passes over its samples; pass p is its EpochOrder of epoch p. A pass deals its
samples round-robin over the C canonical nodes of the order (sections of the ordered shards); nodes with one more sample
take the last, short round. Epoch e takes samples [e * count, (e + 1) * count) of this sequence: each sample comes once
before any sample comes again, whatever the count, and a canonical node always reads its own sections, pass after pass.

A canonical node interleaves its samples of the streams: with c samples of a stream, sample j is due at the fraction
(2j + 1) / (2c) of the epoch, rounded down to 1/64 of one of the node's samples; ties go to the earlier stream. This
holds for C = 1. Canonical nodes have the phases 1/2C, 3/2C, … instead of 1/2, and stream k of S begins k * C // S nodes
later: otherwise all nodes would read the same stream at once.

The epoch takes a sample of each canonical node in turn: position p is of node p % C; after a node ends, the others
continue. A single whole stream is its EpochOrder, read round-robin over canonical nodes.

Packs of several streams (see PackPlan) are made of a canonical node's samples, a block of successive samples at a time.

Readers of unpacked samples (a loader worker of a group of ranks) share the order in global batches of
num_groups * batch_size positions. Only a position is saved, and any other world continues from this position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError
from .order import OrderConfig, StreamPasses, default_canonical_nodes, in_stored_order

Ids = NDArray[np.int64]

MIN_CHUNK = 1 << 16  # positions of the order to compute at a time
MAX_CHUNK = 1 << 20  # bounds the products in _interleave: 2 * 64 * MAX_CHUNK * samples < 2**63
MIN_CHUNK_OF_READER = 1 << 12  # positions per reader: many readers would otherwise make chunks of a few samples
TICKS = 64  # per sample of a canonical node
STREAM_SEED_STEP = 0x9E3779B9  # odd: 2**32 streams have different seeds; 2**32 / golden ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A loader worker of a group of ranks, and its world.

    batch_size: samples per batch of a group. num_nodes: machines; groups of a machine are consecutive.
    """

    batch_size: int
    num_groups: int = 1
    group: int = 0
    num_workers: int = 1
    worker: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")


def positions_read(first: int, stop: int, *, reader: Reader, num_canonical_nodes: int) -> Iterator[Ids]:
    """Yield a reader's positions in [first, stop) of the order: int64 arrays of some of its batches, ascending.

    Batch b of a group is its share of the G = num_groups * batch_size positions from first + b * G on, read by worker
    b % num_workers. After n batches of every group, n * G positions have been read. Shares are runs of consecutive
    positions; if num_nodes divides num_groups and num_canonical_nodes, and num_canonical_nodes divides G, shares are
    runs of the positions p whose canonical node, p % C, is served by the group's machine. The shares of a last, short
    global batch differ by one at most, and may be empty.
    """
    batch = reader.num_groups * reader.batch_size
    num_full, short = divmod(stop - first, batch)
    offsets = _share_of(first, batch, reader=reader, num_canonical_nodes=num_canonical_nodes)
    chunk = min(max(MIN_CHUNK, MIN_CHUNK_OF_READER * reader.num_groups * reader.num_workers), MAX_CHUNK)
    stride = reader.num_workers * max(1, chunk // (batch * reader.num_workers))
    for begin in range(reader.worker, num_full, stride):
        batches = np.arange(begin, min(begin + stride, num_full), reader.num_workers, dtype=np.int64)
        yield (first + batches[:, None] * batch + offsets).ravel()
    if num_full % reader.num_workers == reader.worker:
        start = first + num_full * batch
        share = start + _share_of(start, short, reader=reader, num_canonical_nodes=num_canonical_nodes)
        if len(share):
            yield share


def _share_of(start: int, count: int, *, reader: Reader, num_canonical_nodes: int) -> Ids:
    """Return a group's share of the positions [start, start + count), counted from start."""
    first, stop = count * reader.group // reader.num_groups, count * (reader.group + 1) // reader.num_groups
    nodes, batch = reader.num_nodes, reader.num_groups * reader.batch_size
    fits = reader.num_groups % nodes == num_canonical_nodes % nodes == batch % num_canonical_nodes == 0
    if nodes == 1 or not fits:
        return np.arange(first, stop, dtype=np.int64)
    canonical_nodes = (start + np.arange(count, dtype=np.int64)) % num_canonical_nodes
    by_node = np.argsort(canonical_nodes * nodes // num_canonical_nodes, kind="stable")
    return np.sort(by_node[first:stop])


class Streams(NamedTuple):
    """Streams of a plan, in turn: their names and numbers of shards, and the samples of each in an epoch."""

    names: tuple[str, ...]
    num_shards: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def first_shards(self) -> NDArray[np.int64]:
        """First shard of each stream, and the number of all shards: int64[num_streams + 1]."""
        return np.cumsum([0, *self.num_shards])


class SampleOrder:
    """The order of an epoch; sample ids count through the streams in turn.

    samples_per_shard: an array per stream, in stored order. counts: samples of each stream in an epoch.
    num_canonical_nodes depends only on the config and the stored samples, not on counts or world. Memory: 4 bytes per
    sample of a shuffle block, for each stream and canonical node that was read.
    """

    def __init__(self, samples_per_shard: Sequence[Ids], *, counts: Sequence[int], config: OrderConfig, epoch: int):
        sizes = [int(shards.sum()) for shards in samples_per_shard]
        config = in_stored_order(config)
        self.config, self.epoch = config, epoch
        self.num_samples = sum(counts)
        self._first_shards = np.cumsum([0, *map(len, samples_per_shard)])
        self.num_canonical_nodes = config.num_canonical_nodes or default_canonical_nodes(sum(sizes))
        self._passes = []
        for stream, shards in enumerate(samples_per_shard):
            seed = (config.seed + stream * STREAM_SEED_STEP) % (1 << 32)
            own = dataclasses.replace(config, seed=seed, num_canonical_nodes=self.num_canonical_nodes)
            self._passes.append(StreamPasses(shards, config=own, first_id=sum(sizes[:stream])))
        paired = list(zip(self._passes, counts, strict=True))
        self._first_passes = [epoch * count // max(1, size) for count, size in zip(counts, sizes, strict=True)]
        last_passes = [((epoch + 1) * count - 1) // max(1, size) for count, size in zip(counts, sizes, strict=True)]
        self._has_repeats = any(last > first for first, last in zip(self._first_passes, last_passes, strict=True))
        starts = np.stack([passes.dealt(epoch * count) for passes, count in paired])
        taken = np.stack([passes.dealt((epoch + 1) * count) for passes, count in paired]) - starts
        self._starts: list[list[int]] = starts.tolist()  # [stream][canonical node], indices into the node's passes
        self._counts: list[list[int]] = taken.tolist()
        self._samples_of_node: list[int] = taken.sum(axis=0).tolist()
        self._set_rounds()

    def ids(self, first: int, stop: int) -> Ids:
        """Return the sample ids at positions [first, stop): int64. CursorError for positions outside the epoch."""
        self._check(first, stop)
        bounds = [first, *range(first + MAX_CHUNK, stop, MAX_CHUNK), stop]
        return np.concatenate([self._ids_at(np.arange(a, b, dtype=np.int64)) for a, b in pairwise(bounds)])

    def share(self, first: int, *, reader: Reader) -> Iterator[Ids]:
        """Return a reader's sample ids from a position on, some batches at a time: the arrays of positions_read.

        All groups of ranks read equally many: if num_groups does not divide the epoch, some groups read its last
        positions again. Reader(batch_size=1) reads the whole epoch. CursorError for a position outside the epoch.
        """
        self._check(first, self.num_samples)
        stop = first + -(-(self.num_samples - first) // reader.num_groups) * reader.num_groups
        positions = positions_read(first, stop, reader=reader, num_canonical_nodes=self.num_canonical_nodes)
        return (self._ids_or_again(each, reader.num_groups) for each in positions)

    # Blocks of a canonical node's samples, for packs: see EpochOrder

    def node_bounds(self, node: int) -> tuple[int, int]:
        """Return the first and one-past-last position of a canonical node, with the nodes laid end to end."""
        first = sum(self._samples_of_node[:node])
        return first, first + self._samples_of_node[node]

    def num_blocks(self, node: int) -> int:
        return -(-self._samples_of_node[node] // self.config.shuffle_block_size)

    def block(self, node: int, block: int) -> Ids:
        """Return the sample ids of a block of a canonical node, in the order of the node: int64[up to block size]."""
        return self._of_block(node, block, self._ids_of_node)

    def repeats(self, node: int, block: int) -> Ids | None:
        """Return how often each sample of a block came earlier in the epoch: int64, as in block. None: no repeats.

        Passes count, not positions: of two samples of a pass none is earlier.
        """
        return self._of_block(node, block, self._repeats_of_node) if self._has_repeats else None

    def _of_block(self, node: int, block: int, values_of: Callable[[int, Ids], Ids]) -> Ids:
        first, stop = self._bounds_of_block(node, block)
        cuts = [*range(first, stop, MAX_CHUNK), stop]
        return np.concatenate([values_of(node, np.arange(a, b, dtype=np.int64)) for a, b in pairwise(cuts)])

    def shards_of_block(self, node: int, block: int, num_blocks: int = 1) -> Ids:
        """Return the shards of the shuffle blocks of passes with samples of a block; empty beyond the last block.

        The streams take turns, each in laid-out order. num_blocks: consecutive blocks to take together.
        """
        first, stop = self._bounds_of_block(node, block)[0], self._bounds_of_block(node, block + num_blocks - 1)[1]
        found, turns = [np.empty(0, np.int64)], [np.empty(0)]
        for stream in range(len(self._counts)) if first < stop else ():
            begin, end = np.add(self._candidates(node, stream, first, stop), self._starts[stream][node]).tolist()
            found.append(self._passes[stream].shards(node, begin, end) + self._first_shards[stream])
            turns.append(np.linspace(0, 1, len(found[-1])))
        return np.concatenate(found)[np.argsort(np.concatenate(turns), kind="stable")]

    def occurrences(self, sample_ids: Ids) -> tuple[Ids, Ids, Ids]:
        """Return sample id, canonical node and block of each occurrence of some samples in the epoch, in no order."""
        size = self.config.shuffle_block_size
        found = [
            (sample_id, node, self._position(node, stream, index - self._starts[stream][node]) // size)
            for stream, passes in enumerate(self._passes)
            for node, sample_id, index in passes.places(sample_ids, self._starts[stream], self._counts[stream])
        ]
        ids, nodes, blocks = np.array(found, np.int64).reshape(-1, 3).T
        return ids, nodes, blocks

    def _bounds_of_block(self, node: int, block: int) -> tuple[int, int]:
        size, total = self.config.shuffle_block_size, self._samples_of_node[node]
        return min(block * size, total), min((block + 1) * size, total)

    def _position(self, node: int, stream: int, number: int) -> int:
        """Return the index of sample `number` of a stream in a canonical node's sequence; see _interleave."""
        rounds, total = 2 * self.num_canonical_nodes, self._samples_of_node[node] * TICKS
        own = rounds * number + self._phase(node, stream)
        tick = own * total // (rounds * self._counts[stream][node])
        position = number
        for other, counts in enumerate(self._counts):
            if other != stream and counts[node]:
                until = (tick + (other < stream)) * rounds * counts[node] - self._phase(node, other) * total
                position += min(max(-(-until // (rounds * total)), 0), counts[node])
        return position

    def _ids_or_again(self, positions: Ids, num_groups: int) -> Ids:
        """Return the sample ids at ascending positions; fewer than num_groups may be after the epoch's end."""
        inside, beyond = positions[positions < self.num_samples], positions[positions >= self.num_samples]
        again = [self._ids_at(position) for position in (beyond - num_groups).clip(0)[:, None]]
        return np.concatenate([self._ids_at(inside), *again])

    def _check(self, first: int, stop: int) -> None:
        if not 0 <= first <= stop <= self.num_samples:
            raise CursorError(
                f"positions [{first}, {stop}) requested from an epoch of {self.num_samples} samples: restore its "
                "streams and shares"
            )

    def _set_rounds(self) -> None:
        """Set the phases of the epoch. A round takes a sample of each canonical node with samples left.

        Rounds between two successive sizes of nodes have the same nodes, and form a phase: nodes of 5, 2 and 5 samples
        give (position 0, round 0, nodes 0 1 2) and (position 6, round 2, nodes 0 2).
        """
        self._phases: list[tuple[int, int, list[int]]] = []
        position = 0
        for previous, size in pairwise(sorted({0, *self._samples_of_node})):
            nodes = [node for node, count in enumerate(self._samples_of_node) if count >= size]
            self._phases.append((position, previous, nodes))
            position += (size - previous) * len(nodes)
        self._phase_starts = np.array([start for start, _, _ in self._phases] + [position], np.int64)

    def _ids_at(self, positions: Ids) -> Ids:
        """Return the sample ids at ascending positions."""
        ids = np.empty_like(positions)
        cuts = np.searchsorted(positions, self._phase_starts).tolist()
        for (start, rounds_before, nodes), (begin, end) in zip(self._phases, pairwise(cuts), strict=True):
            rounds = (positions[begin:end] - start) // len(nodes)
            turns = positions[begin:end] - start - rounds * len(nodes)
            for turn, node in enumerate(nodes):
                mine = np.flatnonzero(turns == turn)
                if len(mine):
                    ids[begin + mine] = self._ids_of_node(node, rounds_before + rounds[mine])
        return ids

    def _ids_of_node(self, node: int, indices: Ids) -> Ids:
        """Return the sample ids at ascending indices into a canonical node's sequence."""
        ids = np.empty_like(indices)
        for stream, mine, own in self._places_of_node(node, indices):
            ids[mine] = self._passes[stream].ids(node, own)
        return ids

    def _repeats_of_node(self, node: int, indices: Ids) -> Ids:
        """Return the repeats at ascending indices into a canonical node's sequence; see repeats."""
        repeats = np.empty_like(indices)
        for stream, mine, own in self._places_of_node(node, indices):
            first, starts = self._first_passes[stream], self._starts[stream]
            repeats[mine] = self._passes[stream].repeats(node, own, first=first, starts=starts)
        return repeats

    def _places_of_node(self, node: int, indices: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield each stream, its positions in `indices`, and its indices into the node's passes.

        indices: into a canonical node's sequence, ascending.
        """
        streams = [stream for stream, counts in enumerate(self._counts) if counts[node]]
        if len(streams) == 1:
            yield streams[0], np.arange(len(indices)), indices + self._starts[streams[0]][node]
            return
        first = int(indices[0])
        owners, numbers = (
            each[indices - first] for each in self._interleave(node, streams, first, int(indices[-1]) + 1)
        )
        by_owner = np.argsort(owners, kind="stable")
        cuts = np.searchsorted(owners[by_owner], np.array([*streams, len(self._counts)])).tolist()
        for stream, (begin, end) in zip(streams, pairwise(cuts), strict=True):
            mine = by_owner[begin:end]
            yield stream, mine, np.asarray(numbers[mine], np.int64) + self._starts[stream][node]

    def _interleave(self, node: int, streams: list[int], first: int, stop: int) -> tuple[NDArray[np.uint16], Ids]:
        """Return stream and number in the stream, among the node's samples, for the node's indices [first, stop).

        With S streams, a stream is fewer than S samples ahead of or behind its share of any prefix (the sum of S
        phases): candidates for [first, stop) are found without earlier samples, and sorted by their due times.
        """
        nodes, total = self.num_canonical_nodes, self._samples_of_node[node]
        ticks, owners, numbers = [], [], []
        for stream in streams:
            count = self._counts[stream][node]
            begin, end = self._candidates(node, stream, first, stop)
            start = (
                2 * nodes * begin + self._phase(node, stream)
            ) * total * TICKS - 2 * nodes * count * first * TICKS  # 0 at `first`
            steps = 2 * nodes * total * TICKS * np.arange(end - begin, dtype=np.int64)
            ticks.append((start + steps) // (2 * nodes * count))
            owners.append(np.full(end - begin, stream, np.uint16))
            numbers.append(np.arange(begin, end, dtype=np.int64))
        before = sum(int(own[0]) for own in numbers)  # number of samples before the candidates
        due = np.argsort(np.concatenate(ticks), kind="stable")[first - before : stop - before]
        return np.concatenate(owners)[due], np.concatenate(numbers)[due]

    def _phase(self, node: int, stream: int) -> int:
        """Return the phase of a stream in a canonical node, in units of a sample / 2C."""
        nodes = self.num_canonical_nodes
        return 2 * ((node + stream * nodes // len(self._counts)) % nodes) + 1

    def _candidates(self, node: int, stream: int, first: int, stop: int) -> tuple[int, int]:
        """Return bounds of a stream's samples, among the node's, that may have the node's indices [first, stop)."""
        count, total = self._counts[stream][node], self._samples_of_node[node]
        slack = sum(1 for counts in self._counts if counts[node])
        return max(0, first * count // total - slack), min(count, -(-stop * count // total) + slack)


# Number of samples of each stream in an epoch; MosaicML Streaming's rules, in exact arithmetic.


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShare:
    """Share of a stream in an epoch, by at most one of three settings; default: each sample once.

    proportion: relative to the other streams. repeat: multiple of its size. choose: number of samples.
    """

    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None

    def __post_init__(self) -> None:
        settings = ("proportion", "repeat", "choose")
        given = {name: value for name in settings if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            listed = " and ".join(f"{name} {value}" for name, value in given.items())
            raise ConfigError(f"a stream takes one of proportion, repeat and choose, got {listed}: keep one")
        for name, value in given.items():
            if not 0 <= value < math.inf or (name == "choose" and value % 1):
                kind = "whole" if name == "choose" else "finite"
                raise ConfigError(f"{name} must be a {kind} number that is 0 or more, got {value}")


def samples_chosen(sizes: Sequence[int], shares: Sequence[StreamShare], *, epoch_size: int | None = None) -> list[int]:
    """Return the number of samples of each stream in an epoch.

    sizes: samples of each stream. The rules are from streaming.Stream, in exact decimal arithmetic: repeat * size is
    rounded down; proportions (with only epoch_size: sizes) share out epoch_size, or the number of stored samples, and
    samples left by rounding down go to the largest remainders, ties to the earlier stream. Raises ConfigError.

    >>> samples_chosen([100, 7], [StreamShare(repeat=0.29), StreamShare()])
    [29, 7]
    >>> samples_chosen([100, 7], [StreamShare(proportion=2), StreamShare(proportion=1)], epoch_size=50)
    [33, 17]
    """
    if epoch_size is not None and (epoch_size < 1 or epoch_size % 1):
        raise ConfigError(f"epoch_size must be a whole number of samples, at least 1, got {epoch_size}")
    proportions = [_exact(share.proportion) for share in shares if share.proportion is not None]
    if proportions and len(proportions) < len(shares):
        without = next(stream for stream, share in enumerate(shares) if share.proportion is None)
        raise ConfigError(
            f"stream {without} has no proportion, and other streams have: set it for every stream, or for none"
        )
    if proportions and not any(proportions):
        raise ConfigError("the proportions are all 0: nothing would be read; raise one")
    fixed = [stream for stream, share in enumerate(shares) if (share.repeat, share.choose) != (None, None)]
    if epoch_size is not None and fixed:
        raise ConfigError(f"epoch_size {epoch_size} contradicts repeat or choose of stream {fixed[0]}: leave one out")
    if proportions or (epoch_size is not None and any(sizes)):
        total = sum(sizes) if epoch_size is None else int(epoch_size)
        chosen = _share_out(total, proportions or [Fraction(size) for size in sizes])
    else:
        chosen = [
            math.floor(_exact(share.repeat) * size) if share.choose is None else int(share.choose)
            for size, share in zip(sizes, shares, strict=True)
        ]
    for stream, (size, count) in enumerate(zip(sizes, chosen, strict=True)):
        if count and not size:
            raise ConfigError(f"stream {stream} holds no samples and cannot give {count} an epoch: leave it out")
    if not any(chosen):
        raise ConfigError("an epoch takes no sample of any stream: raise repeat, choose or epoch_size, or add samples")
    return chosen


def _exact(value: float | None) -> Fraction:
    """Return the number as written (0.1 is a tenth, not the nearest binary fraction); 1 for None."""
    return Fraction(1) if value is None else Fraction(repr(float(value)))


def _share_out(total: int, weights: Sequence[Fraction]) -> list[int]:
    of_all = sum(weights)
    exact = [total * weight / of_all for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda stream: counts[stream] - exact[stream])
    for stream in by_remainder[: total - sum(counts)]:
        counts[stream] += 1
    return counts
