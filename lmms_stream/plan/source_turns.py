"""The sources of a mixture as arrays while they take turns. cursors + shares -> [this] -> ranges, cursors after them.

A step of a thousand sources has packs of most of them, and often one comes to the end of its epoch: what is known of
them is looked up once a step, and written back once.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .cursor import SourceCursor
from .kernels.turns import take_epochs
from .pack_range import ends_of
from .source_ranges import SourceRange
from .weights import UNIT, share_out

MAX_ROWS = 1 << 14  # ranges that are taken at once, and one of each source more
MAX_COUNTS = 1 << 16  # of epochs of all sources that are looked at together


class SourceTurns:
    """The sources that have packs left: `names`, and `epochs`, the epoch that each is in.

    sources: all cursors, which `write` moves. numbers: of the names, as SourceRanges has them. known_counts: numbers of
    packs of an epoch of a source and of the next epochs that are counted with it (see PackPlan). num_epochs: of a
    source; None: it ends with its present epoch, and stays there. most: maximum number of packs.
    """

    def __init__(
        self,
        sources: MutableMapping[str, SourceCursor],
        names: Sequence[str],
        *,
        numbers: Sequence[int],
        known_counts: Callable[[str, int], NDArray[np.int64]],
        num_epochs: Callable[[str], float] | None,
        most: int,
    ):
        self._sources, self._num_epochs = sources, num_epochs
        self._most_known = min(most + 1, max(1, MAX_COUNTS // max(1, len(names))))  # epochs of each
        self._known_counts = known_counts
        cursors = [sources[name] for name in names]
        self.names = [*names]
        self._numbers = np.array(numbers, np.int64)
        self._first_epochs = np.array([at.epoch for at in cursors], np.int64)  # of the counts that are known
        self._at = np.zeros(len(names), np.int64)  # epochs after those
        self._packs = np.array([at.packs for at in cursors], np.int64)
        self._credits = np.array([at.credit for at in cursors], np.int64)
        self._counts = [self._known(name, at.epoch) for name, at in zip(names, cursors, strict=True)]
        self._joined: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # the counts, as take_epochs has them
        self._ended: int | None = None  # the number of the one whose known epochs are over

    def _known(self, name: str, epoch: int) -> NDArray[np.int64]:
        most = 1 if self._num_epochs is None else min(self._most_known, self._num_epochs(name) - epoch)
        return self._known_counts(name, epoch)[: int(most)]

    @property
    def epochs(self) -> list[int]:
        epochs: list[int] = (self._first_epochs + self._at).tolist()
        return epochs

    def go_on(self) -> bool:
        """Whether any has packs left; those of an epoch that begins are counted now, and not before."""
        if self._ended is not None:
            number, self._ended = self._ended, None
            self._begin_epoch(number)
        return bool(self.names)

    def _begin_epoch(self, number: int) -> None:
        name = self.names[number]
        self._joined = None
        if self._num_epochs is not None:
            self._next_epoch(number)
            if self._first_epochs[number] < self._num_epochs(name):
                self._counts[number] = self._known(name, int(self._first_epochs[number]))
                return
        self._sources[name] = self._cursor(number)
        del self.names[number], self._counts[number]
        self._numbers, self._first_epochs, self._at, self._packs, self._credits = (
            np.delete(values, number)
            for values in (self._numbers, self._first_epochs, self._at, self._packs, self._credits)
        )

    def _next_epoch(self, number: int) -> None:
        self._first_epochs[number] += self._at[number] + 1
        self._at[number] = self._packs[number] = 0

    def take(
        self,
        count: int,
        quotas: NDArray[np.int64],
        ends: NDArray[np.int64],
        *,
        least: int,
        until: SourceRange | None,
        ranges: list[NDArray[np.int64]] | None,
    ) -> tuple[int, bool]:
        """Take the next `count` packs, or fewer: as far as epochs are known, or up to a pack; how many were taken.

        quotas, ends, least: see take_turns. until: a range of one pack. Also whether that one was taken, or is behind.
        ranges: rows of SourceRanges; those taken are added, up to the end of an epoch of any source each.
        """
        wanted = self.names.index(until.source) if until is not None and until.source in self.names else None
        stop = np.array([-1, 0, 0])
        if until is not None and wanted is not None:
            stop = np.array([wanted, until.epoch - self._first_epochs[wanted], until.first])
        self._credits += share_out(-int(self._credits.sum()), quotas[0])
        if self._joined is None:
            self._joined = np.concatenate(self._counts), ends_of(np.array([len(each) for each in self._counts]))
        rows = np.empty((0 if ranges is None else min(count, MAX_ROWS) + len(self.names), 4), np.int64)
        done, num_rows, ended = take_epochs(
            count, self._at, self._packs, *self._joined, self._credits, quotas, ends, UNIT, least, stop, rows
        )
        self._ended = ended if ended >= 0 else None
        if ranges is not None:
            taken = rows[:num_rows]
            taken[:, 1] += self._first_epochs[taken[:, 0]]
            taken[:, 0] = self._numbers[taken[:, 0]]
            ranges.append(taken)
        if until is None or wanted is None:
            return done, False
        return done, (self.epochs[wanted], int(self._packs[wanted])) > (until.epoch, until.first)

    def write(self) -> None:
        """Move the cursors to where the sources stand."""
        if self._ended is not None and self._num_epochs is not None:  # the next epoch follows at once
            self._next_epoch(self._ended)
        values = zip(self.names, self.epochs, self._packs.tolist(), self._credits.tolist(), strict=True)
        for name, epoch, packs, credit in values:
            self._sources[name] = SourceCursor(self._sources[name].plan, epoch, packs, credit)

    def _cursor(self, number: int) -> SourceCursor:
        before, packs, credit = self._sources[self.names[number]], self._packs[number], self._credits[number]
        return SourceCursor(before.plan, int(self._first_epochs[number] + self._at[number]), int(packs), int(credit))
