"""Packs of several sources and epochs, as a mixture takes them in turn; ranges of them by source and epoch."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pack_range import PackRange, ends_of, runs


class SourceRange(NamedTuple):
    """Packs [first, stop) of an epoch of a source."""

    source: str
    epoch: int
    first: int
    stop: int


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
    ranges: Sequence[SourceRange], chosen: NDArray[np.int64] | None = None, *, short: Container[str] = ()
) -> list[EpochPacks]:
    """The same packs, each epoch of a source together, and all epochs of the sources in `short`.

    chosen: positions of the packs that are wanted, which ascend; None: all.
    """
    counts = np.array([taken.stop - taken.first for taken in ranges], np.int64)
    firsts = np.array([taken.first for taken in ranges], np.int64)
    begins = ends_of(counts)[:-1]
    is_chosen = np.zeros(int(counts.sum()), bool)
    is_chosen[slice(0) if chosen is None else chosen] = True
    members: dict[tuple[str, int], list[int]] = {}
    for number, taken in enumerate(ranges):
        members.setdefault((taken.source, 0 if taken.source in short else taken.epoch), []).append(number)
    found = []
    for (source, _), mine in members.items():
        first, begin = ranges[mine[0]], int(begins[mine[0]])
        if len(mine) == 1:  # as most of a thousand sources have in a step
            count = first.stop - first.first
            numbers, positions = np.arange(first.first, first.stop), np.arange(begin, begin + count)
        else:
            numbers, positions = (runs(each[mine], counts[mine]) for each in (firsts, begins))
        epochs = np.full(len(numbers), first.epoch)
        if source in short:
            epochs = np.repeat([ranges[number].epoch for number in mine], counts[mine])
        if chosen is not None:
            here = is_chosen[positions]
            epochs, numbers, positions = epochs[here], numbers[here], positions[here]
        found.append(EpochPacks(source, first.epoch, epochs, numbers, positions))
    return found


def join_patches(found: Sequence[PackRange]) -> NDArray[np.int64] | None:
    """Of sources with media and without; None where none has media."""
    if all(each.patches is None for each in found):
        return None
    return join(np.zeros(len(each), np.int64) if each.patches is None else each.patches for each in found)


def join(arrays: object) -> NDArray[np.int64]:
    """Arrays one after another; there may be none."""
    joined: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *arrays])  # type: ignore[misc]
    return joined.astype(np.int64, copy=False)
