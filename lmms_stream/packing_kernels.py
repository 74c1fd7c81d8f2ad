"""The compiled loops of packing.py: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

CLOSED_BELOW = 1 / 512  # of a pack: with less room than that left it is not kept open for another window

_LOW_BIT_TABLE = np.zeros(64, dtype=np.int64)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
for _bit in range(64):
    _LOW_BIT_TABLE[((1 << _bit) * int(_DE_BRUIJN) & (1 << 64) - 1) >> 58] = _bit


@njit(cache=True, nogil=True, inline="always")
def _low_bit(word: np.uint64) -> int:
    """Index of the lowest set bit of a word that is not 0 (de Bruijn multiplication)."""
    isolated = word & (~word + np.uint64(1))
    return _LOW_BIT_TABLE[(isolated * _DE_BRUIJN) >> np.uint64(58)]


@njit(cache=True, nogil=True, inline="always")
def _mix(value: np.uint64) -> np.uint64:
    """splitmix64's finalizer: a bijection of 64-bit words without visible pattern (Steele et al., 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def _least_room(words: NDArray[np.uint64], summary: NDArray[np.uint64], length: int) -> int:
    """The least set bit of the two-level bitmap that is `length` or more; -1 when there is none."""
    at = length >> 6
    word = words[at] >> np.uint64(length & 63)
    if word != np.uint64(0):
        return length + _low_bit(word)
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


@njit(cache=True, nogil=True)
def _set(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> None:
    words[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
    summary[bit >> 12] |= np.uint64(1) << np.uint64((bit >> 6) & 63)


@njit(cache=True, nogil=True)
def _clear(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> None:
    words[bit >> 6] &= ~(np.uint64(1) << np.uint64(bit & 63))
    if words[bit >> 6] == np.uint64(0):
        summary[bit >> 12] &= ~(np.uint64(1) << np.uint64((bit >> 6) & 63))


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def first_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Each sample into the pack that was opened first among those with room, found in a tree of maxima."""
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


@njit(cache=True, nogil=True)
def _sort_window(
    lengths: NDArray[np.int32],
    start: int,
    stop: int,
    share: float,
    counts: NDArray[np.int32],
    fillers: NDArray[np.int32],
) -> tuple[int, int]:
    """Put the fillers of a window, longest first, into `fillers`; their number, and the longest filler's length.

    `counts` is zeroed scratch of limit + 2 entries and is zero again on return (counting sort).
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
    num_fillers = 0
    for length in range(shortest, longest + 1):
        held += np.int64(counts[length]) * length
        if held > budget:
            break
        threshold = length
        num_fillers += counts[length]
    place = 0
    for length in range(threshold, shortest - 1, -1):
        number = counts[length]
        counts[length] = place
        place += number
    for position in range(start, stop):
        length = lengths[position]
        if length <= threshold:
            fillers[counts[length]] = position
            counts[length] += 1
    for length in range(shortest, longest + 1):
        counts[length] = 0
    return num_fillers, threshold


@njit(cache=True, nogil=True)
def _sort_by_hash(
    keys: NDArray[np.uint64],
    bins: NDArray[np.int32],
    count: int,
    sorted_keys: NDArray[np.uint64],
    sorted_bins: NDArray[np.int32],
    buckets: NDArray[np.int32],
) -> None:
    """Sort `count` bins by their keys, which are spread evenly: one bucket a bin by high bits, then insertion."""
    bits = 0
    while (1 << bits) < count:
        bits += 1
    shift = np.uint64(63 - bits)
    half = np.uint64(1)
    buckets[: (1 << bits) + 1] = 0
    for at in range(count):
        buckets[((keys[at] >> half) >> shift) + 1] += 1
    for at in range(1 << bits):
        buckets[at + 1] += buckets[at]
    for at in range(count):
        place = buckets[(keys[at] >> half) >> shift]
        buckets[(keys[at] >> half) >> shift] += 1
        sorted_keys[place] = keys[at]
        sorted_bins[place] = bins[at]
    for at in range(1, count):
        key, chosen = sorted_keys[at], sorted_bins[at]
        place = at
        while place > 0 and sorted_keys[place - 1] > key:
            sorted_keys[place] = sorted_keys[place - 1]
            sorted_bins[place] = sorted_bins[place - 1]
            place -= 1
        sorted_keys[place] = key
        sorted_bins[place] = chosen


@njit(cache=True, nogil=True)
def best_fit(
    lengths: NDArray[np.int32],
    limit: int,
    max_samples: int,
    window: int,
    filler_share: float,
    carry: bool,
    seed: np.uint64,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Best fit over windows; see packing.pack for what it does, and the notes below for how.

    filler_share: of a window's tokens, its shortest samples, placed last and longest first; 1 is best fit
    decreasing. carry: whether packs with room stay open for one more window.

    Open bins with r tokens of room form a linked list `by_room[r]`; a two-level bitmap over r finds the least
    r that is enough in a few instructions. A bin's samples form a linked list through `following`, whose slots
    are reused every second window. At most 2 * window bins are open at any time.
    """
    count = len(lengths)
    order = np.empty(count, np.int32)
    offsets = np.empty(count + 1, np.int64)
    num_packs = 0
    num_out = 0
    window = min(window, max(count, 1))
    ring = 1
    while ring < 2 * window:
        ring *= 2
    slot = ring - 1  # position & slot is where a sample of the last two windows is kept
    num_words = (limit >> 6) + 1
    words = np.zeros(num_words, np.uint64)
    summary = np.zeros((num_words >> 6) + 1, np.uint64)
    by_room = np.full(limit + 1, -1, np.int32)
    bin_next = np.empty(ring, np.int32)
    bin_room = np.empty(ring, np.int32)
    bin_head = np.empty(ring, np.int32)
    bin_first = np.empty(ring, np.int32)
    bin_size = np.zeros(ring, np.int32)
    following = np.empty(ring, np.int32)
    free_bins = np.arange(ring).astype(np.int32)
    num_free = ring
    opened = np.empty(ring, np.int32)  # bins that are open; the first num_carried come from the last window
    num_carried = 0
    counts = np.zeros(limit + 2, np.int32)
    fillers = np.empty(window, np.int32)
    closing = np.empty(ring, np.int32)
    keys = np.empty(ring, np.uint64)
    sorted_keys = np.empty(ring, np.uint64)
    sorted_bins = np.empty(ring, np.int32)
    buckets = np.empty(ring + 1, np.int32)
    least_room = max(1, np.int64(limit * CLOSED_BELOW))

    for start in range(0, count, window):
        stop = min(start + window, count)
        num_fillers, threshold = _sort_window(lengths, start, stop, filler_share, counts, fillers)
        num_open = num_carried
        num_large = stop - start
        for turn in range(num_large + num_fillers):
            if turn < num_large:
                position = start + turn
                length = lengths[position]
                if length <= threshold:
                    continue
            else:
                position = fillers[turn - num_large]
                length = lengths[position]
            room = _least_room(words, summary, length)
            if room >= 0:
                chosen = by_room[room]
                by_room[room] = bin_next[chosen]
                if by_room[room] < 0:
                    _clear(words, summary, room)
            else:
                num_free -= 1
                chosen = free_bins[num_free]
                opened[num_open] = chosen
                num_open += 1
                bin_head[chosen] = -1
                bin_first[chosen] = position
                bin_size[chosen] = 0
                room = limit
            following[position & slot] = bin_head[chosen]
            bin_head[chosen] = position
            bin_size[chosen] += 1
            room -= length
            bin_room[chosen] = room
            if room > 0 and bin_size[chosen] < max_samples:  # a full bin is in no list
                if by_room[room] < 0:
                    _set(words, summary, room)
                bin_next[chosen] = by_room[room]
                by_room[room] = chosen
        # Close what is full enough or was carried already, keep the rest open.
        last = stop == count
        num_closing = 0
        kept = 0
        for at in range(num_open):
            chosen = opened[at]
            room = bin_room[chosen]
            if room > 0:  # every list is emptied; the bins that stay open are entered again below
                by_room[room] = -1
                words[room >> 6] = np.uint64(0)
                summary[room >> 12] = np.uint64(0)
            full = room < least_room or bin_size[chosen] >= max_samples
            if full or at < num_carried or last or not carry:
                keys[num_closing] = _mix(seed + np.uint64(bin_first[chosen]) * np.uint64(0x9E3779B97F4A7C15))
                closing[num_closing] = chosen
                num_closing += 1
            else:
                opened[kept] = chosen
                kept += 1
        for at in range(kept):
            chosen = opened[at]
            room = bin_room[chosen]
            _set(words, summary, room)
            bin_next[chosen] = by_room[room]
            by_room[room] = chosen
        num_carried = kept
        _sort_by_hash(keys, closing, num_closing, sorted_keys, sorted_bins, buckets)
        for at in range(num_closing):
            chosen = sorted_bins[at]
            offsets[num_packs] = num_out
            num_packs += 1
            num_out += bin_size[chosen]
            write = num_out
            position = bin_head[chosen]
            while position >= 0:
                write -= 1
                order[write] = position
                position = following[position & slot]
            free_bins[num_free] = chosen
            num_free += 1
    offsets[num_packs] = num_out
    return order, offsets[: num_packs + 1].copy()
