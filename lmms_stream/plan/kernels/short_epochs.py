"""Compiled loops that pack many short epochs at once: order, packing and interleaving, as for one long epoch.

In Python an epoch of a few samples would take far longer; the loops take a few microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import cython
import numpy as np
from numpy.typing import NDArray

from .best_fit import Packer

PACKED, PACKS, BLOCKS = 1, 2, 3  # the last words of the streams' keys (see packing.block_seed and order.Turns)

_Numbers = NDArray[np.int64]
_Words = NDArray[np.uint64]


class SourceFacts(NamedTuple):
    """Inputs of a source's epochs; see OrderConfig and EpochOrder.

    sizes, first_ids: int64[num_shards], samples of each shard, and the id of its first sample. lengths:
    int32[num_samples]. num_pieces: int32[num_samples], number of segments of each sample, 0 for a dropped sample.
    """

    seed: int
    shuffles: bool
    reshuffles: bool
    num_nodes: int
    block_size: int
    sizes: _Numbers
    first_ids: _Numbers
    lengths: NDArray[np.int32]
    num_pieces: NDArray[np.int32]


class Rules(NamedTuple):
    """Settings of packing; see best_fit. keeps: whether samples longer than the limit are kept whole."""

    strategy: type[Packer]
    limit: int
    max_samples: int
    window: int
    filler_share: float
    keeps: bool


class Segments(NamedTuple):
    """Segments of a block, or of an epoch: int32[num_segments] each, as in PackRange."""

    sample_ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]


class EpochPacks(NamedTuple):
    """Packs of consecutive epochs; offsets[p]: the first segment of pack p.

    nodes, turns: int32[num_packs], canonical node of each pack, and turn of the pack's block in this node. first_packs:
    int64[num_epochs + 1], the first pack of each epoch.
    """

    segments: Segments
    offsets: _Numbers
    nodes: NDArray[np.int32]
    turns: NDArray[np.int32]
    first_packs: _Numbers


class EpochPacker:
    """Facts, rules and scratch of a call of pack_epochs, and the found packs: fields of EpochPacks.

    ids: samples of an epoch in order. cut: segments of a block. packed, ends, of_turns: segments, ends and turns of the
    packs of an epoch, node after node. node_firsts: int64[num_nodes + 1], the first pack of each node.
    """

    def __init__(self, facts: SourceFacts, rules: Rules, num_segments: int, num_epochs: int):
        self.seed, self.shuffles, self.reshuffles = facts.seed, facts.shuffles, facts.reshuffles
        self.num_nodes, self.block_size, self.keeps = facts.num_nodes, facts.block_size, rules.keeps
        self.sizes, self.first_ids = facts.sizes, facts.first_ids
        self.sample_lengths, self.num_pieces = facts.lengths, facts.num_pieces
        self.packer = rules.strategy(rules.limit, rules.max_samples, num_segments, rules.window, 0, rules.filler_share)
        most = num_epochs * num_segments
        self.ids = np.empty(len(facts.lengths), np.int64)
        self.numbers = np.empty(max(len(facts.lengths), num_segments, len(facts.sizes)), np.int64)
        self.block_numbers = np.empty(max(len(facts.lengths), num_segments), np.int64)
        self.state, self.entropy = np.empty(STATE_WORDS, np.uint64), np.empty(6, np.uint64)
        self.block_word = np.empty(1, np.uint64)
        self.cut, self.packed = np.empty((3, num_segments), np.int32), np.empty((3, num_segments), np.int32)
        self.ends, self.of_turns = np.empty(num_segments, np.int64), np.empty(num_segments, np.int32)
        self.node_firsts = np.zeros(facts.num_nodes + 1, np.int64)
        self.arrays = np.empty((3, most), np.int32), np.zeros(most + 1, np.int64), *np.empty((2, most), np.int32)
        self.segments, self.offsets, self.nodes, self.turns = self.arrays

    def permute(self, numbers: _Numbers, size: int, is_shuffled: bool, num_words: int) -> None:
        """Write a permutation of 0 to size - 1, by the first words of the key."""
        for at in range(size):
            numbers[at] = at
        if is_shuffled and size > 1:
            begin_stream(self.entropy[:num_words], self.state)
            shuffle(self.state, numbers[:size])

    def set_key(self, epoch: int, node: int, block: int, stream: int) -> int:
        """Write the words of the key of a block's stream, as in SeedSequence, and return their number.

        An epoch from 2**32 on takes two words.
        """
        words = self.entropy
        words[0], words[1], words[2] = self.seed, epoch & LOW, epoch >> 32
        at = 3 if words[2] else 2
        words[at], words[at + 1], words[at + 2] = node + 1, block, stream
        return at + 3

    def lay_out(self, epoch: int) -> None:
        """Write the ids of an epoch's samples, shard after shard."""
        num_shards, at = len(self.sizes), 0
        self.permute(self.numbers, num_shards, self.shuffles, self.set_key(epoch, 0, 0, 0) - 3)
        for number in range(num_shards):
            shard = self.numbers[number]
            for index in range(self.sizes[shard]):
                self.ids[at] = self.first_ids[shard] + index
                at += 1

    def cut_block(self, start: int, stop: int) -> int:
        """Write the segments of samples; return the number of segments."""
        count, limit = 0, self.packer.limit
        for at in range(start, stop):
            sample = self.ids[at]
            for piece in range(self.num_pieces[sample]):
                self.cut[0, count], self.cut[1, count] = sample, piece * limit
                self.cut[2, count] = min(self.sample_lengths[sample] - piece * limit, limit)
                count += 1
        return count

    def pack_node(self, epoch: int, node: int, num_packs: int) -> int:
        """Append the packs of a canonical node to the packs of the nodes before; return the new number of packs."""
        packed_epoch, num_ids = epoch if self.reshuffles else 0, len(self.ids)
        turns_again = cython.declare(cython.bint, self.shuffles and epoch != packed_epoch)  # packs in a new order
        begin, end = num_ids * node // self.num_nodes, num_ids * (node + 1) // self.num_nodes
        num_blocks = (end - begin + self.block_size - 1) // self.block_size
        self.permute(self.block_numbers, num_blocks, turns_again, self.set_key(epoch, node, 0, BLOCKS))
        write = self.ends[num_packs - 1] if num_packs else 0
        for turn in range(num_blocks):
            block = self.block_numbers[turn]
            start = begin + block * self.block_size
            stop = min(end, start + self.block_size)
            num_words = self.set_key(packed_epoch, node, block, PACKED)
            seeded_words(self.entropy[:num_words], self.block_word)
            if self.shuffles:
                begin_stream(self.entropy[: num_words - 1], self.state)  # without `stream`
                shuffle(self.state, self.ids[start:stop])
            num_cut = self.cut_block(start, stop)
            num_found = self.packer.pack(self.cut[2, :num_cut], self.block_word[0])
            self.permute(self.numbers, num_found, turns_again, self.set_key(epoch, node, block, PACKS))
            for number in range(num_found):
                pack = self.numbers[number]
                for slot in range(self.packer.offsets[pack], self.packer.offsets[pack + 1]):
                    at = self.packer.order[slot]
                    self.packed[0, write], self.packed[1, write] = self.cut[0, at], self.cut[1, at]
                    self.packed[2, write] = self.sample_lengths[self.cut[0, at]] if self.keeps else self.cut[2, at]
                    write += 1
                self.ends[num_packs], self.of_turns[num_packs] = write, turn
                num_packs += 1
        return num_packs

    def interleave(self, num_packs: int) -> int:
        """Append the packs of an epoch; return the new number of packs. A round takes a pack of each node with packs
        left.
        """
        most, write = 0, self.offsets[num_packs]
        for node in range(self.num_nodes):
            most = max(most, self.node_firsts[node + 1] - self.node_firsts[node])
        for turn in range(most):
            for node in range(self.num_nodes):
                pack = self.node_firsts[node] + turn
                if pack >= self.node_firsts[node + 1]:
                    continue
                for at in range(self.ends[pack - 1] if pack else 0, self.ends[pack]):
                    for row in range(3):
                        self.segments[row, write] = self.packed[row, at]
                    write += 1
                self.nodes[num_packs], self.turns[num_packs] = node, self.of_turns[pack]
                num_packs += 1
                self.offsets[num_packs] = write
        return num_packs

    def pack_epoch(self, epoch: int, num_packs: int) -> int:
        """Append the packs of an epoch; return the new number of packs."""
        self.lay_out(epoch if self.reshuffles else 0)
        of_epoch = 0
        for node in range(self.num_nodes):
            of_epoch = self.pack_node(epoch, node, of_epoch)
            self.node_firsts[node + 1] = of_epoch
        return self.interleave(num_packs)


def pack_epochs(facts: SourceFacts, rules: Rules, first: int, count: int) -> EpochPacks:
    """Return the packs of the epochs [first, first + count), in the order of their numbers."""
    epochs = EpochPacker(facts, rules, int(facts.num_pieces.sum()), count)
    first_packs = np.zeros(count + 1, np.int64)
    num_packs = 0
    for number in range(count):
        with cython.nogil:
            num_packs = epochs.pack_epoch(first + number, num_packs)
        first_packs[number + 1] = num_packs
    segments, offsets, nodes, turns = epochs.arrays
    return EpochPacks(Segments(*segments), offsets[: num_packs + 1], nodes[:num_packs], turns[:num_packs], first_packs)


# NumPy's random streams in compiled loops: `default_rng(words)` and its `shuffle`, number for number.
#
# An epoch of a few samples needs its own generator, and NumPy takes longer to make one than to pack the samples.
# The seed is mixed as in SeedSequence (O'Neill, "Developing a seed_seq Alternative", 2015), numbers come from
# PCG64 (O'Neill, 2014); a number that is too large is drawn again.


STATE_WORDS = (
    6  # of a generator: the state, high and low; the increment, high and low; half a number, and whether it is present
)
ONE, LOW = 1, 0xFFFFFFFF
INIT_A, MULT_A, INIT_B, MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
MIX_L, MIX_R = 0xCA01F9DD, 0x4973F715
PCG_HIGH, PCG_LOW = 0x2360ED051FC65DA4, 0x4385DF649FCCF645


def _hash(value: int, constant: int) -> int:
    value = ((value ^ constant) * (constant * MULT_A & LOW)) & LOW
    return value ^ (value >> 16)


def _mix(one: int, other: int) -> int:
    value = (MIX_L * one - MIX_R * other) & LOW
    return value ^ (value >> 16)


def seeded_words(entropy: _Words, words: _Words) -> None:
    """Write `SeedSequence(entropy).generate_state(len(words), uint64)`. entropy: uint64[1 or more], below 2**32."""
    pool = cython.declare(cython.ulonglong[4])
    constant = INIT_A
    count = len(entropy)
    for at in range(max(4, count)):
        if at < 4:
            pool[at] = _hash(entropy[at] if at < count else 0, constant)
            constant = constant * MULT_A & LOW
        if at == 3:
            for source in range(4):
                for target in range(4):
                    if source != target:
                        pool[target] = _mix(pool[target], _hash(pool[source], constant))
                        constant = constant * MULT_A & LOW
        if at >= 4:
            for target in range(4):
                pool[target] = _mix(pool[target], _hash(entropy[at], constant))
                constant = constant * MULT_A & LOW
    constant = INIT_B
    for at in range(2 * len(words)):
        value = pool[at % 4] ^ constant
        constant = constant * MULT_B & LOW
        value = value * constant & LOW
        value ^= value >> 16
        words[at // 2] = words[at // 2] | value << 32 if at % 2 else value


def begin_stream(entropy: _Words, state: _Words) -> None:
    """Set `state`, uint64[STATE_WORDS], to the state of `default_rng(entropy)`."""
    seeded_words(entropy, state[:4])
    high, low = state[0], state[1]
    state[2], state[3] = (state[2] << 1) | (state[3] >> 63), (state[3] << 1) | 1
    state[0] = state[1] = state[4] = state[5] = 0
    _advance(state)
    state[0] += high
    state[1] += low
    if state[1] < low:
        state[0] += 1
    _advance(state)


def _advance(state: _Words) -> None:
    """Advance the state: multiply by PCG's multiplier and add the increment, modulo 2**128."""
    low = state[1]
    a, b, c, d = low >> 32, low & LOW, PCG_LOW >> 32, PCG_LOW & LOW
    middle = (b * d >> 32) + (a * d & LOW) + (b * c & LOW)
    high = a * c + (a * d >> 32) + (b * c >> 32) + (middle >> 32) + state[0] * PCG_LOW + low * PCG_HIGH + state[2]
    state[1] = low * PCG_LOW + state[3]
    state[0] = high + 1 if state[1] < state[3] else high


def _next_32(state: _Words) -> int:
    if state[5]:
        state[5] = 0
        return state[4]
    _advance(state)
    value, turn = state[0] ^ state[1], state[0] >> 58
    value = (value >> turn) | (value << ((64 - turn) & 63))
    state[4], state[5] = value >> 32, 1
    return value & LOW


def shuffle(state: _Words, values: _Numbers) -> None:
    """Shuffle at most 2**32 values in the same way as the generator's `shuffle`, from the last value to the first."""
    mask = LOW
    for last in range(len(values) - 1, 0, -1):
        while mask >> 1 >= last:
            mask >>= 1
        chosen = _next_32(state) & mask
        while chosen > last:
            chosen = _next_32(state) & mask
        values[last], values[chosen] = values[chosen], values[last]
