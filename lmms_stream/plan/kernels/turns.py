"""The compiled loop by which the sources of a mixture take turns."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

NEVER = np.int64(1) << 62


@njit(cache=True, nogil=True)
def _deadline(
    source: int, lack: int, turn: int, most: int, quotas: NDArray[np.int64], ends: NDArray[np.int64], phase: int
) -> int:
    """The last turn to which a source can wait that lacks so much before `turn`, and may lack no more than `most`."""
    for row in range(phase, len(ends)):
        stop = ends[row]
        quota = quotas[row, source]
        if quota > 0 and stop > turn:
            waits = (most - lack) // quota - 1
            if waits < stop - turn:
                return turn + waits
            lack += quota * (stop - turn)
        turn = max(turn, stop)
    return NEVER


@njit(cache=True, nogil=True)
def take_turns(
    count: int,
    left: NDArray[np.int64],
    credits: NDArray[np.int64],
    quotas: NDArray[np.int64],
    ends: NDArray[np.int64],
    unit: int,
    least: int,
    taken: NDArray[np.int64],
) -> int:
    """Let k sources give `count` packs in turn, or fewer: it stops when one has none left. Returns how many they gave.

    left: int64[k], packs that each has, 1 or more; credits: int64[k], what each lacks of its share, in `unit`ths of a
    pack; taken: int64[k]. All three are changed. quotas: int64[phases, k], the shares in each phase, which add up to
    `unit`. ends: int64[phases], the turn with which each phase ends, NEVER for the last. Each turn goes to the source
    with the earliest deadline, of those that lack `least` or more (see mixture.py).
    """
    num_sources = len(left)
    phase = 0
    deadlines = np.empty(num_sources, np.int64)
    most = unit - least
    for source in range(num_sources):
        deadlines[source] = _deadline(source, credits[source], 0, most, quotas, ends, 0)
    for turn in range(count):
        while turn >= ends[phase]:
            phase += 1
        chosen = fallback = 0
        is_found = False
        for source in range(num_sources):
            credits[source] += quotas[phase, source]
            if credits[source] >= least and (not is_found or deadlines[source] < deadlines[chosen]):
                chosen = source
                is_found = True
            if credits[source] > credits[fallback]:
                fallback = source
        if not is_found:
            chosen = fallback
        credits[chosen] -= unit
        taken[chosen] += 1
        left[chosen] -= 1
        if left[chosen] == 0:
            return turn + 1
        deadlines[chosen] = _deadline(chosen, credits[chosen], turn + 1, most, quotas, ends, phase)
    return count
