"""Read and unread samples and tokens of each source at a step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...plan.assign import num_steps
from ...plan.cursor import Cursor, SourceCursor
from ...plan.ledger import PackEntry, Ranges, StepEntry, StepLookup, Stretch
from ...plan.left_out import Kind, LeftOut
from ...plan.mixture import Mixture
from ...plan.pack_plan import PackPlan, packed_tokens
from ...plan.packing import PackRange
from ...plan.windows import WindowedMixture


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAmounts:
    """Amounts of a source before a given step of a run.

    epochs: number of passes over the packs, with a fraction for the current pass. num_samples, num_tokens: read,
    including repetitions, without skipped steps; num_skipped_samples, num_skipped_tokens: in skipped steps. num_seen:
    distinct samples in the packs so far, including skipped steps; num_unseen: other samples in packs. num_overlong:
    samples in no pack, longer than a pack. num_quarantined, num_dropped: samples replaced by padding before the given
    step; their positions remain and are counted above.
    """

    epochs: float
    num_samples: int
    num_tokens: int
    num_skipped_samples: int
    num_skipped_tokens: int
    num_seen: int
    num_unseen: int
    num_overlong: int
    num_quarantined: int = 0
    num_dropped: int = 0


def amounts_of(ledger: StepLookup, step: int, *, left_out: LeftOut | None = None) -> dict[str, SourceAmounts]:
    """Amounts of each source of the run in the steps before `step`."""
    cursor = ledger.cursor(step)
    skipped = _skipped(ledger, step)
    plans = _plans(ledger, step)
    windows = _in_window(ledger.stretch(step).mixture, cursor)
    mixed = {name: plan for name, plan in plans.items() if plan.streams is not None}
    found = {
        name: _of(plan, cursor.sources[name], *skipped.get(name, (0, 0)), window=windows.get(name))
        for name, plan in plans.items()
        if name not in mixed
    }
    by_source: dict[str, list[SourceAmounts]] = {}
    for name, plan in mixed.items():
        lost = [(left_out or LeftOut()).of_kind(kind).of_source(name).at_step(step - 1) for kind in _LEFT_OUT]
        entries = [pack for entry in _skipped_steps(ledger, step) for pack in entry.packs if pack.source == name]
        by_source[name] = _of_streams(plan, cursor.sources[name], windows.get(name), entries, lost=lost)
    of_streams = {label: by_source[name][stream] for label, (name, stream) in mixed_streams(ledger, step).items()}
    if not left_out:
        return found | of_streams
    return of_streams | {
        name: replace(
            each,
            num_quarantined=len(left_out.of_kind("quarantined").of_source(name).at_step(step - 1)),
            num_dropped=len(left_out.of_kind("dropped").of_source(name).at_step(step - 1)),
        )
        for name, each in found.items()
    }


def _plans(ledger: StepLookup, step: int) -> dict[str, PackPlan]:
    names = [name for each in ledger.stretches if each.cursor.step <= step for name in each.mixture.plans]
    return {name: ledger.plan_before(name, step) for name in dict.fromkeys(names)}


def mixed_streams(ledger: StepLookup, step: int) -> dict[str, tuple[str, int]]:
    """Return source and number of each stream of mixed sources, by its name in amounts_of."""
    plans = _plans(ledger, step)
    return {
        stream if len(plans) == 1 else f"{name}/{stream}": (name, number)
        for name, plan in plans.items()
        if plan.streams is not None
        for number, stream in enumerate(plan.streams.names)
    }


def _of(
    plan: PackPlan, at: SourceCursor, skipped_samples: int, skipped_tokens: int, *, window: _InWindow | None
) -> SourceAmounts:
    begin, further = (at, 0) if window is None else (window.begin, window.num_read)
    before = [plan.amounts(epoch, plan.num_packs(epoch)) for epoch in range(begin.epoch)]
    before.append(plan.amounts(begin.epoch, begin.packs))
    if at.changes:  # epochs may have other samples
        covered, fit = _covered_tokens(plan, at, window), packed_tokens(plan.index, slice(None), packing=plan.packing)
        packed, seen = (int(np.count_nonzero(each)) for each in (covered + fit, covered))
    else:
        packed = plan.amounts(0, plan.num_packs(0)).samples
        seen = packed if begin.epoch else before[0].samples
    num_samples, num_tokens = sum(each.samples for each in before), sum(each.tokens for each in before)
    if window is not None:
        read = window.new_samples(plan)
        num_samples, num_tokens = num_samples + len(read), num_tokens + window.num_tokens
        if not begin.epoch and not at.changes:
            seen = packed - window.num_unread(plan) if window.reaches_next_epoch else seen + len(read)
    return SourceAmounts(
        epochs=_passes(plan, begin, further),
        num_samples=num_samples - skipped_samples,
        num_tokens=num_tokens - skipped_tokens,
        num_skipped_samples=skipped_samples,
        num_skipped_tokens=skipped_tokens,
        num_seen=seen,
        num_unseen=packed - seen,
        num_overlong=plan.num_samples - packed,
    )


def _passes(plan: PackPlan, at: SourceCursor, further: int) -> float:
    """Return the number of passes over the packs of a source, `further` packs after a cursor."""
    epoch, packs = at.epoch, at.packs + further
    while packs > (count := plan.num_packs(epoch)):
        epoch, packs = epoch + 1, packs - count
    return epoch + packs / max(1, count)


def seen_tokens(ledger: StepLookup, source: str, step: int) -> int:
    """Return the number of different tokens of a source in the packs before a step."""
    cursor, plan = ledger.cursor(step), ledger.plan_before(source, step)
    window = _in_window(ledger.stretch(step).mixture, cursor).get(source)
    at = cursor.sources[source] if window is None else window.begin
    if at.changes:
        return int(_covered_tokens(plan, at, window).sum())
    if at.epoch:
        return plan.num_tokens(0)
    if window is not None and window.reaches_next_epoch:
        return plan.num_tokens(0) - window.num_unread_tokens()
    return plan.amounts(0, at.packs).tokens + (0 if window is None else window.num_tokens)


def all_tokens(ledger: StepLookup, source: str, step: int) -> int:
    """Return seen_tokens, and the tokens of further samples in packs of the packing_length at a step."""
    cursor, plan = ledger.cursor(step), ledger.plan_before(source, step)
    if not (at := cursor.sources[source]).changes:
        return plan.num_tokens(0)
    window = _in_window(ledger.stretch(step).mixture, cursor).get(source)
    tokens = packed_tokens(plan.index, slice(None), packing=plan.packing)
    return int(np.maximum(tokens, _covered_tokens(plan, at, window)).sum())


class _InWindow:
    """The packs of a source in a window that is not finished. begin: before the window. read: of each pack."""

    def __init__(self, begin: SourceCursor, packs: PackRange, read: NDArray[np.bool_]):
        assert packs.epochs is not None
        counts = np.diff(packs.offsets)
        self.begin, self._ids = begin, packs.sample_ids
        self._starts, self._lengths = packs.starts, packs.lengths
        self._epochs, self._is_read = np.repeat(packs.epochs, counts), np.repeat(read, counts)
        self.num_read = int(np.count_nonzero(read))  # packs
        self.num_tokens = int(self._lengths[self._is_read].sum())
        self.reaches_next_epoch = bool((self._epochs > begin.epoch).any())
        self.segments = tuple(each[self._is_read] for each in (packs.sample_ids, packs.starts, packs.lengths))  # read

    def new_samples(self, plan: PackPlan) -> NDArray[np.int64]:
        """Return the samples that were read, once for each epoch, without those begun before the window."""
        read = [np.unique(self._ids[self._is_read & (self._epochs == epoch)]) for epoch in np.unique(self._epochs)]
        begun = self._begun(plan, read[0]) if self._epochs.min() == self.begin.epoch else []
        return np.concatenate([np.setdiff1d(read[0], begun), *read[1:]])

    def num_unread(self, plan: PackPlan) -> int:
        """Return the number of samples of the first epoch of which nothing is read."""
        left = np.setdiff1d(self._ids[~self._is_read & (self._epochs == self.begin.epoch)], self._ids[self._is_read])
        return len(left) - len(self._begun(plan, left))

    def num_unread_tokens(self) -> int:
        """Return the tokens of the first epoch that no epoch of the window has read."""
        segments = np.stack([self._ids, self._starts])
        read = set(zip(*segments[:, self._is_read].tolist(), strict=True))
        left = np.flatnonzero(~self._is_read & (self._epochs == self.begin.epoch))
        unread = [segment not in read for segment in zip(*segments[:, left].tolist(), strict=True)]
        return int(self._lengths[left[unread]].sum())

    def _begun(self, plan: PackPlan, sample_ids: NDArray[np.int64]) -> list[int]:
        """Return the samples with a piece before the window: only split samples have several pieces."""
        split = sample_ids[plan.lengths[sample_ids] > plan.least_length].tolist()
        return [each for each in split if plan.packs_of(self.begin.epoch, each).min() < self.begin.packs]


def _in_window(mixture: Mixture, cursor: Cursor) -> dict[str, _InWindow]:
    """Return the packs of each source in the window of a cursor: packs that are read are not the first in turn."""
    window = cursor.window
    if window is None or not isinstance(mixture, WindowedMixture):
        return {}
    packs = mixture.window_packs(window).take(np.arange(window.num_packs))
    found = {}
    for number, name in enumerate(mixture.names):
        turns = np.flatnonzero(packs.sources == number)
        if len(turns):
            found[name] = _InWindow(window.sources[name], packs.take(turns), turns < window.num_done)
    return found


def _skipped(ledger: StepLookup, stop: int) -> dict[str, tuple[int, int]]:
    """Samples and tokens of each source in skipped steps before `stop`.

    A split sample counts if all pieces are in skipped steps.
    """
    tokens: dict[tuple[str, int], dict[int, int]] = {}  # by source and epoch, of each sample
    for entry in _skipped_steps(ledger, stop):
        for pack in entry.packs:
            of_epoch = tokens.setdefault((pack.source, pack.epoch), {})
            for sample_id, length in zip(pack.sample_ids.tolist(), pack.lengths.tolist(), strict=True):
                of_epoch[sample_id] = of_epoch.get(sample_id, 0) + length
    found: dict[str, tuple[int, int]] = {}
    for (source, _), of_epoch in tokens.items():
        plan = next(each.mixture.plans[source] for each in ledger.stretches if source in each.mixture.plans)
        samples, total = found.get(source, (0, 0))
        is_split = plan.packing.overlong == "split"
        here = sum(not is_split or length == plan.lengths[sample_id] for sample_id, length in of_epoch.items())
        found[source] = samples + here, total + sum(of_epoch.values())
    return found


def _skipped_steps(ledger: StepLookup, stop: int) -> Iterator[StepEntry]:
    """Yield the skipped steps before `stop`."""
    ranges = {each for stretch in ledger.stretches for each in stretch.skipped}
    first_step = ledger.stretches[0].cursor.step
    for number in sorted({number for first, end in ranges for number in range(max(first, first_step), min(end, stop))}):
        entry = ledger.step(number)
        if entry.is_skipped:
            yield entry


# Amounts of the streams of a source: packs hold samples of several, and are made again.

_LEFT_OUT: tuple[Kind, Kind] = ("quarantined", "dropped")
_AT_ONCE = 1 << 12  # packs to make together
_Numbers = NDArray[np.int64]


def _of_streams(
    plan: PackPlan,
    at: SourceCursor,
    window: _InWindow | None,
    skipped: Sequence[PackEntry],
    *,
    lost: Sequence[NDArray[np.int64]],
) -> list[SourceAmounts]:
    """Amounts of each stream of a source, from all packs before a step, which are made again.

    skipped: packs of skipped steps. lost: ids of quarantined, and of dropped samples.
    """
    assert plan.streams is not None
    num_streams = len(plan.streams.names)
    seen = np.zeros(plan.num_samples, bool)
    read, passed = np.zeros((2, num_streams), np.int64), np.zeros((2, num_streams), np.int64)  # samples, tokens

    def add(into: NDArray[np.int64], ids: NDArray[np.int64], starts: NDArray[np.int64], tokens: object) -> None:
        streams = plan.streams_of(ids)
        into[0] += np.bincount(streams[starts == 0], minlength=num_streams)
        into[1] += np.bincount(streams, tokens, minlength=num_streams).astype(np.int64)  # type: ignore[arg-type]
        seen[ids] = True

    for segments in _segments_before(plan, at, window):
        add(read, *segments)
    for each in skipped:
        add(passed, each.sample_ids, each.starts, each.lengths)
    ids = np.arange(plan.num_samples)
    is_packed = packed_tokens(plan.index, slice(None), packing=plan.packing) > 0
    stored, packed, known, *out = (
        np.bincount(plan.streams_of(each), minlength=num_streams).tolist()
        for each in (ids, ids[is_packed], ids[seen], *lost)
    )
    return [
        SourceAmounts(
            epochs=int(read[0, number]) / max(1, packed[number]),
            num_samples=int(read[0, number] - passed[0, number]),
            num_tokens=int(read[1, number] - passed[1, number]),
            num_skipped_samples=int(passed[0, number]),
            num_skipped_tokens=int(passed[1, number]),
            num_seen=known[number],
            num_unseen=packed[number] - known[number],
            num_overlong=stored[number] - packed[number],
            num_quarantined=out[0][number],
            num_dropped=out[1][number],
        )
        for number in range(num_streams)
    ]


def _segments_before(plan: PackPlan, at: SourceCursor, window: _InWindow | None) -> Iterator[tuple[_Numbers, ...]]:
    """Yield sample ids, starts and lengths of the segments before a cursor, of some packs at a time."""
    begin = at if window is None else window.begin
    for epoch in range(begin.epoch + 1):
        stop = plan.num_packs(epoch) if epoch < begin.epoch else begin.packs
        for first in range(0, stop, _AT_ONCE):
            packs = plan.packs(epoch, first, min(stop, first + _AT_ONCE))
            yield packs.sample_ids, packs.starts, packs.lengths
    if window is not None:
        yield window.segments


def _covered_tokens(plan: PackPlan, at: SourceCursor, window: _InWindow | None) -> _Numbers:
    """Return the different tokens of each sample in the packs before a cursor: int64[num_samples].

    All packs are made again. Pieces of another packing_length may overlap.
    """
    covered = np.zeros(plan.num_samples, np.int64)
    later = [np.empty((3, 0), np.int64)]  # samples, starts and ends of pieces that are not the first
    for ids, starts, lengths in _segments_before(plan, at, window):
        is_first = starts == 0
        np.maximum.at(covered, ids[is_first], lengths[is_first])
        later.append(np.stack([ids, starts, starts + lengths])[:, ~is_first])
    pieces = np.concatenate(later, axis=1)
    ids, starts, ends = pieces[:, np.lexsort((pieces[1], pieces[0]))]
    reached = np.maximum.accumulate(ids << 32 | ends)
    before = np.concatenate([[-1], reached])[: len(ids)]  # sample of the former piece, and the end of all its pieces
    begins = np.where(before >> 32 == ids, before & ((1 << 32) - 1), 0)
    np.add.at(covered, ids, np.maximum(0, ends - np.maximum(np.maximum(starts, begins), covered[ids])))
    return covered


def seen_tokens_of_streams(ledger: StepLookup, source: str, step: int) -> _Numbers:
    """Return the different tokens of each stream of a source in the packs before a step: int64[num_streams]."""
    cursor, plan = ledger.cursor(step), ledger.plan_before(source, step)
    assert plan.streams is not None
    window = _in_window(ledger.stretch(step).mixture, cursor).get(source)
    of_samples = _covered_tokens(plan, cursor.sources[source], window)
    streams = plan.streams_of(np.arange(plan.num_samples))
    return np.bincount(streams, of_samples, minlength=len(plan.streams.names)).astype(np.int64)


def tokens_of_streams(plan: PackPlan) -> _Numbers:
    """Return the tokens of all samples of each stream in packs, each sample once: int64[num_streams]."""
    assert plan.streams is not None
    tokens = packed_tokens(plan.index, slice(None), packing=plan.packing)
    streams = plan.streams_of(np.arange(plan.num_samples))
    return np.bincount(streams, tokens, minlength=len(plan.streams.names)).astype(np.int64)


# The end of a run: stretches and skipped steps -> counts of steps. Pure.


def steps_to_end(stretch: Stretch, *, num_epochs: int | None = None) -> int | None:
    """Number of steps from the cursor of a stretch to the last pack of its sources; None for endless sources.

    num_epochs: number of passes over a mixture without weights, counted from the start of the run; the result is 0 if
    all passes are complete. None: to the end of the current epoch.
    """
    mixture, cursor, size = stretch.mixture, stretch.cursor, stretch.global_batch
    if mixture.schedule is not None:
        left = mixture.packs_left(cursor, global_batch=size)
        return None if left is None else num_steps(global_batch=size, num_packs=left)
    total = 0
    epoch = max(cursor.sources[name].epoch for name in mixture.names)  # a source added later has a lower epoch
    for _ in range(epoch, epoch + 1 if num_epochs is None else num_epochs):
        steps = num_steps(global_batch=size, num_packs=mixture.packs_left(cursor, global_batch=size) or 0)
        cursor = mixture.skip(cursor, steps, global_batch=size)
        total += steps
    return total


def step_after(first: int, num_steps: int, *, skipped: Ranges) -> int:
    """The step after `num_steps` unskipped steps from `first` on. skipped: ranges of steps, may overlap.

    >>> [step_after(0, num_steps, skipped=[(2, 4), (3, 5), (9, 20)]) for num_steps in (2, 6, 8)]
    [2, 9, 22]
    """
    end = first
    for begin, stop in sorted(skipped):
        kept = max(begin, end) - end
        if kept >= num_steps:
            break
        if stop <= end:
            continue
        end, num_steps = stop, num_steps - kept
    return end + num_steps
