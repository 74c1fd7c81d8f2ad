"""Compiled loops in which the sources of a mixture take turns.

With a thousand sources, a loop over all sources for every pack would take most of a step. Sources that lack too little
for a turn wait in a heap, sorted by the turn in which they lack enough. Sources that lack enough are in another heap,
sorted by deadline. Reading a source updates its lack.

Turns by tokens have two clocks. Shares are of the given tokens. Deadlines count turns of full packs, because the turns
up to a later phase are known, and the tokens are not. Packs are at most full, and a deadline in a heap may be too
early: the loop computes the deadline again before it chooses the source. With constant weights, the order of deadlines
is the order by tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...versions.numba import compiled

NEVER = np.int64(1) << 62

_Numbers = NDArray[np.int64]


@compiled
def _deadline(source: int, lack: int, turn: int, most: int, quotas: _Numbers, ends: _Numbers, phase: int) -> int:
    """Return the last turn in which a source, lacking `lack` before `turn`, does not yet lack more than `most`."""
    for row in range(phase, len(ends)):
        stop = ends[row]
        quota = quotas[row, source]
        if quota > 0 and stop > turn:
            waits = (most - lack) // quota - 1
            if turn + waits < stop - 1:  # at the last turn of a phase the next phase decides
                return turn + waits
            lack += quota * (stop - turn)
        turn = max(turn, stop)
    return NEVER


@compiled
def _eligible(lack: int, quota: int, turn: int, least: int) -> int:
    """Return the first turn in which a source lacks at least `least`, at a constant quota; lack: before `turn`."""
    if lack + quota >= least:
        return turn
    return turn + (least - lack + quota - 1) // quota - 1 if quota > 0 else NEVER


@compiled
def _push(heap: _Numbers, size: int, key: int, source: int) -> None:
    """Add a source to a heap of `size` sources: int64[sources, 2], keys and sources, ties to the first source."""
    here = size
    while here > 0:
        parent = (here - 1) // 2
        if heap[parent, 0] < key or (heap[parent, 0] == key and heap[parent, 1] < source):
            break
        heap[here, 0], heap[here, 1] = heap[parent, 0], heap[parent, 1]
        here = parent
    heap[here, 0], heap[here, 1] = key, source


@compiled
def _pop(heap: _Numbers, size: int) -> None:
    """Remove the first source from a heap of `size` sources."""
    size -= 1
    key, source = heap[size, 0], heap[size, 1]
    here = 0
    while True:
        child = 2 * here + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            heap[other, 0] < heap[child, 0] or (heap[other, 0] == heap[child, 0] and heap[other, 1] < heap[child, 1])
        ):
            child = other
        if key < heap[child, 0] or (key == heap[child, 0] and source < heap[child, 1]):
            break
        heap[here, 0], heap[here, 1] = heap[child, 0], heap[child, 1]
        here = child
    heap[here, 0], heap[here, 1] = key, source


class Sizes(NamedTuple):
    """Tokens of the next packs of each source.

    tokens: int64[k, n]; tokens[source, used[source] : have[source]] are known. goes_on: bool[k], whether the last of
    them is perhaps not the last pack of its epoch. full: tokens of a full pack. To count packs: full 1, and n 0.
    """

    tokens: _Numbers
    used: _Numbers
    have: _Numbers
    goes_on: NDArray[np.bool_]
    full: int


def no_sizes(num_sources: int) -> Sizes:
    """Return the sizes of sources whose packs count."""
    nothing = np.zeros(num_sources, np.int64)
    return Sizes(np.zeros((num_sources, 0), np.int64), nothing, nothing, np.zeros(num_sources, np.bool_), 1)


class _Turns(NamedTuple):
    """State of sources that take turns; see take_epochs.

    known: int64[k], the clock at which credits[source] was updated. deadlines: int64[k]. waiting, ready: heaps,
    int64[k, 2]. sizes: int64[4], sources in waiting, sources in ready, the phase, and the clock: packs, or tokens,
    given so far. givers: int64[k], sources in the order of their first turn since `taken` was 0.
    """

    known: _Numbers
    deadlines: _Numbers
    waiting: _Numbers
    ready: _Numbers
    sizes: _Numbers
    givers: _Numbers


@compiled
def _begin(credits: _Numbers, quotas: _Numbers, ends: _Numbers, unit: int, least: int) -> _Turns:
    """Return the state before the first turn; all sources wait."""
    num_sources = len(credits)
    waiting, ready = np.empty((num_sources, 2), np.int64), np.empty((num_sources, 2), np.int64)
    deadlines = np.empty(num_sources, np.int64)
    for source in range(num_sources):
        deadlines[source] = _deadline(source, credits[source], 0, unit - least, quotas, ends, 0)
        _push(waiting, source, _eligible(credits[source], quotas[0, source], 0, least), source)
    known, givers = np.zeros(num_sources, np.int64), np.empty(num_sources, np.int64)
    return _Turns(known, deadlines, waiting, ready, np.array([num_sources, 0, 0, 0]), givers)


@compiled
def _take(
    turns: _Turns,
    turn: int,
    count: int,
    left: _Numbers,
    credits: _Numbers,
    quotas: _Numbers,
    ends: _Numbers,
    unit: int,
    least: int,
    taken: _Numbers,
    sizes: Sizes,
) -> tuple[int, int]:
    """Take the turns from `turn` to `count`, or until a source ends. Return the next turn, and the number of givers.

    left: int64[k], packs left in each source, 1 or more. taken: int64[k], packs since the givers were counted. Each
    turn goes to the source with the earliest deadline, among sources that lack at least `least` (see turn_taking.py).
    For other arguments see take_epochs.
    """
    known, deadlines, waiting, ready = turns.known, turns.deadlines, turns.waiting, turns.ready
    num_waiting, num_ready, phase, clock = turns.sizes[0], turns.sizes[1], turns.sizes[2], turns.sizes[3]
    counts_tokens, full = sizes.tokens.shape[1] > 0, sizes.full
    num_givers, cost = 0, np.int64(1)
    is_done = False
    while turn < count and not is_done:
        if turn * full >= ends[phase]:
            for source in range(len(left)):
                credits[source] += quotas[phase, source] * (clock - known[source])
                known[source] = clock
            phase += 1
            for at in range(num_waiting):  # each prefix is a heap before the next source is pushed behind the prefix
                source = waiting[at, 1]
                _push(waiting, at, _eligible(credits[source], quotas[phase, source], known[source], least), source)
            continue
        while num_waiting > 0 and waiting[0, 0] <= clock:
            source = waiting[0, 1]
            _pop(waiting, num_waiting)
            num_waiting -= 1
            _push(ready, num_ready, deadlines[source], source)
            num_ready += 1
        source = ready[0, 1]
        _pop(ready, num_ready)
        num_ready -= 1
        if counts_tokens:
            credits[source] += quotas[phase, source] * (clock - known[source])
            known[source] = clock
            key = _deadline(source, credits[source], turn * full, unit - least, quotas, ends, phase)
            if num_ready > 0 and (key > ready[0, 0] or (key == ready[0, 0] and source > ready[0, 1])):
                _push(ready, num_ready, key, source)
                num_ready += 1
                continue
            cost = sizes.tokens[source, sizes.used[source]]
            sizes.used[source] += 1
        turn += 1
        clock += cost
        credits[source] += quotas[phase, source] * (clock - known[source]) - unit // full * cost
        known[source] = clock
        if taken[source] == 0:
            turns.givers[num_givers] = source
            num_givers += 1
        taken[source] += 1
        left[source] -= 1
        is_done = left[source] == 0
        deadlines[source] = _deadline(source, credits[source], turn * full, unit - least, quotas, ends, phase)
        _push(waiting, num_waiting, _eligible(credits[source], quotas[phase, source], clock, least), source)
        num_waiting += 1
    turns.sizes[0], turns.sizes[1], turns.sizes[2], turns.sizes[3] = num_waiting, num_ready, phase, clock
    return turn, num_givers


@compiled
def _end(turns: _Turns, credits: _Numbers, quotas: _Numbers) -> None:
    """Update what all sources lack."""
    for source in range(len(credits)):
        credits[source] += quotas[turns.sizes[2], source] * (turns.sizes[3] - turns.known[source])


@compiled
def _left(
    source: int,
    at: _Numbers,
    packs: _Numbers,
    counts: _Numbers,
    first_counts: _Numbers,
    until: _Numbers,
    sizes: Sizes,
) -> int:
    """Return the packs left in a source's epoch, or up to the last pack to take, or to the last with known tokens."""
    left = counts[first_counts[source] + at[source]] - packs[source]
    if until[0] == source and at[source] == until[1]:
        left = until[2] + 1 - packs[source]
    if sizes.tokens.shape[1] > 0:
        left = min(left, sizes.have[source] - sizes.used[source])
    return left


@compiled
def _pass_epochs(count: int, at: _Numbers, packs: _Numbers, counts: _Numbers) -> tuple[int, int]:
    """Pass over packs of an only source; see take_epochs. Return the number of packs, and the source 0 or -1."""
    done, epoch, pack, over = 0, at[0], packs[0], -1
    while done < count and over < 0:
        taken = min(count - done, counts[epoch] - pack)
        done += taken
        pack += taken
        if pack == counts[epoch] and epoch + 1 == len(counts):
            over = 0
        elif pack == counts[epoch]:
            epoch, pack = epoch + 1, 0
    at[0], packs[0] = epoch, pack
    return done, over


@compiled
def take_epochs(
    count: int,
    at: _Numbers,
    packs: _Numbers,
    counts: _Numbers,
    first_counts: _Numbers,
    credits: _Numbers,
    quotas: _Numbers,
    ends: _Numbers,
    unit: int,
    least: int,
    until: _Numbers,
    steps: tuple[int, int],
    rows: _Numbers,
    sizes: Sizes,
) -> tuple[int, int, int]:
    """Let k sources give `count` packs in turn, through the epochs with known pack counts.

    at, packs: int64[k], the current epoch of each source, and the consumed packs of this epoch; both are changed.
    credits: int64[k], lack of each source in `unit`ths of a full pack, with sum 0; changed. quotas: int64[phases, k],
    shares in each phase, with sum `unit` / sizes.full. ends: int64[phases], the turn that ends each phase times
    sizes.full, NEVER for the last phase. least: at most unit / k, to leave a source; 1 for turns by tokens.
    counts: packs of the known epochs, source after source. first_counts: int64[k + 1], index in counts of each source's
    epoch 0 in `at`. until: source, epoch and number of the last pack to take; -1 for no limit. steps: packs to the end
    of the first step, and packs of a step. rows: int64[n, 4], written: taken ranges as source, epoch, first and stop,
    cut at each end of a step, and of an epoch of any source; nothing is written if n is 0. Returns the number of
    packs, the number of rows, and the source whose known epochs have ended, or -1. The loop ends at this source, at the
    end of known tokens, and when the rows of another epoch might not fit. sizes: changed; of a step's packs at least,
    to cut no row at the end of known tokens.
    """
    num_sources = len(at)
    if num_sources == 1 and not len(rows) and until[0] < 0:
        credits[0] = 0
        done, over = _pass_epochs(count, at, packs, counts)
        return done, 0, over
    left, taken = np.empty(num_sources, np.int64), np.zeros(num_sources, np.int64)
    for source in range(num_sources):
        left[source] = _left(source, at, packs, counts, first_counts, until, sizes)
    turns = _begin(credits, quotas, ends, unit, least)  # the end of an epoch changes only the packs left in its source
    done = num_rows = 0
    stop, batch = steps
    over = -1
    is_found = is_step = is_short = False
    while done < count and over < 0 and not is_found and not is_short:
        if len(rows) and num_rows + num_sources > len(rows):
            break
        if num_sources == 1:
            taken[0], credits[0] = min(count - done, left[0]), 0
            turns.givers[0], num_givers = 0, 1
            done += taken[0]
        else:
            most = min(count, stop) if len(rows) else count
            done, num_givers = _take(turns, done, most, left, credits, quotas, ends, unit, least, taken, sizes)
            is_step = done == stop
            stop += batch if is_step else 0
        ended = -1
        for source in np.sort(turns.givers[:num_givers]):
            if len(rows):
                rows[num_rows, 0], rows[num_rows, 1] = source, at[source]
                rows[num_rows, 2], rows[num_rows, 3] = packs[source], packs[source] + taken[source]
                num_rows += 1
            packs[source] += taken[source]
            taken[source] = 0
            if ended < 0 and packs[source] == counts[first_counts[source] + at[source]]:
                ended = source
            if num_sources > 1 and sizes.tokens.shape[1] > 0:
                num_known = sizes.have[source] - sizes.used[source]
                is_short |= num_known == 0 or (is_step and sizes.goes_on[source] and num_known < batch)
        is_found = until[0] >= 0 and at[until[0]] == until[1] and packs[until[0]] > until[2]
        if ended >= 0 and first_counts[ended] + at[ended] + 1 == first_counts[ended + 1]:
            over = ended
        elif ended >= 0:
            at[ended] += 1
            packs[ended] = 0
            left[ended] = _left(ended, at, packs, counts, first_counts, until, sizes)
    if num_sources > 1:
        _end(turns, credits, quotas)
    return done, num_rows, over
