"""Compiled loops of window_N: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

from __future__ import annotations

import cython
import numpy as np
from numpy.typing import NDArray

from .best_fit import FILLER_SHARE, Bins

CLOSED_BELOW = 1 / 64  # of a pack: samples of a pack with less room do not wait for the next window
NUM_TURNS = 3


class WindowFit(Bins):
    """Packs of windows of a sequence, or of a stretch; see packing.pack for the rules.

    pool: positions of a window, the `num_waiting` samples of the window before first. closes: whether each bin is done.
    waits: whether each sample of the pool waits for the next window.
    """

    firsts: NDArray[np.int64]

    def __init__(
        self, limit: int, max_samples: int, most: int, window: int, num_waiting: int = 0, share: float = FILLER_SHARE
    ):
        cython.declare(ints=cython.int[:, ::1])
        self.share, self.window = share, min(window, max(most - num_waiting, 1))
        positions = self.window + max(self.window, num_waiting)
        super().__init__(limit, max_samples, most, positions)
        ints = np.empty((5, len(self.unused)), np.int32)
        self.pool, self.by_length, self.scratch, self.closes, self.waits = ints[0], ints[1], ints[2], ints[3], ints[4]
        self.sort_keys, self.num_firsts = np.empty(positions, np.int64), 0

    def pack(self, lengths: NDArray[np.int32], seed: int) -> int:
        return self.pack_stretch(lengths, 0, 0, True, seed)

    def order_turns(self, lengths: NDArray[np.int32], count: int, number: int) -> None:
        """Write the order of placing the samples of a pool.

        number: 0, longest first; 1, as given, then fillers, longest first; 2, as given.
        """
        pool, turns, by_length = self.pool, self.turns, self.by_length
        if number == 2:
            for at in range(count):
                turns[at] = pool[at]
            return
        total, held, num_large, placed, threshold = 0, 0, count, 0, 0
        for at in range(count):
            by_length[at], self.sort_keys[at] = at, -lengths[pool[at]]
            total += lengths[pool[at]]
        self.sort(self.sort_keys, by_length, self.scratch, count)
        for at in range(count):
            by_length[at] = pool[by_length[at]]
        if number == 1:
            budget = cython.cast(cython.longlong, total * self.share)
            while num_large > 0 and held + lengths[by_length[num_large - 1]] <= budget:
                held += lengths[by_length[num_large - 1]]
                num_large -= 1
            threshold = lengths[by_length[num_large]] if num_large < count else 0
            for at in range(count):
                if lengths[pool[at]] > threshold:
                    turns[placed] = pool[at]
                    placed += 1
        for at in range(placed, count):
            turns[at] = by_length[at]

    def has_waited(self, chosen: int, num_waiting: int) -> bool:
        """Return whether a bin holds a sample of the window before: one of the first num_waiting of the pool."""
        position = self.head[chosen] if num_waiting else -1
        while position >= 0:
            if position <= self.pool[num_waiting - 1]:
                return True
            position = self.following[position & (len(self.following) - 1)]
        return False

    def try_turns(self, lengths: NDArray[np.int32], count: int, num_waiting: int, number: int) -> int:
        """Pack a pool in an order; write the bins that are done; set `lost`, the room left in them; return the bins."""
        least_room = cython.cast(cython.longlong, max(1.0, self.limit * CLOSED_BELOW))
        self.order_turns(lengths, count, number)
        num_bins = self.fill_window(lengths, count, 0, 0)
        self.lost = 0
        for at in range(num_bins):
            chosen = self.opened[at]
            self.leave(chosen)
            self.closes[at] = self.room[chosen] < least_room or self.has_waited(chosen, num_waiting)
            self.lost += self.room[chosen] if self.closes[at] else 0
        return num_bins

    def pack_pool(self, lengths: NDArray[np.int32], count: int, num_waiting: int) -> int:
        """Pack a pool in the turns that give the fewest packs; return the number of packs.

        Among turns with equally many packs, take the first with the least room left in packs that are done.
        """
        total = best = num_bins = num_best = least_lost = 0
        for at in range(count):
            total += lengths[self.pool[at]]
        for number in range(NUM_TURNS):
            num_bins = self.try_turns(lengths, count, num_waiting, number)
            if number == 0 or num_bins < num_best or (num_bins == num_best and self.lost < least_lost):
                best, num_best, least_lost = number, num_bins, self.lost
            if num_bins == (total + self.limit - 1) // self.limit and self.lost == 0:
                break
        if best != number:
            num_bins = self.try_turns(lengths, count, num_waiting, best)
        return num_bins

    def position_of(self, position: int, index: int) -> int:
        """Return the position in the sequence of a sample of a stretch; see window_fit."""
        return self.firsts[index] if index < self.num_firsts else index + position - self.num_firsts

    def pack_stretch(self, lengths: NDArray[np.int32], num_waiting: int, position: int, last: bool, seed: int) -> int:
        """Return the number of packs of a stretch, without the `num_open` samples of the pool that wait afterwards."""
        count, start, num_packs, mask = len(lengths), num_waiting, 0, len(self.following) - 1
        for at in range(num_waiting):
            self.pool[at] = at
        while start < count:
            stop = min(start + self.window, count)
            for at in range(start, stop):
                self.pool[num_waiting + at - start] = at
            pool_size, num_closing = num_waiting + stop - start, 0
            num_bins = self.pack_pool(lengths, pool_size, num_waiting)
            for at in range(pool_size):
                self.waits[at] = False
            for at in range(num_bins):
                chosen = self.opened[at]
                head = self.head[chosen]
                if self.closes[at] or self.size[chosen] >= self.max_samples or (last and stop == count):
                    self.key(num_closing, chosen, self.position_of(position, head), seed)
                    num_closing += 1
                    continue
                while head >= 0:  # no sample of the bin has waited
                    self.waits[num_waiting + head - start] = True
                    head = self.following[head & mask]
            self.sort_by_hash(num_closing)
            num_packs = self.emit(self.closing, num_closing, num_packs)
            num_waiting = 0
            for at in range(pool_size):
                if self.waits[at]:
                    self.pool[num_waiting] = self.pool[at]
                    num_waiting += 1
            start = stop
        self.num_open = num_waiting
        return num_packs


def window_fit(
    lengths: NDArray[np.int32],
    firsts: NDArray[np.int64],
    position: int,
    last: bool,
    limit: int,
    max_samples: int,
    window: int,
    seed: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return packs of windows of a sequence, or of a stretch of a sequence; see packing.pack for the rules.

    A stretch begins with a window. firsts: positions in the sequence of the waiting samples; `lengths` begins with the
    lengths of these samples. position: position of the stretch's first sample. last: the sequence ends with the
    stretch. Returns order and offsets over `lengths`, and positions of the samples that wait afterwards: each is a pack
    of a single sample at the end of the order.
    """
    num_waiting = cython.declare(cython.longlong, len(firsts))
    packer = WindowFit(limit, max_samples, len(lengths), window, num_waiting)
    if num_waiting:
        packer.firsts, packer.num_firsts = firsts, num_waiting
    with cython.nogil:
        num_packs = packer.pack_stretch(lengths, num_waiting, position, last, seed)
    still = [packer.position_of(position, packer.pool[number]) for number in range(packer.num_open)]
    for number in range(packer.num_open):
        packer.order[packer.offsets[num_packs]] = packer.pool[number]
        num_packs += 1
        packer.offsets[num_packs] = packer.offsets[num_packs - 1] + 1
    order, offsets = packer.arrays(num_packs)
    return order, offsets, np.array(still, np.int64)
