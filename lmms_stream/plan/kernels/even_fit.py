"""Compiled loops of even fit: exchange samples between packs of best fit, for similar work of packs.

The work of a pack is the sum of len**2 over its samples. Packs of best fit have hardly any room left. Two packs can
only exchange samples with almost equal sums of tokens: two of 1000 tokens for three of 1500, 300 and 200.
"""

from __future__ import annotations

import cython
import numpy as np
from numpy.typing import NDArray

from .best_fit import BestFit, Packer

NUM_TURNS = 16  # each turn compares each pack with another pack
CHOSEN_BITS = 8  # maximum samples of a pack to exchange in a turn; all their subsets are compared
LEAST_GAP, LEAST_GAIN = 6, 8  # powers of 1/2: shares of the mean work, and of the difference of two packs


class Subsets:
    """Subsets of some samples of a pack: masks of CHOSEN_BITS bits.

    samples: the samples. sums: tokens << CHOSEN_BITS | mask, ascending. works: work of each mask.
    """

    def __init__(self) -> None:
        numbers = cython.declare(cython.longlong[:, ::1], np.zeros((3, 1 << CHOSEN_BITS), np.int64))
        self.samples, self.sums, self.works = numbers[0], numbers[1], numbers[2]

    def add(self, length: int, number: int) -> None:
        """Add the subsets with sample `number`: merge the sorted sums with and without the sample, from the largest."""
        count, work = 1 << number, length * length
        added, one, other = (length << CHOSEN_BITS) | count, count - 1, count - 1
        while other >= 0:  # sums[0] is the empty subset: `one` stays at 0
            without, included = self.sums[one], self.sums[other] + added
            is_without = cython.cast(cython.longlong, without > included)
            self.sums[one + other + 1] = max(without, included)
            one -= is_without
            other -= 1 - is_without
        for mask in range(count):
            self.works[count + mask] = self.works[mask] + work


class EvenFit(Packer):
    """Best fit, and packs while samples are exchanged. The samples of a pack form a linked list, longest first.

    of_window: positions of the samples packed together: waiting samples first. lengths: of these samples, then of the
    samples in packs.
    """

    def __init__(self, limit: int, max_samples: int, most: int, window: int, num_carried: int = 0, share: float = 0.0):
        super().__init__(limit, max_samples, most)
        self.best = BestFit(limit, max_samples, most, window, num_carried, share)
        self.window = window
        cython.declare(numbers=cython.longlong[:, ::1], ints=cython.int[:, ::1])
        numbers, ints = np.zeros((9, most + 1), np.int64), np.empty((4, most), np.int32)
        self.lengths, self.head, self.following, self.size = numbers[0], numbers[1], numbers[2], numbers[3]
        self.room, self.work, self.before, self.carried, self.firsts = (
            numbers[4], numbers[5], numbers[6], numbers[7], numbers[8]
        )  # fmt: skip
        self.of_window, self.tokens, self.ranks, self.scratch = ints[0], ints[1], ints[2], ints[3]
        self.of_heavy, self.of_light = Subsets(), Subsets()

    def pack(self, lengths: NDArray[np.int32], seed: int) -> int:
        return self.pack_stretch(lengths, 0, 0, True, seed)

    def put(self, pack: int, sample: int) -> None:
        """Insert a sample into the list of a pack."""
        length, at, before = self.lengths[sample], self.head[pack], -1
        while at >= 0 and self.lengths[at] > length:
            before, at = at, self.following[at]
        self.following[sample] = at
        if before < 0:
            self.head[pack] = sample
        else:
            self.following[before] = sample
        self.size[pack] += 1
        self.room[pack] -= length
        self.work[pack] += length * length

    def choose(self, pack: int, turn: int, subsets: Subsets) -> int:
        """Choose samples of a pack, evenly from long to short, others in each turn; return the number of subsets."""
        size = self.size[pack]
        count, at, place, number, num_subsets = min(size, CHOSEN_BITS), self.head[pack], 0, 0, 1
        subsets.sums[0] = 0
        while number < count:
            if place < (number * size + turn * size // NUM_TURNS) // count:
                place += 1
                at = self.following[at]
                continue
            subsets.samples[number] = at
            subsets.add(self.lengths[at], number)
            num_subsets *= 2
            number += 1
            place += 1
            at = self.following[at]
        return num_subsets

    def move(self, pack: int, other: int, subsets: Subsets, mask: int) -> None:
        """Move the samples of a mask from a pack to another."""
        at, before, number = self.head[pack], -1, 0
        while mask >> number:
            sample, at = at, self.following[at]
            is_chosen = cython.cast(cython.longlong, sample == subsets.samples[number])
            moves = is_chosen & (mask >> number)
            number += is_chosen
            if not moves:
                before = sample
                continue
            if before < 0:
                self.head[pack] = at
            else:
                self.following[before] = at
            self.size[pack] -= 1
            self.room[pack] += self.lengths[sample]
            self.work[pack] -= self.lengths[sample] * self.lengths[sample]
        for place in range(number):
            if (mask >> place) & 1:
                self.put(other, subsets.samples[place])

    def exchange(
        self, heavy: int, light: int, of_heavy: Subsets, of_light: Subsets, num_heavy: int, num_light: int
    ) -> None:
        """Exchange the subsets of two packs with the most similar work of the packs afterwards."""
        gap, room_heavy, room_light = self.work[heavy] - self.work[light], self.room[heavy], self.room[light]
        sums = of_light.sums
        most = self.max_samples - max(self.size[heavy], self.size[light])
        low_bits = (1 << CHOSEN_BITS) - 1
        best, given, received, first = gap >> LEAST_GAIN, -1, -1, 0
        enough = gap // 2 - gap // 16
        for number in range(num_heavy):
            tokens, mask = of_heavy.sums[number] >> CHOSEN_BITS, of_heavy.sums[number] & low_bits
            least, end = (tokens - room_light) << CHOSEN_BITS, (tokens + room_heavy + 1) << CHOSEN_BITS
            while first < num_light and sums[first] < least:
                first += 1
            at = first
            while at < num_light and sums[at] < end:
                other = sums[at] & low_bits
                moved = of_heavy.works[mask] - of_light.works[other]
                gain = min(moved, gap - moved)
                if gain > best and (most >= CHOSEN_BITS or self.count_fits(heavy, light, mask, other)):
                    best, given, received = gain, mask, other
                at += 1
            if best >= enough:
                break
        if given >= 0:
            self.move(heavy, light, of_heavy, given)
            self.move(light, heavy, of_light, received)

    def count_fits(self, heavy: int, light: int, given: int, received: int) -> bool:
        """Return whether no pack has more than `max_samples` samples after an exchange."""
        change = 0
        for number in range(CHOSEN_BITS):
            change += (received >> number & 1) - (given >> number & 1)
        return self.size[heavy] + change <= self.max_samples and self.size[light] - change <= self.max_samples

    def even_out(self, num_packs: int) -> None:
        """Exchange samples of the first packs of `best` for similar work; change its order and offsets in place.

        No pack has more than `limit` tokens, nor more work than the heaviest pack had.
        """
        half, total, write = num_packs // 2, 0, 0
        for pack in range(num_packs):
            self.head[pack], self.size[pack], self.room[pack], self.work[pack] = -1, 0, self.limit, 0
            for sample in range(self.best.offsets[pack], self.best.offsets[pack + 1]):
                self.before[sample] = self.best.order[sample]
                self.lengths[sample] = self.tokens[self.best.order[sample]]
                self.put(pack, sample)
            total += self.work[pack]
        least_gap = (total // max(num_packs, 1)) >> LEAST_GAP
        for turn in range(NUM_TURNS):
            for pack in range(num_packs):
                self.ranks[pack] = pack
            self.sort(self.work, self.ranks, self.scratch, num_packs)
            for number in range(half):
                heavy = self.ranks[num_packs - 1 - number]
                light = self.ranks[(number + turn * half // NUM_TURNS) % half]
                if self.work[heavy] - self.work[light] > least_gap:
                    num_heavy, num_light = (
                        self.choose(heavy, turn, self.of_heavy), self.choose(light, turn, self.of_light)
                    )  # fmt: skip
                    self.exchange(heavy, light, self.of_heavy, self.of_light, num_heavy, num_light)
        for pack in range(num_packs):
            at = self.head[pack]
            while at >= 0:
                self.best.order[write] = self.before[at]
                at, write = self.following[at], write + 1
            self.best.offsets[pack + 1] = write

    def pack_stretch(self, lengths: NDArray[np.int32], num_carried: int, position: int, last: bool, seed: int) -> int:
        """Return the number of packs of a stretch; the packs that stay open, `num_open`, are the last. See best_fit."""
        count, num_packs, write = len(lengths), 0, 0
        start = first_new = num_waiting = self.carried[num_carried] if num_carried else 0
        for at in range(num_waiting):
            self.of_window[at] = at
        self.best.carried, self.best.firsts = self.carried, self.firsts
        while start < count:
            stop = min(start + self.window, count)
            for at in range(start, stop):
                self.of_window[num_waiting + at - start] = at
            size = num_waiting + stop - start
            for at in range(size):
                self.tokens[at] = lengths[self.of_window[at]]
            num_found = self.best.pack_stretch(
                self.tokens[:size], num_carried, position + start - first_new, last and stop == count, seed
            )
            num_carried = self.best.num_open
            num_closed = num_found - num_carried
            self.even_out(num_closed)
            closed = self.best.offsets[num_closed]
            for at in range(closed):
                self.order[write + at] = self.of_window[self.best.order[at]]
            for pack in range(num_closed):
                self.offsets[num_packs + pack + 1] = write + self.best.offsets[pack + 1]
            num_packs += num_closed
            write += closed
            num_waiting = size - closed
            for at in range(num_waiting):
                self.scratch[at] = self.of_window[self.best.order[closed + at]]
            for at in range(num_waiting):
                self.of_window[at] = self.scratch[at]
            for pack in range(num_carried):
                self.carried[pack + 1] = self.best.offsets[num_closed + pack + 1] - closed
                self.firsts[pack] = self.best.first[self.best.opened[pack]]
            self.best.close_all()
            start = stop
        for at in range(num_waiting):
            self.order[write + at] = self.of_window[at]
        for pack in range(num_carried):
            self.offsets[num_packs + pack + 1] = write + self.carried[pack + 1]
        self.num_open = num_carried
        return num_packs + num_carried


def even_fit(
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
    """Return the packs of best_fit, evened among the packs that a window closes. Arguments, result: see best_fit."""
    num_carried = cython.declare(cython.longlong, len(firsts))
    packer = EvenFit(limit, max_samples, len(lengths), window, carried[num_carried], filler_share)
    for number in range(num_carried):
        packer.carried[number + 1], packer.firsts[number] = carried[number + 1], firsts[number]
    with cython.nogil:
        num_packs = packer.pack_stretch(lengths, num_carried, position, last, seed)
    order, offsets = packer.arrays(num_packs)
    return order, offsets, np.array([packer.firsts[number] for number in range(packer.num_open)], np.int64)
