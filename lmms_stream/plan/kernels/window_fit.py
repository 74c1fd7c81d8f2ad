"""Compiled loops of window_N: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

# mypy: allow-untyped-decorators, disable-error-code="assignment, return-value, no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...versions.numba import compiled
from .best_fit import FILLER_SHARE, Bins, emit, fill_window, mix, new_bins, sort_by_hash

CLOSED_BELOW = 1 / 64  # of a pack: samples of a pack with less room do not wait for the next window
NUM_TURNS = 3


@compiled(inline="always")
def _copy(numbers: NDArray[np.int32], target: NDArray[np.int32], start: int) -> None:
    """Copy the numbers from `start` on; numba takes two seconds to compile the assignment of a slice."""
    for at in range(start, len(numbers)):
        target[at] = numbers[at]


@compiled
def _order_turns(lengths: NDArray[np.int32], pool: NDArray[np.int32], number: int, turns: NDArray[np.int32]) -> None:
    """Write the order of placing the samples of a pool.

    number: 0, longest first; 1, as given, then fillers, longest first; 2, as given.
    """
    count = len(pool)
    if number == 2:
        _copy(pool, turns, 0)
        return
    of_pool = lengths[pool]
    by_length = pool[np.argsort(-of_pool, kind="mergesort")]
    if number == 0:
        _copy(by_length, turns, 0)
        return
    budget, held, num_large = np.int64(of_pool.sum() * FILLER_SHARE), np.int64(0), count
    while num_large > 0 and held + lengths[by_length[num_large - 1]] <= budget:
        held += lengths[by_length[num_large - 1]]
        num_large -= 1
    threshold = lengths[by_length[num_large]] if num_large < count else np.int32(0)
    at = 0
    for position in pool:
        if lengths[position] > threshold:
            turns[at] = position
            at += 1
    _copy(by_length, turns, at)


@compiled
def _has_waited(bins: Bins, chosen: int, num_waiting: int, pool: NDArray[np.int32]) -> bool:
    """Return whether a bin holds a sample of the window before, one of the first num_waiting samples of the pool."""
    if not num_waiting:
        return False
    position = bins.head[chosen]
    while position >= 0:
        if position <= pool[num_waiting - 1]:
            return True
        position = bins.following[position & (len(bins.following) - 1)]
    return False


@compiled
def _rooms(
    bins: Bins, num_bins: int, num_waiting: int, pool: NDArray[np.int32], least_room: int, closes: NDArray[np.bool_]
) -> int:
    """Write the bins that are done, empty the lists of rooms, and return the room left in the bins that are done."""
    lost = np.int64(0)
    for at in range(num_bins):
        chosen = bins.opened[at]
        room = bins.room[chosen]
        if room > 0:
            bins.by_room[room] = -1
            bins.words[room >> 6] = np.uint64(0)
            bins.summary[room >> 12] = np.uint64(0)
        closes[at] = room < least_room or _has_waited(bins, chosen, num_waiting, pool)
        lost += room if closes[at] else 0
    return lost


@compiled
def _pack_pool(
    bins: Bins,
    lengths: NDArray[np.int32],
    pool: NDArray[np.int32],
    num_waiting: int,
    limit: int,
    max_samples: int,
    closes: NDArray[np.bool_],
) -> int:
    """Pack a pool in the turns that give the fewest packs; return the number of packs.

    Among turns with equally many packs, take the first with the least room left in packs that are done. The first
    num_waiting samples of the pool are from the window before. closes: written, whether each pack is done.
    """
    least_room = max(1, np.int64(limit * CLOSED_BELOW))
    fewest = -(-lengths[pool].sum() // limit)
    best, last, num_best, least_lost = -1, -1, np.int64(0), np.int64(0)
    num_bins = np.int64(0)
    for number in range(NUM_TURNS):
        _order_turns(lengths, pool, number, bins.turns)
        num_bins, last = fill_window(bins, lengths, len(pool), 0, 0, limit, max_samples), number
        lost = _rooms(bins, num_bins, num_waiting, pool, least_room, closes)
        if best < 0 or num_bins < num_best or (num_bins == num_best and lost < least_lost):
            best, num_best, least_lost = number, num_bins, lost
        if num_bins == fewest and lost == 0:
            break
    if best != last:
        _order_turns(lengths, pool, best, bins.turns)
        num_bins = fill_window(bins, lengths, len(pool), 0, 0, limit, max_samples)
        _rooms(bins, num_bins, num_waiting, pool, least_room, closes)
    return num_bins


@compiled
def _position(firsts: NDArray[np.int64], position: int, index: int) -> int:
    """Return the position in the sequence of a sample of a stretch; see window_fit."""
    return firsts[index] if index < len(firsts) else index + position - len(firsts)


@compiled
def window_fit(
    lengths: NDArray[np.int32],
    firsts: NDArray[np.int64],
    position: int,
    last: bool,
    limit: int,
    max_samples: int,
    window: int,
    seed: np.uint64,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return packs of windows of a sequence, or of a stretch of a sequence; see packing.pack for the rules.

    A stretch begins with a window. firsts: positions in the sequence of the waiting samples; `lengths` begins with the
    lengths of these samples. position: position of the stretch's first sample. last: the sequence ends with the
    stretch. Returns order and offsets over `lengths`, and positions of the samples that wait afterwards: each is a pack
    of a single sample at the end of the order.
    """
    count, first_new = len(lengths), len(firsts)
    window = min(window, max(count - first_new, 1))
    bins = new_bins(window + max(window, first_new), window + max(window, first_new), limit)
    return window_fit_in(bins, lengths, firsts, position, last, limit, max_samples, window, seed)


@compiled
def window_fit_in(
    bins: Bins,
    lengths: NDArray[np.int32],
    firsts: NDArray[np.int64],
    position: int,
    last: bool,
    limit: int,
    max_samples: int,
    window: int,
    seed: np.uint64,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Call window_fit with bins used before for other sequences. bins: new_bins of at least twice the window."""
    count, first_new = len(lengths), len(firsts)
    order, offsets = np.empty(count, np.int32), np.zeros(count + 1, np.int64)
    waiting = np.arange(first_new).astype(np.int32)
    closes = np.empty(len(bins.opened), np.bool_)
    num_packs = 0
    for start in range(first_new, count, window):
        stop = min(start + window, count)
        pool = np.concatenate((waiting, np.arange(start, stop).astype(np.int32)))
        num_bins = _pack_pool(bins, lengths, pool, len(waiting), limit, max_samples, closes)
        closing, keys = np.empty(num_bins, np.int32), np.empty(num_bins, np.uint64)
        waits = np.zeros(len(pool), np.bool_)
        num_closing = 0
        for at in range(num_bins):
            chosen = bins.opened[at]
            head = bins.head[chosen]
            if closes[at] or bins.size[chosen] >= max_samples or (last and stop == count):
                keys[num_closing] = mix(
                    seed + np.uint64(_position(firsts, position, head)) * np.uint64(0x9E3779B97F4A7C15)
                )
                closing[num_closing] = chosen
                num_closing += 1
                continue
            while head >= 0:  # no sample of the bin has waited
                waits[len(waiting) + head - start] = True
                head = bins.following[head & (len(bins.following) - 1)]
        done = sort_by_hash(keys[:num_closing], closing[:num_closing])
        num_packs = emit(bins, done, order, offsets, num_packs)
        waiting = pool[waits]
    still = np.empty(len(waiting), np.int64)
    for number in range(len(waiting)):
        head = waiting[number]
        still[number] = _position(firsts, position, head)
        order[offsets[num_packs]] = head
        num_packs += 1
        offsets[num_packs] = offsets[num_packs - 1] + 1
    return order, offsets[: num_packs + 1].copy(), still
