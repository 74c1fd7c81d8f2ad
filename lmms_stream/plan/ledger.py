"""Contents of steps, and steps of samples. plans + stretches of a run -> [ledger] -> entries.

The plan is arithmetic: no log is needed, and only the shuffle blocks concerned are packed again. A run resumed with
other weights, sources or ranks is a list of stretches, each with the settings for a part of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CursorError, PackingError
from ..types import World
from .cursor import TOKENS, Cursor
from .kernels.deal import PAD
from .left_out import LeftOut
from .mixture import Mixture, Step
from .pack_plan import PackPlan
from .planner import deal_to_groups
from .source_ranges import SourceRange

Ranges = Sequence[tuple[int, int]]
KEPT_CURSORS = 64  # cursors before the last requested steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Steps of a run with the same settings, from a cursor on.

    global_batch: packs per step. world: ranks; `rank` does not matter. skipped: ranges [first, stop) of steps read by
    no rank, see skip_steps.
    """

    mixture: Mixture
    cursor: Cursor
    global_batch: int
    world: World = field(default_factory=World)
    skipped: Ranges = ()


class PackEntry(NamedTuple):
    """A pack of a step, and its readers.

    number: in the epoch of the source. group: number of the group of ranks with this pack. micro_batch: turn of the
    pack in the group. sample_ids, starts, lengths: int64[num_segments], see PackRange.
    """

    source: str
    epoch: int
    number: int
    group: int
    micro_batch: int
    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEntry:
    """A step. number: as in cursors, skipped steps included. packs: group by group, in turn."""

    number: int
    is_skipped: bool
    packs: Sequence[PackEntry]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceEntry:
    """A sample, or a piece of a split sample, in a step.

    step, is_skipped: see StepEntry; step is None if no step reads the piece. piece: number from 0. Other fields: see
    PackEntry; group and micro_batch are None without a step.
    """

    epoch: int
    piece: int
    pack: int
    step: int | None
    is_skipped: bool
    group: int | None
    micro_batch: int | None


class FirstStep(NamedTuple):
    """First step with any of some samples, and a sample read by the step."""

    step: int
    source: str
    sample_id: int


class StepLookup:
    """Looks up steps and samples of a run by its stretches.

    CursorError if the stretches are not in the order of their first steps.
    """

    def __init__(self, stretches: Sequence[Stretch]):
        self.stretches = tuple(stretches)
        self._cursors: dict[int, Cursor] = {}  # before requested steps: with weights a cursor takes all turns before it
        for before, after in pairwise(self.stretches):
            if after.cursor.step < before.cursor.step:
                raise CursorError(
                    f"a stretch of the run begins at step {after.cursor.step}, before the preceding stretch, which "
                    f"begins at step {before.cursor.step}: list stretches in the order of training"
                )
        if not self.stretches:
            raise CursorError("a ledger needs at least one stretch of a run: pass the stretch of a checkpoint")

    def step(self, number: int) -> StepEntry:
        """Return a step, also a future step; CursorError for a step before the first or after the end."""
        stretch = self.stretch(number)
        step = stretch.mixture.step(self.cursor(number), global_batch=stretch.global_batch)
        if not step.num_packs:
            raise CursorError(f"step {number} is after the end of the run: its sources have no packs left")
        return StepEntry(number=number, is_skipped=_is_in(number, stretch.skipped), packs=_entries(stretch, step))

    def sample(self, source: str, sample_id: int, *, stop: int, ahead: bool = False) -> list[PieceEntry]:
        """Return each piece of a sample in each epoch of its source that begins before step `stop`.

        ahead: include the steps from `stop` to the end of the current epoch, with the run's last settings. An empty
        list: the sample is overlong and dropped, or its source has not begun. PackingError for an unknown source or
        sample.
        """
        self.plan(source).check_sample(sample_id)
        end = self._end_of_epoch(source, stop) if ahead else stop
        plan = self.plan_before(source, end)
        num_pieces = plan.num_pieces(sample_id)
        return [
            self._piece(SourceRange(source=source, epoch=epoch, first=pack, stop=pack + 1), number % num_pieces, end)
            for epoch in range(self.num_epochs(source, stop, ahead=ahead))
            for number, pack in enumerate(plan.packs_of(epoch, sample_id).tolist())
        ]

    def num_epochs(self, source: str, stop: int, *, ahead: bool = False) -> int:
        """Return the number of epochs of a source begun before `stop`. ahead: count an epoch beginning at `stop`."""
        mixture = self.stretch(stop).mixture
        at = mixture.reach(self.cursor(stop)).get(source)
        if at is None:
            return 0
        goes_on = source in mixture.plans and at.epoch < mixture.max_epochs.get(source, at.epoch + 1)
        return at.epoch + (at.packs > 0 or (ahead and goes_on))

    def first_step(
        self, source: str, sample_ids: NDArray[np.int64], *, stop: int, left_out: LeftOut | None = None
    ) -> FirstStep | None:
        """Return the first step before `stop` with any of some samples, except skipped steps.

        Only the first shuffle block with these samples is packed again; further blocks only after skipped steps.
        sample_ids: int64[1 or more]. left_out: samples replaced by padding in steps, and therefore not read.
        """
        plan = self.plan_before(source, stop)
        # Packs come in turn, and a window gives a pack to another of its steps.
        early = max(
            each.mixture.steps_of_window(each.cursor, global_batch=each.global_batch) for each in self.stretches
        )
        found: FirstStep | None = None
        for epoch in range(self.num_epochs(source, stop)):
            for pack, sample_id in plan.first_packs_of(epoch, sample_ids):
                piece = SourceRange(source=source, epoch=epoch, first=pack, stop=pack + 1)
                number = self._step_of(piece, stop + early)
                if number is None:
                    break
                if found is not None and number - early >= found.step:
                    return found
                is_padding = left_out is not None and left_out.is_left_out(source, sample_id, step=number)
                is_earlier = number < (stop if found is None else found.step)
                if is_earlier and not self.is_skipped(number) and not is_padding:
                    found = FirstStep(step=number, source=source, sample_id=sample_id)
                    if not early:
                        return found
        return found

    def is_skipped(self, step: int) -> bool:
        """Return whether a step of the run is skipped."""
        return _is_in(step, self.stretch(step).skipped)

    def plan(self, source: str) -> PackPlan:
        """Return the plan of a source; PackingError for an unknown source."""
        plans = {name: plan for stretch in self.stretches for name, plan in stretch.mixture.plans.items()}
        if source not in plans:
            raise PackingError(f"the run has no source {source!r}: choose one of {', '.join(plans)}")
        return plans[source]

    def plan_before(self, source: str, step: int) -> PackPlan:
        """Return the plan of a source with the changes of packing_length before a step."""
        plan, at = self.plan(source), self.cursor(step).sources.get(source)
        if at is None or not at.changes:
            return plan
        mixture = next(each.mixture for each in reversed(self.stretches) if source in each.mixture.plans)
        return mixture.plan_of(source, at)

    def cursor(self, step: int) -> Cursor:
        """Return the cursor before a step, after all earlier steps, skipped steps included."""
        if step not in self._cursors:
            stretch = self.stretch(step)
            num_steps = step - stretch.cursor.step
            self._keep(stretch.mixture.skip(stretch.cursor, num_steps, global_batch=stretch.global_batch))
        return self._cursors[step]

    def _piece(self, pack: SourceRange, piece: int, stop: int) -> PieceEntry:
        number = self._step_of(pack, stop)
        if number is None:
            return PieceEntry(
                epoch=pack.epoch, piece=piece, pack=pack.first, step=None, is_skipped=False, group=None,
                micro_batch=None,
            )  # fmt: skip
        step = self.step(number)
        found = next(
            entry
            for entry in step.packs
            if (entry.source, entry.epoch, entry.number) == (pack.source, pack.epoch, pack.first)
        )
        return PieceEntry(
            epoch=pack.epoch, piece=piece, pack=pack.first, step=number, is_skipped=step.is_skipped,
            group=found.group, micro_batch=found.micro_batch,
        )  # fmt: skip

    def _step_of(self, pack: SourceRange, stop: int) -> int | None:
        """Return the step before `stop` with a pack, a range of length 1; None without a step."""
        for stretch, end in self._ends(stop):
            begin = self._nearest(stretch, pack, end)
            at = stretch.mixture.step_of(begin, pack, global_batch=stretch.global_batch, num_steps=end - begin.step)
            if at is not None:
                self._keep(at)
                return at.step
        return None

    def _nearest(self, stretch: Stretch, pack: SourceRange, end: int) -> Cursor:
        """Return the kept cursor of a stretch with the fewest turns to a pack."""
        nearest = stretch.cursor
        for step, cursor in self._cursors.items():
            is_here = nearest.step < step < end and self.stretch(step) is stretch
            if is_here and cursor.window is None and pack.source in cursor.sources:
                at = cursor.sources[pack.source]
                if at.place <= (pack.epoch, pack.first):
                    nearest = cursor
        return nearest

    def _keep(self, cursor: Cursor) -> None:
        self._cursors[cursor.step] = cursor
        if len(self._cursors) > KEPT_CURSORS:
            del self._cursors[next(iter(self._cursors))]

    def _end_of_epoch(self, source: str, step: int) -> int:
        stretch = self.stretch(step)
        if source not in stretch.mixture.plans:
            return step
        cursor, batch = self.cursor(step), stretch.global_batch
        end = last_step(stretch.mixture, cursor, source, global_batch=batch)
        late = 0 if stretch.mixture.schedule is None else stretch.mixture.steps_of_window(cursor, global_batch=batch)
        return max(step, end + late)

    def _ends(self, stop: int) -> Iterator[tuple[Stretch, int]]:
        """Yield the stretches with steps before `stop`, and the end of each."""
        ends = [*(after.cursor.step for after in self.stretches[1:]), stop]
        for stretch, end in zip(self.stretches, ends, strict=True):
            if stretch.cursor.step < min(end, stop):
                yield stretch, min(end, stop)

    def stretch(self, step: int) -> Stretch:
        """Return the stretch of a step; CursorError for a step before the first."""
        found = [stretch for stretch in self.stretches if stretch.cursor.step <= step]
        if not found:
            raise CursorError(f"step {step} is before the first, {self.stretches[0].cursor.step}: name a later one")
        return found[-1]


def _entries(stretch: Stretch, step: Step) -> list[PackEntry]:
    """Return the packs of a step, by group of ranks and micro-batch."""
    packs, names = stretch.mixture.packs(step.ranges), stretch.mixture.names
    numbers = np.concatenate([np.arange(taken.first, taken.stop) for taken in step.ranges])
    (dealt,) = deal_to_groups(packs, stretch.mixture, global_batch=stretch.global_batch, world=stretch.world)
    assert packs.epochs is not None  # packs of a mixture have epochs
    entries = []
    for (group, micro_batch), at in np.ndenumerate(dealt):
        if at != PAD:
            here = slice(packs.offsets[at], packs.offsets[at + 1])
            of_pack = names[packs.sources[at]], int(packs.epochs[at]), int(numbers[at]), group, micro_batch
            entries.append(PackEntry(*of_pack, packs.sample_ids[here], packs.starts[here], packs.lengths[here]))
    return entries


def _is_in(step: int, ranges: Ranges) -> bool:
    return any(first <= step < stop for first, stop in ranges)


# The last step of a source's epoch. mixture + cursor -> a step.


def last_step(mixture: Mixture, cursor: Cursor, source: str, *, global_batch: int) -> int:
    """Return a step before which all remaining packs of a source's epoch are read, if they are ever read.

    With weights the step is an upper bound: the source has its share of each step in the last phase of the schedule,
    and more after other sources end. A source without a share in the last phase is read again only after all sources of
    this phase end.
    """
    if mixture.schedule is None:
        return cursor.step - (-(mixture.packs_left(cursor, global_batch=global_batch) or 0) // global_batch)
    first, last = mixture.schedule[-1]
    begin = max(first, cursor.step)
    at = cursor.sources[source]
    left = mixture.plan_of(source, at).num_packs(at.epoch) - at.packs
    lengths = mixture.plans[source].packing.lengths
    left = left * max(lengths) // min(lengths) + len(lengths)  # packing_length may fall
    fill = {name: _fill(plan) if mixture.shares == TOKENS else 1.0 for name, plan in mixture.plans.items()}
    share = _share(last, source, fill)
    others = 0  # maximum packs of other sources before these
    if not share:
        if any(weight and name not in mixture.max_epochs for name, weight in last.items()):
            return begin
        shares = [_share(weights, source, fill) for _, weights in mixture.schedule]
        share = min((each for each in shares if each), default=share)
        for name, most in mixture.max_epochs.items():  # epochs have about as many packs each; twice this number
            at = cursor.sources[name]
            others += 2 * mixture.plan_of(name, at).num_packs(at.epoch) * max(0, most - at.epoch)
    if not share:
        return begin
    num_packs = others + left / share + len(mixture.names)
    if mixture.shares == TOKENS:  # packs of other epochs may be fuller, and a full pack is lacking at most
        longest = max(plan.longest_pack for plan in mixture.plans.values())
        num_packs += left / share + sum(longest / each for each in fill.values())
    return begin - int(-num_packs // global_batch) + 1


def _share(weights: Mapping[str, float], source: str, fill: Mapping[str, float]) -> float:
    """Return the share of a source in the packs. fill: about the tokens of a pack of each source."""
    packs = {name: weight / fill[name] for name, weight in weights.items()}
    return packs.get(source, 0) / sum(packs.values())


def _fill(plan: PackPlan) -> float:
    return max(1, plan.num_tokens(0)) / max(1, plan.num_packs(0))
