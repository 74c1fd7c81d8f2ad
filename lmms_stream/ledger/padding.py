"""Samples that steps read as padding, because they are left out. ledger + left-out samples -> amounts. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..plan.ledger import Ledger
from ..plan.left_out import LeftOut
from ..plan.pack_plan import PackPlan

_At = tuple[int, int]  # where a source stands: its epoch, and packs of that


def padding_of(ledger: Ledger, source: str, left_out: LeftOut, *, first: int, stop: int) -> tuple[int, int]:
    """Samples and tokens of a source that are padding in the steps [first, stop): each sample once in each epoch.

    Those of steps that are passed over are none. The shuffle blocks that hold such samples are packed again.
    """
    found, plan = left_out.of_source(source), ledger.plan(source)
    if not len(found.sample_ids):
        return 0, 0
    begin, end = _at(ledger, source, first), _at(ledger, source, stop)
    steps = {min(max(step, first), stop) for step in found.since_steps.tolist()}
    from_packs = {step: _at(ledger, source, step) for step in steps}
    begins = [from_packs[min(max(step, first), stop)] for step in found.since_steps.tolist()]
    skipped = _skipped(ledger, source, first, stop)
    num_samples = num_tokens = 0
    for epoch in range(begin[0], end[0] + 1):
        packs, lengths, numbers = _segments(plan, epoch, found.sample_ids, stop=end)
        is_padding = [
            begins[number] <= (epoch, pack) < end and not _is_in((epoch, pack), skipped)
            for pack, number in zip(packs.tolist(), numbers.tolist(), strict=True)
        ]
        num_samples += len(np.unique(numbers[is_padding]))
        num_tokens += int(lengths[is_padding].sum())
    return num_samples, num_tokens


def _at(ledger: Ledger, source: str, step: int) -> _At:
    at = ledger.cursor(step).sources.get(source)
    return (0, 0) if at is None else (at.epoch, at.packs)


def _skipped(ledger: Ledger, source: str, first: int, stop: int) -> list[tuple[_At, _At]]:
    """Packs that steps in [first, stop) pass over, of the last stretch."""
    ranges = [(max(begin, first), min(end, stop)) for begin, end in ledger.stretches[-1].skipped]
    return [(_at(ledger, source, begin), _at(ledger, source, end)) for begin, end in ranges if begin < end]


def _is_in(at: _At, ranges: list[tuple[_At, _At]]) -> bool:
    return any(begin <= at < end for begin, end in ranges)


def _segments(
    plan: PackPlan, epoch: int, sample_ids: NDArray[np.int64], *, stop: _At
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of the segments of some samples in an epoch, in packs before `stop`: their packs, tokens, and which samples.

    sample_ids: int64[n], sorted. Three arrays int64[num_segments], the last of positions in sample_ids.
    """
    found: set[int] = set()
    for pack, _ in plan.first_packs_of(epoch, sample_ids):
        if (epoch, pack) >= stop:
            break
        found.add(pack)
    numbers = np.array(sorted(found), np.int64)
    packs = plan.take(epoch, numbers)
    of_segments = np.repeat(numbers, np.diff(packs.offsets))
    at = np.searchsorted(sample_ids, packs.sample_ids)
    is_asked = sample_ids[np.minimum(at, len(sample_ids) - 1)] == packs.sample_ids
    return of_segments[is_asked], packs.lengths[is_asked], at[is_asked]
