"""Sources of a mixture take turns; see _core/turns.c for the method."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..._core import loops

NEVER = np.int64(1) << 62

_Numbers = NDArray[np.int64]


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


def take_turns(
    count: int,
    left: _Numbers,
    credits: _Numbers,
    quotas: _Numbers,
    ends: _Numbers,
    unit: int,
    least: int,
    taken: _Numbers,
    sizes: Sizes | None = None,
) -> int:
    """Let k sources give up to `count` packs in turn, until a source has no packs left. Return the number of packs.

    left: int64[k], packs left in each source, 1 or more. credits: int64[k], lack of each source in `unit`ths of a full
    pack; their sum is 0. taken: int64[k]. All three arrays are changed. quotas: int64[phases, k], shares in each phase,
    with sum `unit` / sizes.full. ends: int64[phases], the turn that ends each phase times sizes.full, NEVER for the
    last phase. Each turn goes to the source with the earliest deadline, among sources that lack at least `least`.
    least: at most unit / k, to leave at least one source; 1 for turns by tokens. sizes: changed.
    """
    sizes = sizes or no_sizes(len(credits))
    num_packs: int = loops.take_turns(count, left, credits, quotas, ends, unit, least, taken, *sizes)
    return num_packs


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
    sizes: Sizes | None = None,
) -> tuple[int, int, int]:
    """Let k sources give `count` packs in turn, through the epochs with known pack counts. See also take_turns.

    at, packs: int64[k], the current epoch of each source, and the consumed packs of this epoch; both are changed.
    counts: packs of the known epochs, source after source. first_counts: int64[k + 1], index in counts of each source's
    epoch 0 in `at`. until: source, epoch and number of the last pack to take; -1 for no limit. steps: packs to the end
    of the first step, and packs of a step. rows: int64[n, 4], written: taken ranges as source, epoch, first and stop,
    which end at each end of a step, and of an epoch of any source; nothing is written if n is 0. Returns the number of
    packs, the number of rows, and the source whose known epochs have ended, or -1. The loop ends at this source, where
    sizes has too few tokens, and when the rows of another epoch might not fit. sizes: of a step's packs at least, so
    that no row ends only because tokens do.
    """
    found: tuple[int, int, int] = loops.take_epochs(
        count, at, packs, counts, first_counts, credits, quotas, ends, unit, least, until, *steps, rows,
        *(sizes or no_sizes(len(at))),
    )  # fmt: skip
    return found
