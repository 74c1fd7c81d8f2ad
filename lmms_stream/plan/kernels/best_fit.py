"""Compiled loops of next, first and best fit: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

# mypy: allow-untyped-decorators, disable-error-code="assignment, return-value, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...versions.numba import compiled

FEW_SAMPLES = 64  # of a window: sorting these few by comparison is quicker than a loop over all possible lengths
FILLER_SHARE = 0.2  # of a window's tokens: its shortest samples, kept back to fill gaps
CLOSED_BELOW = 1 / 512  # of a pack: a pack with less room left is not kept open for another window


@compiled(inline="always")
def mix(value: np.uint64) -> np.uint64:
    """Return splitmix64's finalizer: a bijection of 64-bit words without visible pattern (Steele et al., 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Bins(NamedTuple):
    """Open packs, and scratch for a window.

    Bins with r tokens of room form a linked list `by_room[r]` through `next_bin`. A two-level bitmap over r finds the
    least sufficient r in a few instructions. The samples of a bin form a linked list through `following`, last sample
    first. The slot of a sample in `following` is `position & (len(following) - 1)`: slots are used again.
    """

    words: NDArray[np.uint64]
    summary: NDArray[np.uint64]
    by_room: NDArray[np.int32]
    next_bin: NDArray[np.int32]
    following: NDArray[np.int32]
    head: NDArray[np.int32]
    first: NDArray[np.int64]  # position of a bin's first sample in the sequence; see best_fit
    size: NDArray[np.int32]
    room: NDArray[np.int32]
    opened: NDArray[np.int32]  # open bins; bins from the last window come first
    unused: NDArray[np.int32]  # a stack
    turns: NDArray[np.int32]
    counts: NDArray[np.int32]


@compiled
def new_bins(num_positions: int, window: int, limit: int) -> Bins:
    """Return bins for up to `num_positions` consecutive positions, with up to `window` positions placed at a time."""
    slots = 1
    while slots < num_positions:
        slots *= 2
    num_words = (limit >> 6) + 1
    return Bins(
        np.zeros(num_words, np.uint64),
        np.zeros((num_words >> 6) + 1, np.uint64),
        np.full(limit + 1, -1, np.int32),
        np.empty(slots, np.int32),
        np.empty(slots, np.int32),
        np.empty(slots, np.int32),
        np.empty(slots, np.int64),
        np.empty(slots, np.int32),
        np.empty(slots, np.int32),
        np.empty(slots, np.int32),
        np.arange(slots).astype(np.int32),
        np.empty(window, np.int32),
        np.zeros(limit + 2, np.int32),
    )


@compiled
def _sort_window(
    lengths: NDArray[np.int32], start: int, stop: int, share: float, counts: NDArray[np.int32], turns: NDArray[np.int32]
) -> None:
    """Write the order of placing a window: samples as given, then the fillers, longest first.

    share: share of the fillers, the shortest samples, in the window's tokens. `counts` is zeroed scratch of limit + 2
    entries, and is zero again on return (counting sort).
    """
    total = np.int64(0)
    shortest = np.int64(len(counts))
    longest = np.int64(0)
    for position in range(start, stop):
        length = np.int64(lengths[position])
        counts[length] += 1
        total += length
        shortest = min(shortest, length)
        longest = max(longest, length)
    budget = np.int64(total * share)
    threshold = np.int64(0)
    held = np.int64(0)
    slot = stop - start
    for length in range(shortest, longest + 1):
        held += np.int64(counts[length]) * length
        if held > budget:
            break
        threshold = length
        slot -= counts[length]
    for length in range(threshold, shortest - 1, -1):
        number = counts[length]
        counts[length] = slot
        slot += number
    num_large = 0
    for position in range(start, stop):
        length = lengths[position]
        if length > threshold:
            turns[num_large] = position
            num_large += 1
        else:
            turns[counts[length]] = position
            counts[length] += 1
    counts[shortest : longest + 1] = 0


@compiled
def _sort_few(lengths: NDArray[np.int32], start: int, stop: int, share: float, turns: NDArray[np.int32]) -> None:
    """Write the order of _sort_window for a window of a few samples, by insertion."""
    count = stop - start
    by_length = np.empty(count, np.int32)  # longest first, equal lengths as given
    total = np.int64(0)
    for number in range(count):
        length = lengths[start + number]
        total += length
        slot = number
        while slot > 0 and lengths[by_length[slot - 1]] < length:
            by_length[slot] = by_length[slot - 1]
            slot -= 1
        by_length[slot] = start + number
    budget = np.int64(total * share)
    threshold = np.int64(0)
    held = np.int64(0)
    num_large = count
    while num_large > 0:
        length = np.int64(lengths[by_length[num_large - 1]])
        equal = num_large
        while equal > 0 and lengths[by_length[equal - 1]] == length:
            equal -= 1
        held += (num_large - equal) * length
        if held > budget:
            break
        threshold, num_large = length, equal
    at = 0
    for position in range(start, stop):
        if lengths[position] > threshold:
            turns[at] = position
            at += 1
    for at in range(num_large, count):
        turns[at] = by_length[at]


@compiled
def fill_window(
    bins: Bins, lengths: NDArray[np.int32], num_samples: int, shift: int, num_open: int, limit: int, max_samples: int
) -> int:
    """Put samples, in the order of bins.turns, into the fullest packs with room; return the number of open bins.

    The loop has local names for the arrays of `bins`. With functions, or with access through `bins`, it would take
    twice as long: numba counts references to every array that is passed on.
    """
    words, summary, by_room, next_bin, following = bins.words, bins.summary, bins.by_room, bins.next_bin, bins.following
    head, first, size, rooms, opened = bins.head, bins.first, bins.size, bins.room, bins.opened
    unused, turns = bins.unused, bins.turns
    mask = len(following) - 1
    for turn in range(num_samples):
        position = turns[turn]
        length = lengths[position]
        room = least_bit(words, summary, length)
        if room >= 0:
            chosen = by_room[room]
            by_room[room] = next_bin[chosen]
            if by_room[room] < 0:
                clear_bit(words, summary, room)
        else:
            chosen = unused[mask - num_open]
            opened[num_open] = chosen
            num_open += 1
            head[chosen] = -1
            first[chosen] = position + shift
            size[chosen] = 0
            room = limit
        following[position & mask] = head[chosen]
        head[chosen] = position
        size[chosen] += 1
        room -= length
        rooms[chosen] = room
        if room > 0 and size[chosen] < max_samples:  # a full bin is in no list
            if by_room[room] < 0:
                set_bit(words, summary, room)
            next_bin[chosen] = by_room[room]
            by_room[room] = chosen
    return num_open


@compiled
def _enter(bins: Bins, num_open: int) -> None:
    """Enter the open bins into empty lists."""
    words, summary, by_room, next_bin = bins.words, bins.summary, bins.by_room, bins.next_bin
    opened, rooms = bins.opened, bins.room
    for at in range(num_open):
        chosen = opened[at]
        room = rooms[chosen]
        set_bit(words, summary, room)
        next_bin[chosen] = by_room[room]
        by_room[room] = chosen


@compiled
def _close(
    bins: Bins, num_last: int, num_open: int, limit: int, max_samples: int, seed: np.uint64
) -> tuple[NDArray[np.int32], int]:
    """Close the first `num_last` open bins and all nearly full bins; return these by hash, and the number left open."""
    words, summary, by_room, unused, opened = bins.words, bins.summary, bins.by_room, bins.unused, bins.opened
    first, size, rooms = bins.first, bins.size, bins.room
    closing = np.empty(num_open, np.int32)
    keys = np.empty(num_open, np.uint64)
    least_room = max(1, np.int64(limit * CLOSED_BELOW))
    num_closing = 0
    num_kept = 0
    for at in range(num_open):
        chosen = opened[at]
        room = rooms[chosen]
        if room > 0:  # every list is emptied; the bins that stay open are entered again below
            by_room[room] = -1
            words[room >> 6] = np.uint64(0)
            summary[room >> 12] = np.uint64(0)
        if at < num_last or room < least_room or size[chosen] >= max_samples:
            keys[num_closing] = mix(seed + np.uint64(first[chosen]) * np.uint64(0x9E3779B97F4A7C15))
            closing[num_closing] = chosen
            unused[len(unused) - num_open + num_closing] = chosen
            num_closing += 1
        else:
            opened[num_kept] = chosen
            num_kept += 1
    _enter(bins, num_kept)
    return sort_by_hash(keys[:num_closing], closing[:num_closing]), num_kept


@compiled
def sort_by_hash(keys: NDArray[np.uint64], bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the bins sorted by keys, which are evenly spread: a bucket per bin by high bits, then insertion."""
    count = len(bins)
    bits = 1
    while (1 << bits) < count:
        bits += 1
    shift = np.uint64(64 - bits)
    buckets = np.zeros((1 << bits) + 1, np.int32)
    for key in keys:
        buckets[(key >> shift) + np.uint64(1)] += 1
    for at in range(1 << bits):
        buckets[at + 1] += buckets[at]
    sorted_keys = np.empty(count, np.uint64)
    sorted_bins = np.empty(count, np.int32)
    for at in range(count):
        slot = buckets[keys[at] >> shift]
        buckets[keys[at] >> shift] += 1
        sorted_keys[slot] = keys[at]
        sorted_bins[slot] = bins[at]
    for at in range(1, count):
        key, chosen = sorted_keys[at], sorted_bins[at]
        slot = at
        while slot > 0 and sorted_keys[slot - 1] > key:
            sorted_keys[slot] = sorted_keys[slot - 1]
            sorted_bins[slot] = sorted_bins[slot - 1]
            slot -= 1
        sorted_keys[slot] = key
        sorted_bins[slot] = chosen
    return sorted_bins


@compiled
def emit(
    bins: Bins, emitted: NDArray[np.int32], order: NDArray[np.int32], offsets: NDArray[np.int64], num_packs: int
) -> int:
    """Append the samples of bins as packs; return the new number of packs."""
    head, size, following = bins.head, bins.size, bins.following
    mask = len(following) - 1
    stop = offsets[num_packs]
    for chosen in emitted:
        stop += size[chosen]
        write = stop
        position = head[chosen]
        while position >= 0:
            write -= 1
            order[write] = position
            position = following[position & mask]
        num_packs += 1
        offsets[num_packs] = stop
    return num_packs


@compiled
def _open_again(
    bins: Bins, lengths: NDArray[np.int32], offsets: NDArray[np.int64], firsts: NDArray[np.int64], limit: int
) -> None:
    """Open a bin for each pack of the first samples, in the order of the packs."""
    for number in range(len(firsts)):
        chosen = bins.unused[len(bins.unused) - 1 - number]
        bins.opened[number] = chosen
        bins.first[chosen] = firsts[number]
        bins.size[chosen] = offsets[number + 1] - offsets[number]
        bins.room[chosen] = limit - lengths[offsets[number] : offsets[number + 1]].sum()
        bins.head[chosen] = -1
        for position in range(offsets[number], offsets[number + 1]):
            bins.following[position] = bins.head[chosen]
            bins.head[chosen] = position
    _enter(bins, len(firsts))


@compiled
def best_fit(
    lengths: NDArray[np.int32],
    carried: NDArray[np.int64],
    firsts: NDArray[np.int64],
    position: int,
    last: bool,
    limit: int,
    max_samples: int,
    window: int,
    filler_share: float,
    seed: np.uint64,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return packs by best fit over windows of a sequence, or of a stretch; see packing.pack for the rules, and Bins.

    A stretch begins with a window. carried: offsets of the packs that are open before the stretch; `lengths` begins
    with the lengths of their samples. firsts: positions in the sequence of the first samples of these packs. position:
    position of the stretch's first sample. last: the sequence ends with the stretch. filler_share: see _sort_window.
    Returns order and offsets over `lengths`, and firsts of the packs that are still open, at the end of the order.
    """
    window = min(window, max(len(lengths) - carried[-1], 1))
    bins = new_bins(window + max(window, carried[-1]), window, limit)
    return best_fit_in(bins, lengths, carried, firsts, position, last, limit, max_samples, window, filler_share, seed)


@compiled
def best_fit_in(
    bins: Bins,
    lengths: NDArray[np.int32],
    carried: NDArray[np.int64],
    firsts: NDArray[np.int64],
    position: int,
    last: bool,
    limit: int,
    max_samples: int,
    window: int,
    filler_share: float,
    seed: np.uint64,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Call best_fit with bins used before for other sequences. A last stretch leaves the bins empty.

    bins: new_bins of at least twice the window.
    """
    count = len(lengths)
    first_new = carried[-1]
    num_open = len(firsts)
    order = np.empty(count, np.int32)
    offsets = np.empty(count + 1, np.int64)
    offsets[0] = 0
    num_packs = 0
    _open_again(bins, lengths, carried, firsts, limit)
    for start in range(first_new, count, window):
        stop = min(start + window, count)
        if stop - start <= FEW_SAMPLES:
            _sort_few(lengths, start, stop, filler_share, bins.turns)
        else:
            _sort_window(lengths, start, stop, filler_share, bins.counts, bins.turns)
        num_carried = num_open
        num_open = fill_window(bins, lengths, stop - start, position - first_new, num_open, limit, max_samples)
        is_last = last and stop == count
        closing, num_open = _close(bins, num_open if is_last else num_carried, num_open, limit, max_samples, seed)
        num_packs = emit(bins, closing, order, offsets, num_packs)
    still_open = bins.opened[:num_open]
    num_packs = emit(bins, still_open, order, offsets, num_packs)
    return order, offsets[: num_packs + 1].copy(), bins.first[still_open]


# A set of small integers with a search for the least member from a number up: a bitmap in two levels.
#
# Bit w of the summary is set if word w has a bit.


_LOW_BIT_TABLE = np.zeros(64, dtype=np.int64)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
for _bit in range(64):
    _LOW_BIT_TABLE[((1 << _bit) * int(_DE_BRUIJN) & (1 << 64) - 1) >> 58] = _bit


@compiled(inline="always")
def _low_bit(word: np.uint64) -> int:
    """Return the index of the lowest set bit of a word other than 0 (de Bruijn multiplication)."""
    isolated = word & (~word + np.uint64(1))
    return _LOW_BIT_TABLE[(isolated * _DE_BRUIJN) >> np.uint64(58)]


@compiled
def least_bit(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> int:
    """Return the least set bit from `bit` up; -1 if no bit is set."""
    at = bit >> 6
    word = words[at] >> np.uint64(bit & 63)
    if word != np.uint64(0):
        return bit + _low_bit(word)
    at += 1
    block_at = at >> 6
    if block_at >= len(summary):
        return -1
    block = (summary[block_at] >> np.uint64(at & 63)) << np.uint64(at & 63)
    while block == np.uint64(0):
        block_at += 1
        if block_at == len(summary):
            return -1
        block = summary[block_at]
    at = (block_at << 6) + _low_bit(block)
    return (at << 6) + _low_bit(words[at])


@compiled
def set_bit(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> None:
    words[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
    summary[bit >> 12] |= np.uint64(1) << np.uint64((bit >> 6) & 63)


@compiled
def clear_bit(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> None:
    words[bit >> 6] &= ~(np.uint64(1) << np.uint64(bit & 63))
    if words[bit >> 6] == np.uint64(0):
        summary[bit >> 12] &= ~(np.uint64(1) << np.uint64((bit >> 6) & 63))


# The compiled loops of next_fit and first_fit: int32 lengths, each from 1 to `limit`, in; order and offsets out.


@compiled
def next_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    count = len(lengths)
    offsets = np.empty(count + 1, np.int64)
    num_packs = 0
    room = 0
    samples_left = 0
    for position in range(count):
        length = lengths[position]
        if length > room or samples_left == 0:
            offsets[num_packs] = position
            num_packs += 1
            room = limit
            samples_left = max_samples
        room -= length
        samples_left -= 1
    offsets[num_packs] = count
    return np.arange(count).astype(np.int32), offsets[: num_packs + 1].copy()


@compiled
def first_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Put each sample into the first opened pack with room, found in a tree of maxima."""
    count = len(lengths)
    leaves = 1
    while leaves < count:
        leaves *= 2
    rooms = np.zeros(2 * leaves, np.int32)  # node n has children 2n and 2n + 1; leaf `leaves + pack`
    pack_of = np.empty(count, np.int32)
    sizes = np.zeros(count + 1, np.int64)
    num_packs = 0
    for position in range(count):
        length = lengths[position]
        if rooms[1] >= length:
            node = 1
            while node < leaves:
                node = 2 * node if rooms[2 * node] >= length else 2 * node + 1
            chosen = node - leaves
        else:
            chosen = num_packs
            num_packs += 1
            rooms[leaves + chosen] = limit
        pack_of[position] = chosen
        sizes[chosen + 1] += 1
        node = leaves + chosen
        rooms[node] = rooms[node] - length if sizes[chosen + 1] < max_samples else 0
        while node > 1:
            node >>= 1
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    offsets = np.cumsum(sizes[: num_packs + 1])
    order = np.empty(count, np.int32)
    filled = offsets[:num_packs].copy()
    for position in range(count):
        order[filled[pack_of[position]]] = position
        filled[pack_of[position]] += 1
    return order, offsets
