"""Compiled loops of next, first and best fit: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

from __future__ import annotations

import cython
import numpy as np
from cython.cimports.lmms_stream.plan.kernels.best_fit import low_bit
from numpy.typing import NDArray

FEW_SAMPLES = 64  # of a window: sorting these few by comparison is quicker than a loop over all possible lengths
FILLER_SHARE = 0.2  # of a window's tokens: its shortest samples, kept back to fill gaps
CLOSED_BELOW = 1 / 512  # of a pack: a pack with less room left is not kept open for another window
ONE, MIX_FIRST, MIX_SECOND, GOLDEN = 1, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Return splitmix64's finalizer: a bijection of 64-bit words without visible pattern (Steele et al., 2014)."""
    value = (value ^ (value >> 30)) * MIX_FIRST
    value = (value ^ (value >> 27)) * MIX_SECOND
    return value ^ (value >> 31)


class Packer:
    """A strategy with room for the packs of up to `most` lengths; order, offsets: see packing.Packs."""

    def __init__(self, limit: int, max_samples: int, most: int, *_: float):
        self.limit, self.max_samples = limit, max_samples
        self.packs = np.empty(most, np.int32), np.zeros(most + 1, np.int64)
        self.order, self.offsets = self.packs

    def pack(self, lengths: NDArray[np.int32], seed: int) -> int:
        """Pack a sequence by the strategy; return the number of packs."""
        return 0

    def arrays(self, num_packs: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return order and offsets."""
        return self.packs[0], self.packs[1][: num_packs + 1].copy()

    def sort(self, keys: NDArray[np.int64], numbers: NDArray[np.int32], scratch: NDArray[np.int32], count: int) -> None:
        """Sort `count` numbers by their keys, keys[number]; equal keys stay in the given order (merge sort)."""
        width = 8
        for at in range(1, count):  # runs of `width` numbers, by insertion
            number, slot = numbers[at], at
            while slot & (width - 1) and keys[numbers[slot - 1]] > keys[number]:
                numbers[slot] = numbers[slot - 1]
                slot -= 1
            numbers[slot] = number
        while width < count:
            begin = 0
            while begin < count:
                middle, stop = min(begin + width, count), min(begin + 2 * width, count)
                one, other = begin, middle
                for at in range(begin, stop):
                    if other == stop or (one < middle and keys[numbers[one]] <= keys[numbers[other]]):
                        scratch[at] = numbers[one]
                        one += 1
                    else:
                        scratch[at] = numbers[other]
                        other += 1
                begin = stop
            for at in range(count):
                numbers[at] = scratch[at]
            width *= 2


class NextFit(Packer):
    """Put each sample into the open pack, or into a new pack."""

    def pack(self, lengths: NDArray[np.int32], seed: int) -> int:
        num_packs = room = samples_left = 0
        for position in range(len(lengths)):
            length = lengths[position]
            if length > room or samples_left == 0:
                self.offsets[num_packs] = position
                num_packs += 1
                room, samples_left = self.limit, self.max_samples
            room -= length
            samples_left -= 1
            self.order[position] = position
        self.offsets[num_packs] = len(lengths)
        return num_packs


class FirstFit(Packer):
    """Put each sample into the first opened pack with room, found in a tree of maxima."""

    def __init__(self, limit: int, max_samples: int, most: int, *_: float):
        super().__init__(limit, max_samples, most)
        ints = cython.declare(cython.int[::1], np.empty(5 * most + 2, np.int32))
        self.pack_of, self.rooms = ints[:most], ints[most:]  # node n has children 2n and 2n + 1; leaf `leaves + pack`
        self.filled = np.empty(most + 1, np.int64)

    def pack(self, lengths: NDArray[np.int32], seed: int) -> int:
        rooms, sizes, pack_of = self.rooms, self.offsets, self.pack_of
        count, num_packs, leaves = len(lengths), 0, 1
        while leaves < count:
            leaves *= 2
        for node in range(2 * leaves):
            rooms[node] = 0
        for position in range(count + 1):
            sizes[position] = 0
        for position in range(count):
            length, node = lengths[position], 1
            if rooms[1] >= length:
                while node < leaves:
                    node = 2 * node if rooms[2 * node] >= length else 2 * node + 1
                chosen = node - leaves
            else:
                chosen = num_packs
                num_packs += 1
                rooms[leaves + chosen] = self.limit
            pack_of[position] = chosen
            sizes[chosen + 1] += 1
            node = leaves + chosen
            rooms[node] = rooms[node] - length if sizes[chosen + 1] < self.max_samples else 0
            while node > 1:
                node >>= 1
                rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
        for chosen in range(num_packs):
            self.filled[chosen] = sizes[chosen]
            sizes[chosen + 1] += sizes[chosen]
        for position in range(count):
            self.order[self.filled[pack_of[position]]] = position
            self.filled[pack_of[position]] += 1
        return num_packs


class Bins(Packer):
    """Open packs of up to `num_positions` consecutive positions, and scratch for up to `window` positions at a time.

    Bins with r tokens of room form a linked list `by_room[r]` through `next_bin`. A two-level bitmap over r finds the
    least sufficient r in a few instructions. The samples of a bin form a linked list through `following`, last sample
    first. The slot of a sample in `following` is `position & (len(following) - 1)`: slots are used again. first:
    position of a bin's first sample in the sequence. opened: open bins; bins from the last window come first. unused: a
    stack. turns: positions of a window in the order of placing. closing: the bins of `close`, then sorted by hash.
    """

    def __init__(self, limit: int, max_samples: int, most: int, num_positions: int):
        super().__init__(limit, max_samples, most)
        slots, num_words, num_blocks = 1, (limit >> 6) + 1, (limit >> 12) + 1
        while slots < num_positions:
            slots *= 2
        # Parts of two arrays: each array of NumPy takes longer than the packing of a few samples.
        self.ints, self.num_ints = np.empty(11 * slots + 2 * limit + 7, np.int32), 0
        words = cython.declare(cython.ulonglong[::1], np.zeros(num_words + num_blocks + 3 * slots, np.uint64))
        self.words, self.summary = words[:num_words], words[num_words : num_words + num_blocks]
        words = words[num_words + num_blocks :]
        self.first, self.unsorted_keys, self.keys = words[:slots], words[slots : 2 * slots], words[2 * slots :]
        self.next_bin, self.following, self.head = self.part(slots), self.part(slots), self.part(slots)
        self.size, self.room, self.opened = self.part(slots), self.part(slots), self.part(slots)
        self.unsorted, self.closing, self.unused = self.part(slots), self.part(slots), self.part(slots)
        self.turns, self.buckets = self.part(slots), self.part(slots + 3)
        self.by_room, self.counts = self.part(limit + 2), self.part(limit + 2)
        for slot in range(slots):
            self.unused[slot] = slot
        for room in range(self.limit + 2):
            self.by_room[room], self.counts[room] = -1, 0

    def part(self, count: int) -> NDArray[np.int32]:
        """Return the next numbers of `ints`."""
        self.num_ints += count
        return self.ints[self.num_ints - count : self.num_ints]

    def fill_window(self, lengths: NDArray[np.int32], num_samples: int, shift: int, num_open: int) -> int:
        """Put samples, in the order of `turns`, into the fullest packs with room; return the number of open bins."""
        mask = len(self.following) - 1
        for turn in range(num_samples):
            position = self.turns[turn]
            length = lengths[position]
            room = least_bit(self, length)
            if room >= 0:
                chosen = self.by_room[room]
                self.by_room[room] = self.next_bin[chosen]
                if self.by_room[room] < 0:
                    clear_bit(self, room)
            else:
                chosen = self.unused[mask - num_open]
                self.opened[num_open] = chosen
                num_open += 1
                self.head[chosen] = -1
                self.first[chosen] = position + shift
                self.size[chosen] = 0
                room = self.limit
            self.following[position & mask] = self.head[chosen]
            self.head[chosen] = position
            self.size[chosen] += 1
            room -= length
            self.room[chosen] = room
            if room > 0 and self.size[chosen] < self.max_samples:  # a full bin is in no list
                if self.by_room[room] < 0:
                    set_bit(self, room)
                self.next_bin[chosen] = self.by_room[room]
                self.by_room[room] = chosen
        return num_open

    def leave(self, chosen: int) -> None:
        """Empty the list with a bin."""
        room = self.room[chosen]
        if room > 0:
            self.by_room[room] = -1
            self.words[room >> 6] = 0
            self.summary[room >> 12] = 0

    def enter(self, num_open: int) -> None:
        """Enter the open bins into empty lists."""
        for at in range(num_open):
            chosen = self.opened[at]
            room = self.room[chosen]
            set_bit(self, room)
            self.next_bin[chosen] = self.by_room[room]
            self.by_room[room] = chosen

    def key(self, number: int, chosen: int, first: int, seed: int) -> None:
        """Set the bin `number` to close, and its hash: by position of the bin's first sample in the sequence."""
        self.unsorted[number] = chosen
        self.unsorted_keys[number] = mix(seed + first * GOLDEN)

    def sort_by_hash(self, count: int) -> None:
        """Sort the bins to close by hashes, which are evenly spread: a bucket per bin by high bits, then insertion."""
        keys, closing, buckets = self.keys, self.closing, self.buckets
        bits = 1
        while (1 << bits) < count:
            bits += 1
        shift, num_buckets = 64 - bits, 1 << bits
        for at in range(num_buckets + 1):
            buckets[at] = 0
        for at in range(count):
            buckets[(self.unsorted_keys[at] >> shift) + 1] += 1
        for at in range(num_buckets):
            buckets[at + 1] += buckets[at]
        for at in range(count):
            key = self.unsorted_keys[at]
            slot = buckets[key >> shift]
            buckets[key >> shift] += 1
            keys[slot], closing[slot] = key, self.unsorted[at]
        for at in range(1, count):
            key, chosen, slot = keys[at], closing[at], at
            while slot > 0 and keys[slot - 1] > key:
                keys[slot], closing[slot] = keys[slot - 1], closing[slot - 1]
                slot -= 1
            keys[slot], closing[slot] = key, chosen

    def emit(self, bins: NDArray[np.int32], count: int, num_packs: int) -> int:
        """Append the samples of bins as packs; return the new number of packs."""
        mask = len(self.following) - 1
        stop = self.offsets[num_packs]
        for at in range(count):
            chosen = bins[at]
            stop += self.size[chosen]
            write = stop
            position = self.head[chosen]
            while position >= 0:
                write -= 1
                self.order[write] = position
                position = self.following[position & mask]
            num_packs += 1
            self.offsets[num_packs] = stop
        return num_packs


class BestFit(Bins):
    """Best fit over windows of a sequence, or of a stretch; see packing.pack for the rules."""

    carried: NDArray[np.int64]
    firsts: NDArray[np.int64]

    def __init__(self, limit: int, max_samples: int, most: int, window: int, num_carried: int = 0, share: float = 0.0):
        self.window, self.share = min(window, max(most - num_carried, 1)), share
        super().__init__(limit, max_samples, most, self.window + max(self.window, num_carried))

    def pack(self, lengths: NDArray[np.int32], seed: int) -> int:
        return self.pack_stretch(lengths, 0, 0, True, seed)

    def sort_window(self, lengths: NDArray[np.int32], start: int, stop: int) -> None:
        """Write the order of placing a window: samples as given, then the fillers, longest first (counting sort).

        The fillers are the shortest samples, with `share` of the window's tokens. `counts` is zero before and after.
        """
        counts, turns = self.counts, self.turns
        total, shortest, longest = 0, self.limit + 2, 0
        for position in range(start, stop):
            length = lengths[position]
            counts[length] += 1
            total += length
            shortest, longest = min(shortest, length), max(longest, length)
        budget = cython.cast(cython.longlong, total * self.share)
        threshold, held, slot, num_large = 0, 0, stop - start, 0
        for size in range(shortest, longest + 1):
            held += counts[size] * size
            if held > budget:
                break
            threshold = size
            slot -= counts[size]
        for size in range(threshold, shortest - 1, -1):
            number = counts[size]
            counts[size] = slot
            slot += number
        for position in range(start, stop):
            length = lengths[position]
            if length > threshold:
                turns[num_large] = position
                num_large += 1
            else:
                turns[counts[length]] = position
                counts[length] += 1
        for size in range(shortest, longest + 1):
            counts[size] = 0

    def sort_few(self, lengths: NDArray[np.int32], start: int, stop: int) -> None:
        """Write the order of sort_window for a window of a few samples, by insertion."""
        by_length, turns = self.unsorted, self.turns  # longest first, equal lengths as given
        count, total = stop - start, 0
        for number in range(count):
            length = lengths[start + number]
            total += length
            slot = number
            while slot > 0 and lengths[by_length[slot - 1]] < length:
                by_length[slot] = by_length[slot - 1]
                slot -= 1
            by_length[slot] = start + number
        budget = cython.cast(cython.longlong, total * self.share)
        threshold, held, num_large, at = 0, 0, count, 0
        while num_large > 0:
            size = lengths[by_length[num_large - 1]]
            equal = num_large
            while equal > 0 and lengths[by_length[equal - 1]] == size:
                equal -= 1
            held += (num_large - equal) * size
            if held > budget:
                break
            threshold, num_large = size, equal
        for position in range(start, stop):
            if lengths[position] > threshold:
                turns[at] = position
                at += 1
        for at in range(num_large, count):
            turns[at] = by_length[at]

    def open_again(self, lengths: NDArray[np.int32], num_carried: int) -> None:
        """Open a bin for each carried pack: of samples at the beginning, between `carried`, in the order of packs."""
        slots = len(self.unused)
        for number in range(num_carried):
            chosen = self.unused[slots - 1 - number]
            self.opened[number] = chosen
            self.first[chosen] = self.firsts[number]
            self.size[chosen] = self.carried[number + 1] - self.carried[number]
            self.room[chosen] = self.limit
            self.head[chosen] = -1
            for position in range(self.carried[number], self.carried[number + 1]):
                self.room[chosen] -= lengths[position]
                self.following[position] = self.head[chosen]
                self.head[chosen] = position
        self.enter(num_carried)

    def close(self, num_last: int, num_open: int, seed: int) -> int:
        """Close the first `num_last` open bins and all nearly full bins; return the number left open."""
        least_room = cython.cast(cython.longlong, max(1.0, self.limit * CLOSED_BELOW))
        num_closing = num_kept = 0
        slots = len(self.unused)
        for at in range(num_open):
            chosen = self.opened[at]
            self.leave(chosen)  # every list is emptied; the bins that stay open are entered again below
            if at < num_last or self.room[chosen] < least_room or self.size[chosen] >= self.max_samples:
                self.key(num_closing, chosen, self.first[chosen], seed)
                self.unused[slots - num_open + num_closing] = chosen
                num_closing += 1
            else:
                self.opened[num_kept] = chosen
                num_kept += 1
        self.enter(num_kept)
        self.sort_by_hash(num_closing)
        return num_kept

    def pack_stretch(self, lengths: NDArray[np.int32], num_carried: int, position: int, last: bool, seed: int) -> int:
        """Return the number of packs of a stretch; the packs that stay open, `num_open`, are the last. See best_fit."""
        count = len(lengths)
        first_new = start = self.carried[num_carried] if num_carried else 0
        self.num_open, num_packs = num_carried, 0
        self.open_again(lengths, num_carried)
        while start < count:
            stop = min(start + self.window, count)
            if stop - start <= FEW_SAMPLES:
                self.sort_few(lengths, start, stop)
            else:
                self.sort_window(lengths, start, stop)
            num_before = self.num_open
            num_open = self.fill_window(lengths, stop - start, position - first_new, num_before)
            self.num_open = self.close(num_open if last and stop == count else num_before, num_open, seed)
            num_packs = self.emit(self.closing, num_open - self.num_open, num_packs)
            start = stop
        return self.emit(self.opened, self.num_open, num_packs)

    def close_all(self) -> None:
        """Empty the open bins of a stretch: the bins can pack another sequence."""
        slots = len(self.unused)
        for at in range(self.num_open):
            self.leave(self.opened[at])
            self.unused[slots - self.num_open + at] = self.opened[at]
        self.num_open = 0


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
    seed: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return packs by best fit over windows of a sequence, or of a stretch; see packing.pack for the rules, and Bins.

    A stretch begins with a window. carried: offsets of the packs that are open before the stretch; `lengths` begins
    with the lengths of their samples. firsts: positions in the sequence of the first samples of these packs. position:
    position of the stretch's first sample. last: the sequence ends with the stretch. filler_share: see sort_window.
    Returns order and offsets over `lengths`, and firsts of the packs that are still open, at the end of the order.
    """
    num_carried = cython.declare(cython.longlong, len(firsts))
    packer = BestFit(limit, max_samples, len(lengths), window, carried[num_carried], filler_share)
    if num_carried:
        packer.carried, packer.firsts = carried, firsts
    with cython.nogil:
        num_packs = packer.pack_stretch(lengths, num_carried, position, last, seed)
    order, offsets = packer.arrays(num_packs)
    still = [packer.first[packer.opened[number]] for number in range(packer.num_open)]
    return order, offsets, np.array(still, np.int64)


def next_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    packer = NextFit(limit, max_samples, len(lengths))
    with cython.nogil:
        num_packs = packer.pack(lengths, 0)
    return packer.arrays(num_packs)


def first_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    packer = FirstFit(limit, max_samples, len(lengths))
    with cython.nogil:
        num_packs = packer.pack(lengths, 0)
    return packer.arrays(num_packs)


# A set of small integers with a search for the least member from a number up: a bitmap in two levels.
#
# Bit w of the summary is set if word w has a bit.


def least_bit(bins: Bins, bit: int) -> int:
    """Return the least set bit from `bit` up; -1 if no bit is set."""
    at = bit >> 6
    word = bins.words[at] >> (bit & 63)
    if word != 0:
        return bit + low_bit(word)
    at += 1
    block_at = at >> 6
    if block_at >= len(bins.summary):
        return -1
    block = (bins.summary[block_at] >> (at & 63)) << (at & 63)
    while block == 0:
        block_at += 1
        if block_at == len(bins.summary):
            return -1
        block = bins.summary[block_at]
    at = (block_at << 6) + low_bit(block)
    return (at << 6) + low_bit(bins.words[at])


def set_bit(bins: Bins, bit: int) -> None:
    bins.words[bit >> 6] |= ONE << (bit & 63)
    bins.summary[bit >> 12] |= ONE << ((bit >> 6) & 63)


def clear_bit(bins: Bins, bit: int) -> None:
    bins.words[bit >> 6] &= ~(ONE << (bit & 63))
    if bins.words[bit >> 6] == 0:
        bins.summary[bit >> 12] &= ~(ONE << ((bit >> 6) & 63))
