"""Future reads of a run from each source after a change of settings. ledger + changed stretch -> changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...plan.events import last_step_of
from ...plan.ledger import Ranges, StepLookup, Stretch
from ...plan.left_out import LeftOut, LeftOutIds
from ...plan.mixture import Mixture
from ...plan.pack_plan import PackPlan
from ...plan.windows import WindowedMixture
from .amounts import (
    SourceAmounts,
    all_tokens,
    amounts_of,
    mixed_streams,
    seen_tokens,
    seen_tokens_of_streams,
    steps_to_end,
    tokens_of_streams,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceChange:
    """Source in the steps [first, stop) of a run resumed with other settings.

    status: kept, added (the run has read nothing of it so far) or removed (nothing of it is read any more).
    token_share: of what these steps read, and token_share_before, of what they would read with the settings that the
    run had. packs_per_step: on average; of a stream, its share of the packs by tokens. num_samples, num_tokens: read by
    these steps; num_left_out_samples, num_left_out_tokens: of those, what is padding, because it is left out. Of them
    and of those that skipped steps pass over (num_skipped_tokens), num_new_samples and num_new_tokens were never read
    before, and num_repeated_samples and num_repeated_tokens were. num_unread_samples, num_unread_tokens: those that no
    step before `stop` reads. epochs_before, epochs_after: as SourceAmounts.epochs, before `first` and before `stop`.
    ends_at_step: the step with its last pack, where max_epochs ends it.
    """

    status: str
    token_share_before: float
    token_share: float
    packs_per_step: float
    num_samples: int
    num_tokens: int
    num_left_out_samples: int
    num_left_out_tokens: int
    num_skipped_tokens: int
    num_new_samples: int
    num_new_tokens: int
    num_repeated_samples: int
    num_repeated_tokens: int
    num_unread_samples: int
    num_unread_tokens: int
    epochs_before: float
    epochs_after: float
    ends_at_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPhase:
    """Steps [first, stop) with the same weights. token_shares: shares of the tokens read, by source."""

    first: int
    stop: int
    token_shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Packs of each source in the steps [first, stop), before and after a change. Steps count as in a ledger.

    is_end: no source has packs left then. global_batch: packs of a step, before and with the change. phases: the steps
    by the phases of the weights' schedule, in turn.
    """

    first: int
    stop: int
    is_end: bool
    global_batch_before: int
    global_batch: int
    sources: Mapping[str, SourceChange]
    phases: Sequence[WeightPhase]


def changed(ledger: StepLookup, mixture: Mixture, *, first: int, global_batch: int, skipped: Ranges = ()) -> StepLookup:
    """Ledger of a run resumed at step `first` with other settings.

    CursorError for a source with a different plan; ConfigError for a source without packs.
    """
    cursor = mixture.adopt(ledger.cursor(first))
    stretches = [each for each in ledger.stretches if each.cursor.step <= first]
    return StepLookup([*stretches, Stretch(mixture=mixture, cursor=cursor, global_batch=global_batch, skipped=skipped)])


def describe_change(before: StepLookup, after: StepLookup, *, stop: int, left_out: LeftOut | None = None) -> Change:
    """Compare the reads of the last stretch of `after` up to a step with the reads under the settings of `before`.

    left_out: samples replaced by padding from a given step. ConfigError without any step to describe.
    """
    stretch = after.stretches[-1]
    first, old = stretch.cursor.step, before.stretches[-1]
    to_end = steps_to_end(stretch) if stretch.mixture.schedule is not None else None
    is_end = to_end is not None and first + to_end <= stop
    stop = min(stop, first + to_end) if to_end is not None else stop
    if stop <= first:
        raise ConfigError(
            f"no step is left from step {first} on: the run is at its end, or its sources are: raise max_epochs, "
            "max_steps or the epochs, or add a source"
        )
    shares = _shares(amounts_of(before, first), amounts_of(before, stop))
    started, ended = amounts_of(after, first), amounts_of(after, stop)
    tokens = _tokens_by_name(after, (first, stop), [*ended])
    streams = mixed_streams(after, stop)
    sources = {
        name: _of_source(
            after,
            streams.get(name, (name, None)),
            (started[name], ended[name]),
            shares=(shares.get(name, 0.0), share),
            tokens=tokens[name],
            stop=stop,
            left_out=left_out or LeftOut(),
        )
        for name, share in _shares(started, ended).items()
    }
    for source in {source for source, _ in streams.values()}:  # its streams share its packs
        mine = [name for name, (other, _) in streams.items() if other == source]
        total = sum(sources[name].token_share for name in mine) or 1
        for name in mine:
            found = sources[name]
            sources[name] = replace(found, packs_per_step=found.packs_per_step * found.token_share / total)
    return Change(
        first=first,
        stop=stop,
        is_end=is_end,
        global_batch_before=old.global_batch,
        global_batch=stretch.global_batch,
        sources=sources,
        phases=_phases(after, {first: started, stop: ended}),
    )


class _Tokens(NamedTuple):
    """Different tokens of a source or stream before two steps, and in all."""

    seen: tuple[int, int]
    num_tokens: int


def _tokens_by_name(ledger: StepLookup, steps: tuple[int, int], names: Sequence[str]) -> dict[str, _Tokens]:
    """Return the tokens of each source and stream, by the names of amounts_of."""
    first, stop = steps
    streams = mixed_streams(ledger, stop)
    found = {}
    for name in names:
        if name not in streams:
            seen = seen_tokens(ledger, name, first), seen_tokens(ledger, name, stop)
            found[name] = _Tokens(seen, all_tokens(ledger, name, stop))
    for source in {source for source, _ in streams.values()}:
        was, is_now = (seen_tokens_of_streams(ledger, source, step).tolist() for step in steps)
        total = tokens_of_streams(ledger.plan_before(source, stop)).tolist()
        found |= {
            name: _Tokens((was[number], is_now[number]), total[number])
            for name, (other, number) in streams.items()
            if other == source
        }
    return found


def _phases(ledger: StepLookup, amounts: dict[int, Mapping[str, SourceAmounts]]) -> list[WeightPhase]:
    """The steps of the last stretch, by the phases of its weights. amounts: before its first and last step."""
    stretch = ledger.stretches[-1]
    first, stop = amounts
    starts = [step for step, _ in stretch.mixture.schedule or () if first < step < stop]
    amounts = {first: amounts[first], **{step: amounts_of(ledger, step) for step in starts}, stop: amounts[stop]}
    return [
        WeightPhase(first=begin, stop=end, token_shares=_shares(amounts[begin], amounts[end]))
        for begin, end in pairwise(amounts)
    ]


def _of_source(
    ledger: StepLookup,
    source: tuple[str, int | None],
    amounts: tuple[SourceAmounts, SourceAmounts],
    *,
    shares: tuple[float, float],
    tokens: _Tokens,
    stop: int,
    left_out: LeftOut,
) -> SourceChange:
    """source: name, and number of a stream. amounts: before the change and at its end; shares: with the old settings
    and the new.
    """
    name, stream = source
    stretch, plan = ledger.stretches[-1], ledger.plan_before(name, stop)
    before, after = amounts
    passed = _passed(after) - _passed(before)
    skipped = after.num_skipped_tokens - before.num_skipped_tokens
    skipped_samples = after.num_skipped_samples - before.num_skipped_samples
    num_samples = after.num_samples - before.num_samples
    new_samples = after.num_seen - before.num_seen
    seen = tokens.seen
    padding = padding_of(ledger, name, left_out, first=stretch.cursor.step, stop=stop, stream=stream)
    begin, end = (_read(ledger, name, step) for step in (stretch.cursor.step, stop))
    return SourceChange(
        status=_status(name, ledger),
        token_share_before=shares[0],
        token_share=shares[1],
        packs_per_step=(end.num_packs(plan) - begin.num_packs(plan)) / (stop - stretch.cursor.step),
        num_samples=num_samples,
        num_tokens=after.num_tokens - before.num_tokens,
        num_left_out_samples=padding[0],
        num_left_out_tokens=padding[1],
        num_skipped_tokens=skipped,
        num_new_samples=new_samples,
        num_new_tokens=seen[1] - seen[0],
        num_repeated_samples=num_samples + skipped_samples - new_samples,
        num_repeated_tokens=passed - (seen[1] - seen[0]),
        num_unread_samples=after.num_unseen,
        num_unread_tokens=tokens.num_tokens - seen[1],
        epochs_before=before.epochs,
        epochs_after=after.epochs,
        ends_at_step=last_step_of(name, stretch.mixture, stretch.cursor, global_batch=stretch.global_batch, end=stop),
    )


def _status(name: str, ledger: StepLookup) -> str:
    *before, stretch = ledger.stretches
    weighted = stretch.mixture.schedule
    if name not in stretch.mixture.plans or (weighted is not None and not any(w.get(name) for _, w in weighted)):
        return "removed"
    return "kept" if any(name in each.mixture.plans for each in before) else "added"


def _shares(before: Mapping[str, SourceAmounts], after: Mapping[str, SourceAmounts]) -> dict[str, float]:
    """Share of each source in the tokens between two steps."""
    tokens = {name: _passed(at) - (_passed(before[name]) if name in before else 0) for name, at in after.items()}
    total = sum(tokens.values())
    return {name: count / total if total else 0.0 for name, count in tokens.items()}


def _passed(amounts: SourceAmounts) -> int:
    return amounts.num_tokens + amounts.num_skipped_tokens


# Left-out samples, read as padding. ledger + left-out samples -> amounts. Pure.

_At = tuple[int, int]  # epoch, and number of a pack in the epoch


class _Read(NamedTuple):
    """The packs of a source before a step: packs before `place`, and packs in `further`, of an unfinished window."""

    place: _At
    further: frozenset[_At] = frozenset()

    def has(self, pack: _At) -> bool:
        return pack < self.place or pack in self.further

    @property
    def end(self) -> _At:
        """The place after all packs."""
        epoch, number = max(self.further, default=(0, -1))
        return max(self.place, (epoch, number + 1))

    def num_packs(self, plan: PackPlan) -> int:
        epoch, number = self.place
        return sum(plan.num_packs(each) for each in range(epoch)) + number + len(self.further)


def padding_of(
    ledger: StepLookup, source: str, left_out: LeftOut, *, first: int, stop: int, stream: int | None = None
) -> tuple[int, int]:
    """Samples and tokens of a source replaced by padding in the steps [first, stop): each sample once per epoch.

    Repeats in an epoch count too. Skipped steps do not count. Shuffle blocks with left-out samples are packed again.
    stream: number of the only stream to count.
    """
    found, plan = left_out.of_source(source), ledger.plan_before(source, stop)
    if stream is not None:
        found = LeftOutIds(*(each[plan.streams_of(found.sample_ids) == stream] for each in found))
    if not len(found.sample_ids):
        return 0, 0
    begin, end = _read(ledger, source, first), _read(ledger, source, stop)
    steps = {min(max(step, first), stop) for step in found.since_steps.tolist()}
    read_before = {step: _read(ledger, source, step) for step in steps}
    before = [read_before[min(max(step, first), stop)] for step in found.since_steps.tolist()]
    skipped = _skipped(ledger, source, first, stop)
    num_samples = num_tokens = 0
    for epoch in range(begin.place[0], end.end[0] + 1):
        packs, lengths, numbers, repeats = _segments(plan, epoch, found.sample_ids, stop=end.end)
        is_padding = [
            end.has((epoch, pack))
            and not before[number].has((epoch, pack))
            and not any(until.has((epoch, pack)) and not since.has((epoch, pack)) for since, until in skipped)
            for pack, number in zip(packs.tolist(), numbers.tolist(), strict=True)
        ]
        num_samples += np.unique(np.stack([numbers, repeats])[:, is_padding], axis=1).shape[1]
        num_tokens += int(lengths[is_padding].sum())
    return num_samples, num_tokens


def _read(ledger: StepLookup, source: str, step: int) -> _Read:
    cursor, mixture = ledger.cursor(step), ledger.stretch(step).mixture
    at, window = cursor.sources.get(source), cursor.window
    if window is not None and source in window.sources and isinstance(mixture, WindowedMixture):
        places = mixture.window_packs(window).places(source, window.num_done).tolist()
        return _Read(window.sources[source].place, frozenset((epoch, number) for epoch, number in places))
    return _Read((0, 0) if at is None else at.place)


def _skipped(ledger: StepLookup, source: str, first: int, stop: int) -> list[tuple[_Read, _Read]]:
    """Packs of the last stretch in skipped steps of [first, stop)."""
    ranges = [(max(begin, first), min(end, stop)) for begin, end in ledger.stretches[-1].skipped]
    return [(_read(ledger, source, begin), _read(ledger, source, end)) for begin, end in ranges if begin < end]


def _segments(plan: PackPlan, epoch: int, sample_ids: NDArray[np.int64], *, stop: _At) -> tuple[NDArray[np.int64], ...]:
    """Packs, tokens, samples and repeats of the segments of some samples in an epoch, in packs before `stop`.

    sample_ids: int64[n], sorted. Arrays int64[num_segments]; samples are positions in sample_ids.
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
    repeats = np.zeros_like(at) if packs.repeats is None else packs.repeats
    return of_segments[is_asked], packs.lengths[is_asked], at[is_asked], repeats[is_asked]
