"""An epoch of a plan: pack number <-> canonical node, block and position in the block. counts + order -> packs."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..freed_memory import give_back_memory
from .block_packs import BlockPacks, Order, PlanInputs, begun_block, pack_block
from .order import BegunBlock, LeftOfNode, RestOrder, Turns
from .packing import PackRange, Packs, ends_of, runs

_Numbers = NDArray[np.int64]
_NODE_BITS = 40  # bits below a canonical node's number, for the number of a pack


class Amounts(NamedTuple):
    """Amounts of data. samples: samples with at least a piece."""

    samples: int
    tokens: int


class SamplePacks(NamedTuple):
    """Packs and their samples: numbers of packs and sample ids, int64[num_segments] each."""

    packs: NDArray[np.int64]
    sample_ids: NDArray[np.int64]


class _Taken(NamedTuple):
    """Packs of a block: their numbers, the number of segments of each, and PackRange's values of each segment."""

    numbers: _Numbers
    counts: _Numbers
    sample_ids: _Numbers
    lengths: _Numbers
    starts: _Numbers | int
    repeats: _Numbers | None


def _in_order(taken: list[_Taken]) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers | None, _Numbers]:
    """Return sample ids, lengths, starts, repeats and offsets of packs in the order of their numbers, from 0."""
    if len(taken) == 1 and (len(taken[0].numbers) == 1 or (np.diff(taken[0].numbers) > 0).all()):
        only = taken[0]
        starts_of = np.zeros(len(only.lengths), np.int64) + only.starts
        return only.sample_ids, only.lengths, starts_of, only.repeats, ends_of(only.counts)
    counts = np.concatenate([each.counts for each in taken])
    starts = [np.broadcast_to(np.int64(each.starts), len(each.lengths)) for each in taken]
    repeats = [each.repeats for each in taken if each.repeats is not None]  # of all or of none
    numbers = np.concatenate([each.numbers for each in taken])
    at = np.empty_like(numbers)
    at[numbers] = np.arange(len(numbers))
    begins, counts = ends_of(counts)[:-1][at], counts[at]
    segments = runs(begins, counts)
    columns = [each.sample_ids for each in taken], [each.lengths for each in taken], starts
    sample_ids, lengths, starts_of = (np.concatenate(column)[segments] for column in columns)
    repeats_of = np.concatenate(repeats)[segments] if repeats else None
    return sample_ids, lengths, starts_of, repeats_of, ends_of(counts)


class EpochPlan:
    """An epoch of a plan: the map from a pack's number to its node, block and position.

    order, counts, tokens: of the epoch (see block_counts). Blocks are numbered by their turn in this epoch.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        order: Order,
        counts: NDArray[np.int64],
        *,
        epoch: int,
        tokens: NDArray[np.int32] | None = None,
    ):
        self._inputs = inputs
        self._pack_tokens = tokens
        self.order = order
        self._blocks: dict[int, BlockPacks] = {}  # a block per canonical node
        self._has_replayed = False  # after memory was given back
        num_blocks = [self.order.num_blocks(node) for node in range(self.order.num_canonical_nodes)]
        self._turns = None if order.config.reshuffle else Turns(order.config, epoch, num_blocks)
        stored = counts[:, 0]
        if self._turns is not None:
            counts = counts[self._turns.blocks_of_turns]
        self._counts = counts[:, 0]
        self._tokens = counts[:, 1]
        self._overlong = counts[:, 2:]
        self._dropped = counts[:, 2] if inputs.packing.overlong == "drop" else counts[:, 3:].sum(axis=1)
        self._num_blocks = num_blocks
        self.num_packs, self.num_tokens, self.num_overlong = (int(n) for n in counts[:, :3].sum(axis=0))
        self.num_overlong_media = int(counts[:, 3:].sum())
        patches = inputs.index.patches
        self._patches = None if patches is None else np.asarray(patches)  # a plain view: a memmap is slow to index
        ends = np.cumsum(num_blocks)
        self._first_blocks = ends - num_blocks  # of each canonical node, among the blocks of all nodes
        packs_before = np.cumsum(counts[:, 0]) - counts[:, 0]
        nodes = np.repeat(np.arange(len(num_blocks)), num_blocks)
        # Number of packs of the canonical node before each block; with the node's number in front, as a search key.
        self._packs_before_block = packs_before - packs_before[self._first_blocks[nodes]]
        self._block_keys = nodes << _NODE_BITS | self._packs_before_block
        self._first_packs = packs_before[self._first_blocks] if len(counts) else packs_before
        self._interleave([int(counts[end - count : end, 0].sum()) for count, end in zip(num_blocks, ends, strict=True)])
        if self._turns is not None and tokens is not None:
            of_blocks = np.split(tokens, np.cumsum(stored)[:-1])
            turned = [
                of_blocks[block][self._turned(node, row - int(self._first_blocks[node]), np.arange(num_packs))]
                for row, (block, node, num_packs) in enumerate(
                    zip(self._turns.blocks_of_turns.tolist(), nodes.tolist(), self._counts.tolist(), strict=True)
                )
            ]
            self._pack_tokens = np.concatenate(turned)

    def _interleave(self, packs_per_node: list[int]) -> None:
        """Set the phases of the epoch. A round takes a pack of each canonical node with packs left.

        Rounds [r, s) between two successive node sizes have the same nodes, and form a phase: nodes with 5, 2 and 5
        packs give phase 0 (rounds 0-1, nodes 0 1 2) and phase 1 (rounds 2-4, nodes 0 2).
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

    @property
    def has_tokens(self) -> bool:
        return self._pack_tokens is not None

    def tokens(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of packs [first, stop): int64[stop - first]."""
        assert self._pack_tokens is not None
        found = np.empty(stop - first, np.int64)
        ends = [*self._phase_starts[1:].tolist(), self.num_packs]
        for phase, (start, end) in enumerate(zip(self._phase_starts.tolist(), ends, strict=True)):
            if end <= first or start >= stop:
                continue
            nodes, rounds = self._phase_nodes[phase], int(self._phase_rounds[phase])
            for turn, node in enumerate(nodes.tolist()):  # a round takes a pack of each
                begin, last = (max(0, -(-(at - start - turn) // len(nodes))) for at in (first, min(stop, end)))
                before = int(self._first_packs[node]) + rounds
                to = slice(start + turn + begin * len(nodes) - first, min(stop, end) - first, len(nodes))
                found[to] = self._pack_tokens[before + begin : before + last]
        return found

    def _locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the canonical node, block and position in the block of each pack."""
        nodes, positions = self._in_nodes(numbers)
        found = np.searchsorted(self._block_keys, nodes << _NODE_BITS | positions, side="right") - 1
        blocks = np.asarray(found - self._first_blocks[nodes], np.int64)
        return nodes, blocks, positions - self._packs_before_block[found]

    def _in_nodes(self, numbers: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the canonical node of each pack, and the number of earlier packs of its node."""
        bounds = [numbers.min(), numbers.max()]
        first, last = (np.searchsorted(self._phase_starts, bounds, side="right") - 1).tolist()
        if first == last:
            return self._in_phase(first, numbers)
        nodes, positions = np.empty_like(numbers), np.empty_like(numbers)
        phases = np.searchsorted(self._phase_starts, numbers, side="right") - 1
        for phase in range(first, last + 1):
            here = phases == phase
            nodes[here], positions[here] = self._in_phase(phase, numbers[here])
        return nodes, positions

    def _in_phase(self, phase: int, numbers: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the same as _in_nodes, for packs of a phase."""
        rounds, turns = np.divmod(numbers - self._phase_starts[phase], len(self._phase_nodes[phase]))
        return self._phase_nodes[phase][turns], self._phase_rounds[phase] + rounds

    def blocks(self, numbers: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Return the blocks of packs: index into `numbers` of the first pack, canonical node, block.

        numbers: ascending. Of many consecutive packs, only the first pack of each block is looked at.
        """
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        are_consecutive = stop - first == len(numbers)
        if are_consecutive and len(numbers) > len(self._block_keys):
            before, after = (np.repeat(self._taken(each), self._num_blocks) for each in (first, stop))
            begins, all_nodes = self._packs_before_block, self._block_keys >> _NODE_BITS
            rows = np.flatnonzero((begins < after) & (begins + self._counts > before) & (self._counts > 0))
            numbers = np.sort(self._numbers(all_nodes[rows], np.maximum(begins, before)[rows]))
        nodes, blocks, _ = self._locate(numbers)
        firsts = np.sort(np.unique(nodes << _NODE_BITS | blocks, return_index=True)[1])
        at = numbers[firsts] - first if are_consecutive else firsts
        return list(zip(at.tolist(), nodes[firsts].tolist(), blocks[firsts].tolist(), strict=True))

    def canonical_nodes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the canonical nodes of packs: int64, of the same shape; no block is packed."""
        if len(self._num_blocks) == 1:
            return np.zeros(len(numbers), np.int64)
        return self._locate(numbers)[0]

    def packs(self, numbers: NDArray[np.int64]) -> PackRange:
        """Return the packs with these numbers, one or more."""
        nodes, blocks, positions = self._locate(numbers)
        keys = nodes << _NODE_BITS | blocks
        by_block, cuts = np.arange(len(keys)), []
        if keys[0] != keys[-1] or (keys != keys[0]).any():
            by_block = np.argsort(keys, kind="stable")
            cuts = (np.flatnonzero(np.diff(keys[by_block])) + 1).tolist()
        taken: list[_Taken] = []
        for begin, end in pairwise((0, *cuts, len(keys))):
            mine = by_block[begin:end]
            taken += self._take(int(nodes[mine[0]]), int(blocks[mine[0]]), positions[mine], mine)
        if self._has_replayed:
            self._has_replayed = False
            give_back_memory()  # memory taken by packing blocks
        sample_ids, lengths, starts, repeats, offsets = _in_order(taken)
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
            repeats=repeats,
        )

    def _take(self, node: int, block: int, positions: _Numbers, numbers: _Numbers) -> Iterator[_Taken]:
        """Yield the packs at some positions of a block as copies, because the next replay overwrites the block.

        numbers: indices of the packs in the result.
        """
        if self._turns is not None:
            positions = self._turned(node, block, positions)
            order = np.argsort(positions)
            positions, numbers = positions[order], numbers[order]
        while len(numbers):
            packs = self._block(node, block)
            self._has_replayed |= packs.replay_to(int(positions[0]))
            num_here = int(np.searchsorted(positions, packs.stop))
            here = positions[:num_here] - packs.first
            begins, ends = packs.offsets[here], packs.offsets[here + 1]
            segments: slice | _Numbers = slice(int(begins[0]), int(ends[-1]))
            if here[-1] - here[0] != num_here - 1:  # the packs are not consecutive
                segments = runs(begins, ends - begins)
            ids, lengths = packs.sample_ids[segments].copy(), packs.lengths[segments].copy()
            starts, repeats = packs.starts_of(segments), packs.repeats_of(segments)
            yield _Taken(numbers[:num_here], ends - begins, ids, lengths, starts, repeats)
            positions, numbers = positions[num_here:], numbers[num_here:]

    def shards_of_block(self, node: int, block: int) -> NDArray[np.int64]:
        if self._turns is not None and block < self._num_blocks[node]:
            block = self._turns.block(node, block)
        return self.order.shards_of_block(node, block)

    def packs_of(self, sample_id: int) -> NDArray[np.int64]:
        """See PackPlan.packs_of."""
        wanted = np.array([sample_id], np.int64)
        _, nodes, blocks = self.order.occurrences(wanted)
        at = sorted({*zip(nodes.tolist(), blocks.tolist(), strict=True)})
        found = [self._packs_in_block(*each, wanted).packs for each in at if self._counts[self._row(*each)]]
        return np.concatenate([np.empty(0, np.int64), *found])

    def first_packs_of(self, sample_ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """See PackPlan.first_packs_of: a block is packed again after all packs before its first pack were yielded."""
        sample_ids, nodes, blocks = self.order.occurrences(sample_ids)
        waiting: list[tuple[int, int, int, NDArray[np.int64]]] = []  # first pack of a block, the block, its samples
        for node, block in dict.fromkeys(zip(nodes.tolist(), blocks.tolist(), strict=True)):
            row = self._row(node, block)
            if self._counts[row]:
                first = int(self._numbers(np.array([node]), self._packs_before_block[row : row + 1])[0])
                waiting.append((first, node, block, sample_ids[(nodes == node) & (blocks == block)]))
        waiting.sort(key=lambda each: each[0], reverse=True)
        found: list[tuple[int, int]] = []
        while found or waiting:
            while waiting and (not found or waiting[-1][0] < found[0][0]):
                _, node, block, ids = waiting.pop()
                for pair in zip(*(each.tolist() for each in self._packs_in_block(node, block, ids)), strict=True):
                    heapq.heappush(found, pair)
            if found:
                yield heapq.heappop(found)

    def _row(self, node: int, block: int) -> int:
        """Return the row of a block of the order in the counts."""
        turn = block if self._turns is None else self._turns.turn(node, block)
        return int(self._first_blocks[node]) + turn

    def _packs_in_block(self, node: int, block: int, sample_ids: NDArray[np.int64]) -> SamplePacks:
        """Return the packs of samples of a block, by its number in the order: sample by sample, the pieces in turn."""
        ids = self.order.block(node, block)
        packs = pack_block(self._inputs, self.order, node, block)
        segments = np.flatnonzero(np.isin(ids, sample_ids)[packs.order])
        if packs.pieces is None and begun_block(self.order, node, block) is not None:
            segments = segments[np.argsort(packs.order[segments], kind="stable")]
        if packs.pieces is not None:
            segments = segments[np.lexsort((packs.pieces[segments], packs.order[segments]))]
        found = np.searchsorted(packs.offsets, segments, side="right") - 1
        row = self._row(node, block)
        if self._turns is not None:
            turned = self._turned(node, row - int(self._first_blocks[node]), np.arange(len(packs)))
            found = np.argsort(turned)[found]
        numbers = self._numbers(np.full_like(found, node), self._packs_before_block[row] + found)
        return SamplePacks(packs=numbers, sample_ids=ids[packs.order[segments]])

    def amounts(self, num_packs: int) -> Amounts:
        """Return the amounts in the first num_packs packs."""
        found = [self._amounts_of_node(node, count) for node, count in enumerate(self._taken(num_packs).tolist())]
        return Amounts(sum(each.samples for each in found), sum(each.tokens for each in found))

    def _taken(self, num_packs: int) -> NDArray[np.int64]:
        """Return the number of packs of each canonical node among the first num_packs."""
        phase = max(0, int(np.searchsorted(self._phase_starts, num_packs, side="right")) - 1)
        taken = np.zeros(len(self._num_blocks), np.int64)  # packs of each canonical node
        for nodes, rounds in zip(self._phase_nodes[:phase], self._phase_rounds[1:].tolist(), strict=False):
            taken[nodes] = rounds
        if num_packs:
            nodes = self._phase_nodes[phase]
            rounds, rest = divmod(num_packs - int(self._phase_starts[phase]), len(nodes))
            taken[nodes] += rounds
            taken[nodes[:rest]] += 1
        return taken

    def _amounts_of_node(self, node: int, num_packs: int) -> Amounts:
        first = int(self._first_blocks[node])
        rows = slice(first, first + self._num_blocks[node])
        ends = np.cumsum(self._counts[rows])
        whole = int(np.searchsorted(ends, num_packs, side="right"))
        samples = sum(self._samples_of(node, turn) for turn in range(whole)) - int(self._dropped[rows][:whole].sum())
        tokens = int(self._tokens[rows][:whole].sum())
        left = num_packs - (int(ends[whole - 1]) if whole else 0)
        if left:
            positions, lengths = self._begun(node, whole, left)
            samples, tokens = samples + len(np.unique(positions[positions >= 0])), tokens + int(lengths.sum())
        return Amounts(samples, tokens)

    def _samples_of(self, node: int, turn: int) -> int:
        if isinstance(self.order, RestOrder):
            begun = self.order.begun(node, turn)
            return len(self.order.block(node, turn)) if begun is None else int(begun.is_new.sum())
        start, stop = self.order.node_bounds(node)
        block = turn if self._turns is None else self._turns.block(node, turn)
        size = self.order.config.shuffle_block_size
        return min(size, stop - start - block * size)

    def left_after(self, num_packs: int) -> list[LeftOfNode]:
        """Return the rest of each canonical node after the first num_packs packs; only with reshuffle.

        Dropped samples of the last block belong to the rest: the next packing_length may be longer.
        """
        assert self._turns is None
        return [self._left_of_node(node, count) for node, count in enumerate(self._taken(num_packs).tolist())]

    def _left_of_node(self, node: int, num_packs: int) -> LeftOfNode:
        if not num_packs:
            return self.order.lefts[node] if isinstance(self.order, RestOrder) else LeftOfNode(0, None)
        first = int(self._first_blocks[node])
        ends = np.cumsum(self._counts[first : first + self._num_blocks[node]])
        block = int(np.searchsorted(ends, num_packs, side="left"))
        if num_packs == ends[block]:
            return LeftOfNode(block + 1, None)
        ids, packs = self.order.block(node, block), pack_block(self._inputs, self.order, node, block)
        lengths = np.asarray(self._inputs.lengths(self.order, node, block, ids), np.int64)
        before = begun_block(self.order, node, block)
        before = before or BegunBlock(ids, np.zeros_like(ids), lengths, np.ones(len(ids), bool))
        stop = int(packs.offsets[num_packs - (ends[block] - self._counts[first + block])])
        num_taken = np.bincount(packs.order[:stop], minlength=len(ids))
        whole = np.flatnonzero(num_taken == 0)
        rest = stop + np.flatnonzero(num_taken[packs.order[stop:]])  # other pieces of samples that are begun
        at, limit = packs.order[rest].astype(np.int64), self._inputs.packing.packing_length
        shifts = np.zeros_like(at) if packs.pieces is None else packs.pieces[rest].astype(np.int64) * limit
        positions, more = np.concatenate([whole, at]), np.concatenate([np.zeros_like(whole), shifts])
        room = np.concatenate([lengths[whole], np.full(len(at), limit)])
        order = np.lexsort((more, positions))
        positions, more, room = positions[order], more[order], room[order]
        is_new = before.is_new[positions] & (num_taken[positions] == 0)
        starts, lengths = before.starts[positions] + more, np.minimum(lengths[positions] - more, room)
        return LeftOfNode(block, BegunBlock(ids[positions], starts, lengths, is_new))

    def overlong_in(self, num_packs: int) -> tuple[int, int]:
        """Return the number of overlong samples before the rest of left_after, and the number with media."""
        found = np.array([self.num_overlong, self.num_overlong_media])
        for node, left in enumerate(self.left_after(num_packs)):
            rows = slice(
                int(self._first_blocks[node]) + left.first_block, int(self._first_blocks[node]) + self._num_blocks[node]
            )
            of_rows = self._overlong[rows][left.begun is not None :].sum(axis=0)
            found[: len(of_rows)] -= of_rows
            if left.begun is not None:
                is_over = left.begun.is_new & (left.begun.lengths > self._inputs.packing.packing_length)
                patches = self._inputs.patches(left.begun.sample_ids[is_over])
                found -= is_over.sum(), 0 if patches is None else np.count_nonzero(patches)
        return int(found[0]), int(found[1])

    def _begun(self, node: int, turn: int, num_packs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sample's position in the block, and the tokens, of each segment in the first packs of a block.

        The position is -1 for a sample with a piece before a change of packing_length.
        """
        block = turn if self._turns is None else self._turns.block(node, turn)
        ids = self.order.block(node, block)
        lengths = np.asarray(self._inputs.lengths(self.order, node, block, ids), dtype=np.int64)
        begun = begun_block(self.order, node, block)
        packs = pack_block(self._inputs, self.order, node, block)
        numbers = np.arange(num_packs)
        if self._turns is not None:
            numbers = self._turned(node, turn, numbers)
        segments = runs(packs.offsets[numbers], np.diff(packs.offsets)[numbers])
        chosen, limit = packs.order[segments], self._inputs.packing.packing_length
        starts = 0 if packs.pieces is None else packs.pieces[segments].astype(np.int64) * limit
        tokens, positions = lengths[chosen] - starts, chosen.astype(np.int64)
        if begun is not None:
            positions = np.where(begun.is_new[chosen], positions, -1)
        is_kept = self._inputs.packing.overlong == "keep"
        return positions, tokens if is_kept else np.minimum(tokens, limit)

    def _numbers(self, nodes: _Numbers, rounds: _Numbers) -> _Numbers:
        """Return the numbers of packs of canonical nodes. rounds: position in the node; each round takes one pack."""
        numbers = np.empty_like(rounds)
        phases = np.searchsorted(self._phase_rounds, rounds, side="right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            turns = np.searchsorted(self._phase_nodes[phase], nodes[here])
            in_phase = rounds[here] - self._phase_rounds[phase]
            numbers[here] = self._phase_starts[phase] + in_phase * len(self._phase_nodes[phase]) + turns
        return numbers

    def _turned(self, node: int, block: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self._turns is not None
        num_packs = int(self._counts[self._first_blocks[node] + block])
        return self._turns.packs(node, block, positions, num_packs=num_packs)

    def forget_blocks(self) -> None:
        """Drop the replayed blocks; keep their counts."""
        self._blocks.clear()

    def _block(self, node: int, block: int) -> BlockPacks:
        """Return the packs of a block; keep the last block of each canonical node, because packs are read in order."""
        if self._turns is not None:
            block = self._turns.block(node, block)
        kept = self._blocks.get(node)
        if kept is None or kept.block != block:
            self._blocks.pop(node, None)
            kept = self._blocks[node] = BlockPacks(self._inputs, self.order, node, block, before=kept)
        return kept


# Numbers of packs of an epoch's shuffle blocks. lengths + order + packing -> counts.
#
# Counting packs every block once. Counts are therefore cached; a single process counts for all sharers of the cache.

CountsCache = MutableMapping[str, NDArray[Any]]
Counts = tuple[NDArray[np.int64], NDArray[np.int32] | None]  # of blocks, and tokens of each pack
TOKENS = "-tokens"  # ends the key of the packs' tokens, beside the counts
Counting = Callable[[str], AbstractContextManager[object]]


def block_counts(
    inputs: PlanInputs,
    order: Order,
    key: str,
    *,
    counts_cache: CountsCache,
    counting: Counting,
    num_threads: int | None = None,
    with_tokens: bool = False,
) -> Counts:
    """Return cached or new packs, tokens and overlong samples of each block of an epoch: int64[num_blocks, 3].

    With media a fourth column counts the overlong samples with media. with_tokens: also return the tokens of each pack,
    block after block. num_threads: counting threads (default: one per core).
    """
    num_blocks = sum(order.num_blocks(node) for node in range(order.num_canonical_nodes))
    shape = num_blocks, 3 + (inputs.index.patches is not None)

    def cached() -> Counts | None:
        counts, tokens = counts_cache.get(key), counts_cache.get(key + TOKENS) if with_tokens else None
        if counts is None or counts.shape != shape:
            return None
        if with_tokens and (tokens is None or tokens.shape != (counts[:, 0].sum(),)):  # counted without tokens
            return None
        return counts, tokens

    if (found := cached()) is not None:
        return found
    with counting(key):
        found = cached()  # another process may have counted meanwhile
        if found is None:
            found = count_blocks(inputs, order, num_threads=num_threads, with_tokens=with_tokens)
            if found[1] is not None:
                counts_cache[key + TOKENS] = found[1]
            counts_cache[key] = found[0]
    return found


def count_block(inputs: PlanInputs, order: Order, node: int, block: int) -> tuple[int, int, int, int]:
    """Return the packs, tokens, overlong samples, and overlong samples with media of a block."""
    return _counts_of(pack_block(inputs, order, node, block))


def _counts_of(packs: Packs) -> tuple[int, int, int, int]:
    return len(packs), packs.num_tokens, packs.num_overlong, packs.num_overlong_media


def count_blocks(inputs: PlanInputs, order: Order, *, num_threads: int | None, with_tokens: bool = False) -> Counts:
    """Count now, with the result of block_counts."""
    blocks = [(node, block) for node in range(order.num_canonical_nodes) for block in range(order.num_blocks(node))]
    if not with_tokens:
        inputs = replace(inputs, packing=inputs.packing.counted)

    def count(node_and_block: tuple[int, int]) -> tuple[tuple[int, int, int, int], NDArray[np.int32] | None]:
        packs = pack_block(inputs, order, *node_and_block)
        return _counts_of(packs), packs.tokens if with_tokens else None

    if num_threads == 1:  # in this thread: threads of a pool would keep the process from ending
        counted = [count(each) for each in blocks]
    else:
        with ThreadPoolExecutor(max_workers=num_threads or len(os.sched_getaffinity(0))) as pool:
            counted = list(pool.map(count, blocks))
    give_back_memory()
    num_columns = 3 + (inputs.index.patches is not None)
    counts = np.array([of_block for of_block, _ in counted], dtype=np.int64).reshape(-1, 4)[:, :num_columns]
    tokens = [of_packs for _, of_packs in counted if of_packs is not None]
    return counts, np.concatenate([np.empty(0, np.int32), *tokens]) if with_tokens else None
