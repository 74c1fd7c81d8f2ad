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

import cython
import numpy as np
from numpy.typing import NDArray

LAST = 1 << 62  # a number in C; names of the .pxd are not seen by other modules
NEVER = LAST

_Numbers = NDArray[np.int64]


def _eligible(lack: int, quota: int, turn: int, least: int) -> int:
    """Return the first turn in which a source lacks at least `least`, at a constant quota; lack: before `turn`."""
    if lack + quota >= least:
        return turn
    return turn + (least - lack + quota - 1) // quota - 1 if quota > 0 else LAST


def _push(heap: _Numbers, size: int, key: int, source: int) -> None:
    """Add a source to a heap of `size` sources: int64[sources, 2], keys and sources, ties to the first source."""
    here = size
    while here > 0:
        parent = (here - 1) >> 1
        if heap[parent, 0] < key or (heap[parent, 0] == key and heap[parent, 1] < source):
            break
        heap[here, 0], heap[here, 1] = heap[parent, 0], heap[parent, 1]
        here = parent
    heap[here, 0], heap[here, 1] = key, source


def _pop(heap: _Numbers, size: int) -> None:
    """Remove the first source from a heap of `size` sources."""
    size -= 1
    key, source, here = heap[size, 0], heap[size, 1], 0
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


class TurnHeaps:
    """State of sources that take turns; see take_epochs.

    left: int64[k], packs left in each source, 1 or more. taken: int64[k], packs taken. known: int64[k], the clock at
    which credits[source] was updated. deadlines: int64[k]. waiting, ready, givers: heaps, int64[k, 2], of num_waiting,
    num_ready and num_givers sources; givers have taken packs. clock: packs, or tokens, given so far.
    """

    def __init__(
        self, left: _Numbers, credits: _Numbers, quotas: _Numbers, ends: _Numbers, unit: int, least: int, sizes: Sizes
    ):
        num_sources = len(credits)
        cython.declare(numbers=cython.longlong[:, ::1], heaps=cython.longlong[:, :, ::1])
        self.left, self.credits, self.quotas, self.ends, self.unit, self.least = (
            left,
            credits,
            quotas,
            ends,
            unit,
            least,
        )
        self.full, self.counts_tokens = sizes.full, sizes.tokens.shape[1] > 0
        if self.counts_tokens:
            self.tokens, self.used, self.have, self.goes_on = sizes[:4]
        numbers, heaps = np.zeros((3, num_sources), np.int64), np.empty((3, num_sources, 2), np.int64)
        self.known, self.deadlines, self.taken = numbers[0], numbers[1], numbers[2]
        self.waiting, self.ready, self.givers = heaps[0], heaps[1], heaps[2]
        self.num_waiting = self.num_ready = self.num_givers = self.phase = self.clock = 0

    def begin(self) -> None:
        """Let all sources wait, before the first turn."""
        self.num_waiting = len(self.credits)
        for source in range(self.num_waiting):
            self.deadlines[source] = self.deadline(source, 0)
            _push(self.waiting, source, _eligible(self.credits[source], self.quotas[0, source], 0, self.least), source)

    def deadline(self, source: int, turn: int) -> int:
        """Return the last turn in which a source, lacking its credit before `turn`, does not lack more than a pack."""
        cython.declare(lack=cython.longlong)
        lack, most = self.credits[source], self.unit - self.least
        for row in range(self.phase, len(self.ends)):
            stop, quota = self.ends[row], self.quotas[row, source]
            if quota > 0 and stop > turn:
                waits = (most - lack) // quota - 1
                if turn + waits < stop - 1:  # at the last turn of a phase the next phase decides
                    return turn + waits
                lack += quota * (stop - turn)
            turn = max(turn, stop)
        return LAST

    def update(self, source: int) -> None:
        """Update what a source lacks."""
        self.credits[source] += self.quotas[self.phase, source] * (self.clock - self.known[source])
        self.known[source] = self.clock

    def wait(self, source: int, at: int) -> None:
        """Let a source wait, behind the first `at` waiting sources."""
        turn = _eligible(self.credits[source], self.quotas[self.phase, source], self.known[source], self.least)
        _push(self.waiting, at, turn, source)

    def take(self, turn: int, count: int) -> int:
        """Take the turns from `turn` to `count`, or until a source ends. Return the next turn.

        Each turn goes to the source with the earliest deadline, among sources that lack at least `least` (see
        turn_taking.py).
        """
        cost = 1
        while turn < count:
            if turn * self.full >= self.ends[self.phase]:
                for source in range(len(self.left)):
                    self.update(source)
                self.phase += 1
                for at in range(self.num_waiting):  # a prefix is a heap before the next source is pushed behind it
                    self.wait(self.waiting[at, 1], at)
                continue
            while self.num_waiting > 0 and self.waiting[0, 0] <= self.clock:
                source = self.waiting[0, 1]
                _pop(self.waiting, self.num_waiting)
                self.num_waiting -= 1
                _push(self.ready, self.num_ready, self.deadlines[source], source)
                self.num_ready += 1
            source = self.ready[0, 1]
            _pop(self.ready, self.num_ready)
            self.num_ready -= 1
            if self.counts_tokens:
                self.update(source)
                key = self.deadline(source, turn * self.full)
                if self.num_ready > 0 and (
                    key > self.ready[0, 0] or (key == self.ready[0, 0] and source > self.ready[0, 1])
                ):
                    _push(self.ready, self.num_ready, key, source)
                    self.num_ready += 1
                    continue
                cost = self.tokens[source, self.used[source]]
                self.used[source] += 1
            turn += 1
            self.clock += cost
            self.update(source)
            self.credits[source] -= self.unit // self.full * cost
            if self.taken[source] == 0:
                _push(self.givers, self.num_givers, source, source)
                self.num_givers += 1
            self.taken[source] += 1
            self.left[source] -= 1
            self.deadlines[source] = self.deadline(source, turn * self.full)
            self.wait(source, self.num_waiting)
            self.num_waiting += 1
            if self.left[source] == 0:
                break
        return turn

    def end(self) -> None:
        """Update what all sources lack."""
        for source in range(len(self.credits)):
            self.update(source)


class SourceEpochs:
    """Epochs with known pack counts of sources that take turns; see take_epochs."""

    def __init__(
        self,
        turns: TurnHeaps,
        at: _Numbers,
        packs: _Numbers,
        counts: _Numbers,
        first_counts: _Numbers,
        until: _Numbers,
        rows: _Numbers,
    ):
        self.turns, self.at, self.packs, self.counts, self.first_counts = turns, at, packs, counts, first_counts
        self.until, self.rows, self.num_rows, self.over = until, rows, 0, -1

    def find_left(self, source: int) -> None:
        """Set the packs left in a source's epoch, or up to the last pack to take, or to the last with known tokens."""
        left = self.counts[self.first_counts[source] + self.at[source]] - self.packs[source]
        if self.until[0] == source and self.at[source] == self.until[1]:
            left = self.until[2] + 1 - self.packs[source]
        if self.turns.counts_tokens:
            left = min(left, self.turns.have[source] - self.turns.used[source])
        self.turns.left[source] = left

    def pass_epochs(self, count: int) -> int:
        """Pass over packs of an only source; return the number of packs."""
        done, epoch, pack = 0, self.at[0], self.packs[0]
        while done < count and self.over < 0:
            taken = min(count - done, self.counts[epoch] - pack)
            done += taken
            pack += taken
            if pack == self.counts[epoch] and epoch + 1 == len(self.counts):
                self.over = 0
            elif pack == self.counts[epoch]:
                epoch, pack = epoch + 1, 0
        self.at[0], self.packs[0] = epoch, pack
        return done

    def take(self, count: int, stop: int, batch: int) -> int:
        """Take packs in turn; return their number."""
        num_sources, num_all_rows, done, has_ended = len(self.at), len(self.rows), 0, 0
        for source in range(num_sources):
            self.find_left(source)
        self.turns.begin()  # the end of an epoch changes only the packs left in its source
        while done < count and self.over < 0 and not has_ended:
            if num_all_rows and self.num_rows + num_sources > num_all_rows:
                break
            is_step = 0
            if num_sources == 1:
                self.turns.taken[0], self.turns.credits[0] = min(count - done, self.turns.left[0]), 0
                self.turns.givers[0, 0], self.turns.num_givers = 0, 1
                done += self.turns.taken[0]
            else:
                done = self.turns.take(done, min(count, stop) if num_all_rows else count)
                if done == stop:
                    is_step = 1
                    stop += batch
            ended = -1
            while self.turns.num_givers > 0:
                source = self.turns.givers[0, 0]
                _pop(self.turns.givers, self.turns.num_givers)
                self.turns.num_givers -= 1
                taken = self.turns.taken[source]
                if num_all_rows:
                    self.rows[self.num_rows, 0], self.rows[self.num_rows, 1] = source, self.at[source]
                    self.rows[self.num_rows, 2] = self.packs[source]
                    self.rows[self.num_rows, 3] = self.packs[source] + taken
                    self.num_rows += 1
                self.packs[source] += taken
                self.turns.taken[source] = 0
                if ended < 0 and self.packs[source] == self.counts[self.first_counts[source] + self.at[source]]:
                    ended = source
                if num_sources > 1 and self.turns.counts_tokens:
                    num_known = self.turns.have[source] - self.turns.used[source]
                    if num_known == 0 or (is_step and self.turns.goes_on[source] and num_known < batch):
                        has_ended = 1  # the known tokens
            wanted = self.until[0]
            if wanted >= 0 and self.at[wanted] == self.until[1] and self.packs[wanted] > self.until[2]:
                has_ended = 1
            if ended >= 0 and self.first_counts[ended] + self.at[ended] + 1 == self.first_counts[ended + 1]:
                self.over = ended
            elif ended >= 0:
                self.at[ended] += 1
                self.packs[ended] = 0
                self.find_left(ended)
        if num_sources > 1:
            self.turns.end()
        return done


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
    turns = TurnHeaps(np.empty(len(at), np.int64), credits, quotas, ends, unit, least, sizes)
    epochs = SourceEpochs(turns, at, packs, counts, first_counts, until, rows)
    if len(at) == 1 and not len(rows) and until[0] < 0:
        credits[0] = 0
        done = epochs.pass_epochs(count)
    else:
        cython.declare(most=cython.longlong, stop=cython.longlong, batch=cython.longlong)
        most, (stop, batch) = count, steps
        with cython.nogil:
            done = epochs.take(most, stop, batch)
    return done, epochs.num_rows, epochs.over
