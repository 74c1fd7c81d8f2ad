"""The sources of a mixture as arrays while they take turns. cursors + shares -> [this] -> ranges, cursors after them.

A step of a thousand sources has packs of most of them, and often one comes to the end of its epoch: what is known of
them is looked up once a step, and written back once.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .cursor import SourceCursor
from .kernels.turns import take_turns
from .source_ranges import SourceRange
from .weights import UNIT, share_out


class SourceTurns:
    """The sources that have packs left: `names`, and `epochs`, the epoch that each is in.

    sources: all cursors, which `write` moves. num_packs: of an epoch of a source. num_epochs: how many a source has;
    None: it ends with the epoch that it is in, and stays there.
    """

    def __init__(
        self,
        sources: MutableMapping[str, SourceCursor],
        names: Sequence[str],
        *,
        num_packs: Callable[[str, int], int],
        num_epochs: Callable[[str], float] | None,
    ):
        self._sources, self._num_packs, self._num_epochs = sources, num_packs, num_epochs
        cursors = [sources[name] for name in names]
        self.names = [*names]
        self.epochs = [at.epoch for at in cursors]
        self._packs = np.array([at.packs for at in cursors], np.int64)
        self._credits = np.array([at.credit for at in cursors], np.int64)
        self._left = np.array(
            [num_packs(name, at.epoch) - at.packs for name, at in zip(names, cursors, strict=True)], np.int64
        )
        self._ended: int | None = None  # the number of the one that came to the end of its epoch last

    def go_on(self) -> bool:
        """Whether any has packs left; those of an epoch that begins are counted now, and not before."""
        if self._ended is not None:
            number, self._ended = self._ended, None
            self._begin_epoch(number)
        return bool(self.names)

    def _begin_epoch(self, number: int) -> None:
        name = self.names[number]
        if self._num_epochs is not None:
            self.epochs[number] += 1
            self._packs[number] = 0
            if self.epochs[number] < self._num_epochs(name):
                self._left[number] = self._num_packs(name, self.epochs[number])
                return
        self._sources[name] = self._cursor(number)
        del self.names[number], self.epochs[number]
        self._packs, self._credits, self._left = (
            np.delete(values, number) for values in (self._packs, self._credits, self._left)
        )

    def take(
        self, count: int, quotas: NDArray[np.int64], ends: NDArray[np.int64], *, least: int, until: SourceRange | None
    ) -> tuple[list[SourceRange], bool]:
        """Ranges of the next `count` packs, or of fewer: up to the end of a source's epoch, or up to a pack.

        quotas, ends, least: see take_turns. until: a range of one pack. Also whether that one was taken, or is behind.
        """
        left = self._left.copy()
        wanted = self.names.index(until.source) if until is not None and until.source in self.names else None
        if until is not None and wanted is not None and self.epochs[wanted] == until.epoch:
            left[wanted] = until.stop - self._packs[wanted]
        taken = np.zeros(len(left), np.int64)
        if len(left) == 1:
            taken[0], self._credits[0] = min(count, int(left[0])), 0
        else:
            self._credits += share_out(-int(self._credits.sum()), quotas[0])
            take_turns(count, left, self._credits, quotas, ends, UNIT, least, taken)
        ranges = self._ranges(taken)
        self._packs += taken
        self._left -= taken
        ended = np.flatnonzero(self._left == 0)
        self._ended = int(ended[0]) if len(ended) else None
        if until is None or wanted is None:
            return ranges, False
        return ranges, (self.epochs[wanted], int(self._packs[wanted])) > (until.epoch, until.first)

    def _ranges(self, taken: NDArray[np.int64]) -> list[SourceRange]:
        numbers = np.flatnonzero(taken)
        firsts, counts = self._packs[numbers].tolist(), taken[numbers].tolist()
        return [
            SourceRange(self.names[number], self.epochs[number], first, first + count)
            for number, first, count in zip(numbers.tolist(), firsts, counts, strict=True)
        ]

    def write(self) -> None:
        """Move the cursors to where the sources stand."""
        if self._ended is not None and self._num_epochs is not None:  # the next epoch follows at once
            self.epochs[self._ended] += 1
            self._packs[self._ended] = 0
        values = zip(self.names, self.epochs, self._packs.tolist(), self._credits.tolist(), strict=True)
        for name, epoch, packs, credit in values:
            self._sources[name] = SourceCursor(self._sources[name].plan, epoch, packs, credit)

    def _cursor(self, number: int) -> SourceCursor:
        before, packs, credit = self._sources[self.names[number]], self._packs[number], self._credits[number]
        return SourceCursor(before.plan, self.epochs[number], int(packs), int(credit))
