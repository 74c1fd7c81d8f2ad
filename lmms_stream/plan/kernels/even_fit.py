"""Compiled loops of even fit: exchange samples between packs of best fit, for similar work of packs.

The work of a pack is the sum of len**2 over its samples. Packs of best fit have hardly any room left. Two packs can
only exchange samples with almost equal sums of tokens: two of 1000 tokens for three of 1500, 300 and 200.
"""

# mypy: allow-untyped-decorators, disable-error-code="assignment, return-value, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...versions.numba import compiled
from .best_fit import best_fit

NUM_TURNS = 16  # each turn compares each pack with another pack
CHOSEN_BITS = 8  # maximum samples of a pack to exchange in a turn; all their subsets are compared
LEAST_GAP, LEAST_GAIN = 6, 8  # powers of 1/2: shares of the mean work, and of the difference of two packs

_Numbers = NDArray[np.int64]


class _Evened(NamedTuple):
    """Packs while samples are exchanged. The samples of a pack form a linked list, longest first."""

    lengths: _Numbers
    head: _Numbers
    following: _Numbers
    size: _Numbers
    room: _Numbers
    work: _Numbers


class _Subsets(NamedTuple):
    """Subsets of some samples of a pack: masks of CHOSEN_BITS bits.

    samples: the samples. sums: tokens << CHOSEN_BITS | mask, ascending. works: work of each mask.
    """

    samples: _Numbers
    sums: _Numbers
    works: _Numbers


@compiled
def _new_subsets() -> _Subsets:
    count = 1 << CHOSEN_BITS
    return _Subsets(np.zeros(CHOSEN_BITS, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64))


@compiled
def _put(packs: _Evened, pack: int, sample: int) -> None:
    """Insert a sample into the list of a pack."""
    length = packs.lengths[sample]
    at, before = packs.head[pack], np.int64(-1)
    while at >= 0 and packs.lengths[at] > length:
        before, at = at, packs.following[at]
    packs.following[sample] = at
    if before < 0:
        packs.head[pack] = sample
    else:
        packs.following[before] = sample
    packs.size[pack] += 1
    packs.room[pack] -= length
    packs.work[pack] += length * length


@compiled
def _choose(packs: _Evened, pack: int, turn: int, subsets: _Subsets) -> int:
    """Choose samples of a pack, evenly from long to short, others in each turn; return the number of their subsets."""
    size = packs.size[pack]
    count = min(size, CHOSEN_BITS)
    at, place, number = packs.head[pack], 0, 0
    subsets.sums[0], num_subsets = 0, 1
    while number < count:
        if place < (number * size + turn * size // NUM_TURNS) // count:
            place += 1
            at = packs.following[at]
            continue
        subsets.samples[number] = at
        _add(packs.lengths[at], number, subsets.sums, subsets.works)
        num_subsets *= 2
        number += 1
        place += 1
        at = packs.following[at]
    return num_subsets


@compiled
def _add(length: int, number: int, sums: _Numbers, works: _Numbers) -> None:
    """Add the subsets with sample `number`: merge the sorted sums with and without the sample, from the largest on."""
    count, added, work = 1 << number, (length << CHOSEN_BITS) | (1 << number), length * length
    one = other = count - 1
    while other >= 0:  # sums[0] is the empty subset: `one` stays at 0
        without, included = sums[one], sums[other] + added
        is_without = np.int64(without > included)
        sums[one + other + 1] = max(without, included)
        one -= is_without
        other -= 1 - is_without
    for mask in range(count):
        works[count + mask] = works[mask] + work


@compiled
def _move(packs: _Evened, pack: int, other: int, subsets: _Subsets, mask: int) -> None:
    """Move the samples of a mask from a pack to another."""
    before, at, number = np.int64(-1), packs.head[pack], 0
    while mask >> number:
        sample, at = at, packs.following[at]
        is_chosen = sample == subsets.samples[number]
        moves = is_chosen and (mask >> number) & 1
        number += is_chosen
        if not moves:
            before = sample
            continue
        if before < 0:
            packs.head[pack] = at
        else:
            packs.following[before] = at
        packs.size[pack] -= 1
        packs.room[pack] += packs.lengths[sample]
        packs.work[pack] -= packs.lengths[sample] * packs.lengths[sample]
    for place in range(number):
        if (mask >> place) & 1:
            _put(packs, other, subsets.samples[place])


@compiled
def _exchange(
    packs: _Evened,
    heavy: int,
    light: int,
    of_heavy: _Subsets,
    of_light: _Subsets,
    num_heavy: int,
    num_light: int,
    most: int,
) -> None:
    """Exchange the subsets of two packs with the most similar work of the packs afterwards.

    most: maximum samples of a pack.
    """
    heavy_sums, heavy_works, light_sums, light_works = of_heavy.sums, of_heavy.works, of_light.sums, of_light.works
    gap = packs.work[heavy] - packs.work[light]
    room_heavy, room_light = packs.room[heavy], packs.room[light]
    all_fit = packs.size[heavy] + CHOSEN_BITS <= most and packs.size[light] + CHOSEN_BITS <= most
    low_bits = (1 << CHOSEN_BITS) - 1
    best, given, received = gap >> LEAST_GAIN, -1, -1
    enough = gap // 2 - gap // 16
    first = 0
    for number in range(num_heavy):
        tokens, mask = heavy_sums[number] >> CHOSEN_BITS, heavy_sums[number] & low_bits
        least, end = (tokens - room_light) << CHOSEN_BITS, (tokens + room_heavy + 1) << CHOSEN_BITS
        while first < num_light and light_sums[first] < least:
            first += 1
        at = first
        while at < num_light and light_sums[at] < end:
            other = light_sums[at] & low_bits
            moved = heavy_works[mask] - light_works[other]
            gain = min(moved, gap - moved)
            if gain > best and (all_fit or _count_fits(packs, heavy, light, mask, other, most)):
                best, given, received = gain, mask, other
            at += 1
        if best >= enough:
            break
    if given >= 0:
        _move(packs, heavy, light, of_heavy, given)
        _move(packs, light, heavy, of_light, received)


@compiled
def _count_fits(packs: _Evened, heavy: int, light: int, given: int, received: int, most: int) -> bool:
    """Return whether no pack has more than `most` samples after an exchange."""
    change = 0
    for number in range(CHOSEN_BITS):
        change += (received >> number & 1) - (given >> number & 1)
    return packs.size[heavy] + change <= most and packs.size[light] - change <= most


@compiled
def even_out(
    lengths: NDArray[np.int32], order: NDArray[np.int32], offsets: _Numbers, limit: int, max_samples: int
) -> None:
    """Exchange samples of packs for similar work; change order and offsets in place.

    No pack has more than `limit` tokens, nor more work than the heaviest pack had. order, offsets: see packing.Packs.
    """
    count, num_packs = offsets[-1], len(offsets) - 1
    packs = _Evened(
        np.empty(count, np.int64), np.full(num_packs, -1, np.int64), np.empty(count, np.int64),
        np.zeros(num_packs, np.int64), np.full(num_packs, limit, np.int64), np.zeros(num_packs, np.int64),
    )  # fmt: skip
    for pack in range(num_packs):
        for sample in range(offsets[pack], offsets[pack + 1]):
            packs.lengths[sample] = lengths[order[sample]]
            _put(packs, pack, sample)
    of_heavy, of_light = _new_subsets(), _new_subsets()
    half = num_packs // 2
    least_gap = (packs.work.sum() // max(num_packs, 1)) >> LEAST_GAP
    for turn in range(NUM_TURNS):
        ranks = np.argsort(packs.work, kind="mergesort")
        for number in range(half):
            heavy, light = ranks[num_packs - 1 - number], ranks[(number + turn * half // NUM_TURNS) % half]
            if packs.work[heavy] - packs.work[light] > least_gap:
                num_heavy, num_light = _choose(packs, heavy, turn, of_heavy), _choose(packs, light, turn, of_light)
                _exchange(packs, heavy, light, of_heavy, of_light, num_heavy, num_light, max_samples)
    before, write = order[:count].copy(), 0
    for pack in range(num_packs):
        at = packs.head[pack]
        while at >= 0:
            order[write] = before[at]
            at, write = packs.following[at], write + 1
        offsets[pack + 1] = write


@compiled
def even_fit(
    lengths: NDArray[np.int32],
    carried: _Numbers,
    firsts: _Numbers,
    position: int,
    last: bool,
    limit: int,
    max_samples: int,
    window: int,
    filler_share: float,
    seed: np.uint64,
) -> tuple[NDArray[np.int32], _Numbers, _Numbers]:
    """Return the packs of best_fit, evened among the packs that a window closes. Arguments, result: see best_fit."""
    count, first_new = len(lengths), carried[-1]
    order, offsets, num_packs = np.empty(count, np.int32), np.zeros(count + 1, np.int64), 0
    waiting = np.arange(first_new).astype(np.int32)
    for start in range(first_new, count, window):
        stop = min(start + window, count)
        samples = np.concatenate((waiting, np.arange(start, stop).astype(np.int32)))
        packed, ends, firsts = best_fit(
            lengths[samples], carried, firsts, position + start - first_new, last and stop == count, limit, max_samples,
            window, filler_share, seed,
        )  # fmt: skip
        num_closed = len(ends) - 1 - len(firsts)
        even_out(lengths[samples], packed, ends[: num_closed + 1], limit, max_samples)
        closed, write = ends[num_closed], offsets[num_packs]
        order[write : write + closed] = samples[packed[:closed]]
        offsets[num_packs + 1 : num_packs + num_closed + 1] = ends[1 : num_closed + 1] + write
        num_packs += num_closed
        waiting, carried = samples[packed[closed:]], ends[num_closed:] - closed
    write = offsets[num_packs]
    order[write:] = waiting
    offsets[num_packs + 1 : num_packs + len(firsts) + 1] = carried[1:] + write
    return order, offsets[: num_packs + len(firsts) + 1].copy(), firsts
