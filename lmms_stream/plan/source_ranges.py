"""Packs of several sources and epochs, as a mixture takes them in turn; ranges of them by source and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from .pack_range import PackRange, ends_of, runs


class SourceRange(NamedTuple):
    """Packs [first, stop) of an epoch of a source."""

    source: str
    epoch: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False, slots=True)
class SourceRanges(Sequence[SourceRange]):
    """Ranges in turn. A step of a thousand small sources has thousands of ranges, so they are kept as columns.

    names: of sources. rows: int64[n, 4], the number of the source in `names`, the epoch, the first pack, the stop.
    """

    names: Sequence[str]
    rows: NDArray[np.int64]

    @staticmethod
    def of(names: Sequence[str], ranges: Sequence[SourceRange]) -> SourceRanges:
        """Return ranges of sources in `names` as columns."""
        if isinstance(ranges, SourceRanges):
            return ranges
        numbers = {name: number for number, name in enumerate(names)}
        rows = [(numbers[each.source], *each[1:]) for each in ranges]
        return SourceRanges(names, np.array(rows, np.int64).reshape(-1, 4))

    @staticmethod
    def joined(ranges: Sequence[SourceRanges]) -> SourceRanges:
        """Return one or more, of the same names, one after another."""
        return SourceRanges(ranges[0].names, np.concatenate([each.rows for each in ranges]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @property
    def num_packs(self) -> int:
        return int((self.rows[:, 3] - self.rows[:, 2]).sum())

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SourceRange]:
        return (SourceRange(self.names[number], *rest) for number, *rest in self.rows.tolist())

    @overload
    def __getitem__(self, index: int) -> SourceRange: ...
    @overload
    def __getitem__(self, index: slice) -> SourceRanges: ...
    def __getitem__(self, index: int | slice) -> SourceRange | SourceRanges:
        if isinstance(index, slice):
            return SourceRanges(self.names, self.rows[index])
        number, *rest = self.rows[index].tolist()
        return SourceRange(self.names[number], *rest)


class SourceBlock(NamedTuple):
    """A shuffle block of a canonical node in an epoch of a source."""

    source: str
    epoch: int
    node: int
    block: int


class EpochPacks(NamedTuple):
    """Packs of one epoch of a source, or of several short ones: their epochs, numbers and positions in all ranges.

    int64[num_packs] each. epoch: the first one's; epochs ascend.
    """

    source: str
    epoch: int
    epochs: NDArray[np.int64]
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]


def by_epoch(
    ranges: SourceRanges, chosen: NDArray[np.int64] | None = None, *, is_short: NDArray[np.bool_]
) -> list[EpochPacks]:
    """The same packs, each epoch of a source together, and all epochs of a short source: bool[sources].

    chosen: positions of the packs that are wanted, which ascend; None: all.
    """
    if not len(ranges):
        return []
    sources, epochs, firsts, stops = ranges.rows.T
    begins = ends_of(stops - firsts)[:-1]
    joins = np.where(is_short[sources], 0, epochs)
    order = np.lexsort((joins, sources))
    sources, joins, epochs, counts = sources[order], joins[order], epochs[order], (stops - firsts)[order]
    groups = np.flatnonzero((np.diff(sources, prepend=-1) != 0) | (np.diff(joins, prepend=-1) != 0))
    ends = ends_of(counts)[np.append(groups, len(order))]
    numbers, positions = runs(firsts[order], counts), runs(begins[order], counts)
    of_packs = np.repeat(epochs, counts)
    if chosen is not None:
        is_chosen = np.zeros(len(positions), bool)
        is_chosen[chosen] = True
        here = is_chosen[positions]
        numbers, positions, of_packs, ends = numbers[here], positions[here], of_packs[here], ends_of(here)[ends]
    names, bounds = ranges.names, ends.tolist()
    heads = zip(sources[groups].tolist(), epochs[groups].tolist(), bounds, bounds[1:], strict=False)
    found = [
        EpochPacks(names[source], epoch, of_packs[a:b], numbers[a:b], positions[a:b]) for source, epoch, a, b in heads
    ]
    return [found[group] for group in np.argsort(order[groups]).tolist()]  # by the first range of each


def join_patches(found: Sequence[PackRange]) -> NDArray[np.int64] | None:
    """Of sources with media and without; None where none has media."""
    if all(each.patches is None for each in found):
        return None
    return join(np.zeros(len(each), np.int64) if each.patches is None else each.patches for each in found)


def join(arrays: object) -> NDArray[np.int64]:
    """Arrays one after another; there may be none."""
    joined: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *arrays])  # type: ignore[misc]
    return joined.astype(np.int64, copy=False)
