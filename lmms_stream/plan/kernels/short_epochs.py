"""Compiled loops that pack many short epochs at once: order, packing and interleaving, as for one long epoch.

In Python an epoch of a few samples would take far longer; the loops take a few microseconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload
from numpy.typing import NDArray

from ...versions.numba import compiled
from .best_fit import Bins, best_fit_in, first_fit, new_bins, next_fit
from .even_fit import even_fit
from .window_fit import window_fit_in

# mypy: allow-untyped-decorators, disable-error-code="assignment, return-value, no-any-return"


_WORD = (1 << 32) - 1
_PACKED, _PACKS, _BLOCKS = 1, 2, 3  # the last words of the streams' keys (see packing.block_seed and order.Turns)

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


# Numba stores compiled loops on disk by the names of these classes: a renamed class cannot be loaded from there.


class Rules(NamedTuple):
    """Settings of packing; see best_fit. keeps: whether samples longer than the limit are kept whole."""

    limit: int
    max_samples: int
    window: int
    filler_share: float
    keeps: bool


class BestFit(Rules):
    """Rules of best_fit. Each strategy has a type: numba compiles only the loops of the used strategy."""


class EvenFit(Rules):
    """Rules of even_fit."""


class WindowN(Rules):
    """Rules of window_N."""


class FirstFit(Rules):
    """Rules of first_fit."""


class NextFit(Rules):
    """Rules of next_fit."""


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


@compiled
def _new_segments(count: int) -> Segments:
    return Segments(np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32))


@compiled
def _permutation(size: int, is_shuffled: bool, entropy: _Words, state: _Words) -> _Numbers:
    numbers = np.arange(size)
    if is_shuffled and size > 1:
        begin_stream(entropy, state)
        shuffle(state, numbers)
    return numbers


@compiled
def _entropy(seed: int, epoch: int, node: int, block: int, stream: int) -> _Words:
    """Return the words of the key of a block's stream, as in SeedSequence: an epoch from 2**32 on takes two words."""
    words = np.empty(6, np.uint64)
    words[0], words[1], words[2] = seed, epoch & _WORD, epoch >> 32
    at = 3 if words[2] else 2
    words[at], words[at + 1], words[at + 2] = node + 1, block, stream
    return words[: at + 3]


@compiled
def _lay_out(facts: SourceFacts, epoch: int, state: _Words, ids: _Numbers) -> None:
    """Write the ids of an epoch's samples, shard after shard."""
    turns = _permutation(len(facts.sizes), facts.shuffles, _entropy(facts.seed, epoch, 0, 0, 0)[:-3], state)
    at = 0
    for shard in turns:
        for index in range(facts.sizes[shard]):
            ids[at] = facts.first_ids[shard] + index
            at += 1


@compiled
def _cut(facts: SourceFacts, limit: int, ids: _Numbers, cut: Segments) -> int:
    """Write the segments of samples; return the number of segments."""
    count = 0
    for sample in ids:
        length = facts.lengths[sample]
        for piece in range(facts.num_pieces[sample]):
            cut.sample_ids[count] = sample
            cut.starts[count] = piece * limit
            cut.lengths[count] = min(length - piece * limit, limit)
            count += 1
    return count


_Packed = tuple[NDArray[np.int32], _Numbers]


def _best_fit(lengths: NDArray[np.int32], rules: BestFit, bins: Bins, seed: np.uint64) -> _Packed:
    none, window = np.empty(0, np.int64), min(rules.window, max(len(lengths), 1))
    carried, position, last, limit = np.zeros(1, np.int64), np.int64(0), np.bool_(True), rules.limit
    order, offsets, _ = best_fit_in(
        bins, lengths, carried, none, position, last, limit, rules.max_samples, window, rules.filler_share, seed
    )
    return order, offsets


def _even_fit(lengths: NDArray[np.int32], rules: EvenFit, bins: None, seed: np.uint64) -> _Packed:
    none, window = np.empty(0, np.int64), min(rules.window, max(len(lengths), 1))
    carried, position, last, limit = np.zeros(1, np.int64), np.int64(0), np.bool_(True), rules.limit
    order, offsets, _ = even_fit(
        lengths, carried, none, position, last, limit, rules.max_samples, window, rules.filler_share, seed
    )
    return order, offsets


def _window_n(lengths: NDArray[np.int32], rules: WindowN, bins: Bins, seed: np.uint64) -> _Packed:
    none, window = np.empty(0, np.int64), min(rules.window, max(len(lengths), 1))
    position, last, limit = np.int64(0), np.bool_(True), rules.limit
    order, offsets, _ = window_fit_in(bins, lengths, none, position, last, limit, rules.max_samples, window, seed)
    return order, offsets


def _first_fit(lengths: NDArray[np.int32], rules: FirstFit, bins: None, seed: np.uint64) -> _Packed:
    return first_fit(lengths, rules.limit, rules.max_samples)


def _next_fit(lengths: NDArray[np.int32], rules: NextFit, bins: None, seed: np.uint64) -> _Packed:
    return next_fit(lengths, rules.limit, rules.max_samples)


def _window_bins(rules: BestFit | WindowN, num_segments: int) -> Bins:
    slots = 2 * max(1, min(rules.window, num_segments))
    return new_bins(slots, slots, rules.limit)


def _no_bins(rules: EvenFit | FirstFit | NextFit, num_segments: int) -> None:
    return None


_PACK: dict[type, Any] = {
    BestFit: _best_fit, EvenFit: _even_fit, WindowN: _window_n, FirstFit: _first_fit, NextFit: _next_fit,
}  # fmt: skip
_BINS: dict[type, Any] = {
    BestFit: _window_bins, EvenFit: _no_bins, WindowN: _window_bins, FirstFit: _no_bins, NextFit: _no_bins,
}  # fmt: skip


def _pack(lengths: NDArray[np.int32], rules: Rules, bins: Bins | None, seed: np.uint64) -> _Packed:
    """Pack by the strategy of the rules; numba chooses the function when it compiles, by the type of the rules."""
    return _PACK[type(rules)](lengths, rules, bins, seed)


def _new_bins(rules: Rules, num_segments: int) -> Bins | None:
    return _BINS[type(rules)](rules, num_segments)


@overload(_pack, strict=False)  # the annotations differ
def _pack_of_type(lengths: Any, rules: Any, bins: Any, seed: Any) -> Any:
    return _PACK[rules.instance_class]


@overload(_new_bins, strict=False)
def _bins_of_type(rules: Any, num_segments: Any) -> Any:
    return _BINS[rules.instance_class]


@compiled
def _interleave(
    num_packs: int,
    node_firsts: _Numbers,
    packed: Segments,
    ends: _Numbers,
    turns: NDArray[np.int32],
    found: EpochPacks,
) -> int:
    """Append the packs of an epoch; return the new number of packs. A round takes a pack of each node with packs left.

    node_firsts: int64[num_nodes + 1], the first pack of each node. ends: end of each pack's segments.
    """
    most = np.int64(0)
    for node in range(len(node_firsts) - 1):
        most = max(most, node_firsts[node + 1] - node_firsts[node])
    write = found.offsets[num_packs]
    for turn in range(most):
        for node in range(len(node_firsts) - 1):
            pack = node_firsts[node] + turn
            if pack >= node_firsts[node + 1]:
                continue
            begin = ends[pack - 1] if pack else np.int64(0)
            for at in range(begin, ends[pack]):
                found.segments.sample_ids[write] = packed.sample_ids[at]
                found.segments.starts[write] = packed.starts[at]
                found.segments.lengths[write] = packed.lengths[at]
                write += 1
            found.nodes[num_packs], found.turns[num_packs] = node, turns[pack]
            num_packs += 1
            found.offsets[num_packs] = write
    return num_packs


@compiled
def _pack_node(
    facts: SourceFacts,
    rules: Rules,
    bins: Bins,
    epoch: int,
    node: int,
    ids: _Numbers,
    state: _Words,
    cut: Segments,
    packed: Segments,
    ends: _Numbers,
    turns: NDArray[np.int32],
    num_packs: int,
) -> int:
    """Append the packs of a canonical node to the packs of the nodes before; return the new number of packs.

    ids: samples as written by _lay_out. cut: scratch.
    """
    packed_epoch = epoch if facts.reshuffles else 0
    turns_again = facts.shuffles and epoch != packed_epoch  # packs made once are in a new order in each epoch
    begin, end = len(ids) * node // facts.num_nodes, len(ids) * (node + 1) // facts.num_nodes
    num_blocks = -((begin - end) // facts.block_size)
    blocks = _permutation(num_blocks, turns_again, _entropy(facts.seed, epoch, node, 0, _BLOCKS), state)
    write = ends[num_packs - 1] if num_packs else np.int64(0)
    for turn in range(num_blocks):
        block = blocks[turn]
        start = begin + block * facts.block_size
        mine = ids[start : min(end, start + facts.block_size)]
        entropy = _entropy(facts.seed, packed_epoch, node, block, _PACKED)
        if facts.shuffles:
            begin_stream(entropy[:-1], state)  # without `stream`
            shuffle(state, mine)
        num_cut = _cut(facts, rules.limit, mine, cut)
        order, offsets = _pack(cut.lengths[:num_cut], rules, bins, seeded_words(entropy, np.int64(1))[0])
        numbers = _permutation(len(offsets) - 1, turns_again, _entropy(facts.seed, epoch, node, block, _PACKS), state)
        for pack in numbers:
            for at in order[offsets[pack] : offsets[pack + 1]]:
                packed.sample_ids[write] = cut.sample_ids[at]
                length = facts.lengths[cut.sample_ids[at]] if rules.keeps else cut.lengths[at]
                packed.starts[write], packed.lengths[write] = cut.starts[at], length
                write += 1
            ends[num_packs], turns[num_packs] = write, turn
            num_packs += 1
    return num_packs


@compiled
def pack_epochs(facts: SourceFacts, rules: Rules, first: int, count: int) -> EpochPacks:
    """Return the packs of the epochs [first, first + count), in the order of their numbers."""
    num_segments = int(facts.num_pieces.sum())
    bins = _new_bins(rules, num_segments)
    ids, state = np.empty(len(facts.lengths), np.int64), np.empty(STATE_WORDS, np.uint64)
    cut, packed = _new_segments(num_segments), _new_segments(num_segments)
    ends, turns = np.empty(num_segments, np.int64), np.empty(num_segments, np.int32)
    node_firsts, first_packs = np.zeros(facts.num_nodes + 1, np.int64), np.zeros(count + 1, np.int64)
    most = count * num_segments
    segments, offsets = _new_segments(most), np.zeros(most + 1, np.int64)
    nodes, turns_of_packs = np.empty(most, np.int32), np.empty(most, np.int32)
    found = EpochPacks(segments, offsets, nodes, turns_of_packs, first_packs)
    num_found = np.int64(0)
    for number in range(count):
        epoch = first + number
        _lay_out(facts, epoch if facts.reshuffles else 0, state, ids)
        num_packs = np.int64(0)
        for node in range(facts.num_nodes):
            num_packs = _pack_node(facts, rules, bins, epoch, node, ids, state, cut, packed, ends, turns, num_packs)
            node_firsts[node + 1] = num_packs
        num_found = _interleave(num_found, node_firsts, packed, ends, turns, found)
        first_packs[number + 1] = num_found
    return EpochPacks(segments, offsets[: num_found + 1], nodes[:num_found], turns_of_packs[:num_found], first_packs)


# NumPy's random streams in compiled loops: `default_rng(words)` and its `shuffle`, number for number.
#
# An epoch of a few samples needs its own generator, and NumPy takes longer to make one than to pack the samples.
# The seed is mixed as in SeedSequence (O'Neill, "Developing a seed_seq Alternative", 2015), numbers come from
# PCG64 (O'Neill, 2014); a number that is too large is drawn again.


Words = NDArray[np.uint64]
STATE_WORDS = (
    6  # of a generator: the state, high and low; the increment, high and low; half a number, and whether it is present
)

_LOW = np.uint64(0xFFFFFFFF)
_32, _16, _1 = np.uint64(32), np.uint64(16), np.uint64(1)
_INIT_A, _MULT_A = np.uint64(0x43B0D7E5), np.uint64(0x931E8875)
_INIT_B, _MULT_B = np.uint64(0x8B51F9DD), np.uint64(0x58F38DED)
_MIX_L, _MIX_R = np.uint64(0xCA01F9DD), np.uint64(0x4973F715)
_PCG_HIGH, _PCG_LOW = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)


@compiled(inline="always")
def _xor_high(value: np.uint64) -> np.uint64:
    return value ^ (value >> _16)


@compiled
def seeded_words(entropy: Words, num_words: int) -> Words:
    """Return `SeedSequence(entropy).generate_state(num_words, uint64)`. entropy: uint64[1 or more], below 2**32."""
    pool = np.zeros(4, np.uint64)
    constant = _INIT_A
    for at in range(max(4, len(entropy))):
        if at < 4:
            value = entropy[at] if at < len(entropy) else np.uint64(0)
            value ^= constant
            constant = (constant * _MULT_A) & _LOW
            pool[at] = _xor_high((value * constant) & _LOW)
        if at == 3:
            for source in range(4):
                for target in range(4):
                    if source != target:
                        constant = _mix_into(pool, target, pool[source], constant)
        if at >= 4:
            for target in range(4):
                constant = _mix_into(pool, target, entropy[at], constant)
    constant = _INIT_B
    words = np.zeros(num_words, np.uint64)
    for at in range(2 * num_words):
        value = pool[at % 4] ^ constant
        constant = (constant * _MULT_B) & _LOW
        value = _xor_high((value * constant) & _LOW)
        words[at // 2] |= value << (_32 if at % 2 else np.uint64(0))
    return words


@compiled
def _mix_into(pool: Words, target: int, value: np.uint64, constant: np.uint64) -> np.uint64:
    """Mix a word into a word of the pool; return the next constant of the hash."""
    value ^= constant
    constant = (constant * _MULT_A) & _LOW
    value = _xor_high((value * constant) & _LOW)
    pool[target] = _xor_high((_MIX_L * pool[target] - _MIX_R * value) & _LOW)
    return constant


@compiled
def begin_stream(entropy: Words, state: Words) -> None:
    """Set `state`, uint64[STATE_WORDS], to the state of `default_rng(entropy)`."""
    seed = seeded_words(entropy, np.int64(4))
    state[2] = (seed[2] << _1) | (seed[3] >> np.uint64(63))
    state[3] = (seed[3] << _1) | _1
    state[0], state[1], state[4], state[5] = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    _advance(state)
    low = state[1] + seed[1]
    state[0] += seed[0] + np.uint64(low < seed[1])
    state[1] = low
    _advance(state)


@compiled(inline="always")
def _advance(state: Words) -> None:
    """Advance the state: multiply by PCG's multiplier and add the increment, modulo 2**128."""
    low, other = state[1], _PCG_LOW
    a, b, c, d = low >> _32, low & _LOW, other >> _32, other & _LOW
    middle = (b * d >> _32) + (a * d & _LOW) + (b * c & _LOW)
    high = a * c + (a * d >> _32) + (b * c >> _32) + (middle >> _32)
    high += state[0] * _PCG_LOW + low * _PCG_HIGH
    product = low * other
    total = product + state[3]
    state[0] = high + state[2] + np.uint64(total < product)
    state[1] = total


@compiled(inline="always")
def _next_32(state: Words) -> np.uint64:
    if state[5]:
        state[5] = np.uint64(0)
        return state[4]
    _advance(state)
    value = state[0] ^ state[1]
    turn = state[0] >> np.uint64(58)
    value = (value >> turn) | (value << ((np.uint64(64) - turn) & np.uint64(63)))
    state[4], state[5] = value >> _32, _1
    return value & _LOW


@compiled
def shuffle(state: Words, values: NDArray[np.int64]) -> None:
    """Shuffle at most 2**32 values in the same way as the generator's `shuffle`, from the last value to the first."""
    mask = np.uint64((1 << 32) - 1)
    for last in range(len(values) - 1, 0, -1):
        while mask >> _1 >= np.uint64(last):
            mask >>= _1
        chosen = _next_32(state) & mask
        while chosen > np.uint64(last):
            chosen = _next_32(state) & mask
        values[last], values[chosen] = values[chosen], values[last]
