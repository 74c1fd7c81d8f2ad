"""A run from event to event. mixture + cursor -> [events] -> positions and numbers of packs; arithmetic only.

An event is the end of an epoch (with weights: of all sources), a change of packing_length, or the end of a window (see
windows.py). Between two events the sources of a mixture take turns. Steps, skipped steps, the steps of packs and the
packs left all come from here: each event has one place in which it applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .cursor import Cursor, SourceCursor, WindowCursor
from .source_ranges import SourceRange
from .turn_taking import TurnTaking

NO_STOP = 1 << 62  # steps


class Events(Iterator[int]):
    """A position in a run; each `next` moves it to the next event, or to `stop`, and returns the number of packs.

    step, begun: the step, and its packs before the position: a window may end in a step. sources: cursors at the
    position. window: of the next pack; passed: window of the last packs, before them. ended: whether the last event
    ended an epoch (with weights: all sources). Whole windows are passed without a window.

    stop: first step not to pass. until: last pack to pass outside of windows, a range of length 1. ranges: list to add
    rows of SourceRanges to; then a step has its window. most_epochs: to pass at once, without weights.
    """

    def __init__(
        self,
        mixture: TurnTaking,
        cursor: Cursor,
        *,
        global_batch: int,
        stop: int = NO_STOP,
        until: SourceRange | None = None,
        ranges: list[NDArray[np.int64]] | None = None,
        most_epochs: int = NO_STOP,
    ):
        self.step, self.begun = cursor.step, 0
        self.sources: dict[str, SourceCursor] = dict(cursor.sources)
        self.window, self.passed = cursor.window, cursor.window
        self.ended = False
        self._mixture, self._batch, self._stop = mixture, global_batch, stop
        self._until, self._ranges, self._most_epochs = until, ranges, most_epochs

    @property
    def cursor(self) -> Cursor:
        """The cursor at the position, if no pack of its step is passed; `next` moves its sources."""
        return Cursor(step=self.step, sources=self.sources, window=self.window, shares=self._mixture.shares)

    def __next__(self) -> int:
        if self.step >= self._stop:
            raise StopIteration
        num_packs = None if self._ranges is not None else self._pass_epochs()
        if num_packs is None:
            num_packs = self._take(self._packs_ahead())
            is_empty = not num_packs and not self.begun  # all sources have ended, or an epoch has no packs
            self.step, self.begun = divmod(self.step * self._batch + self.begun + num_packs, self._batch)
            if is_empty and self._mixture.schedule is None:
                self.step += 1
            elif is_empty:
                self.step = min(self._stop, self._mixture.by_length.next_change(self.step) or self._stop)
        self.arrive()
        return num_packs

    def arrive(self) -> None:
        """Apply the events at the position: the end of an epoch comes before a change of packing_length."""
        mixture, sources = self._mixture, self.sources
        self.ended = False
        if self.window is not None:
            return
        self.ended = mixture.is_over(sources)
        if not self.ended and mixture.change(sources, self.step):
            self.ended = mixture.is_over(sources)  # the rest may have no packs of the new length
        if self.ended:
            if self.begun:  # the epoch's last step is short
                self.step, self.begun = self.step + 1, 0
            mixture.begin_epoch(sources)
            mixture.change(sources, self.step)

    def _pass_epochs(self) -> int | None:
        """Pass to the end of the epoch, and of later epochs with known numbers of packs; return the number of packs.

        None with weights, in a window or step, and if the epoch does not end before the next event.
        """
        mixture, sources = self._mixture, self.sources
        if mixture.schedule is not None or self.window is not None or self.begun:
            return None
        change = mixture.by_length.next_change(self.step)
        at = {name: sources[name] for name in mixture.names}
        counts = {name: mixture.plan_of(name, each).known_counts(each.epoch) for name, each in at.items()}
        most = min(self._most_epochs, *map(len, counts.values()))
        if self._until is not None:
            most = min(most, self._until.epoch - at[self._until.source].epoch)
        if most < 1:
            return None
        totals = sum((each[:most] for each in counts.values()), np.zeros(most, np.int64))
        totals[0] -= sum(each.packs for each in at.values())
        ends = np.cumsum(np.maximum(1, -(-totals // self._batch)))
        stop = self._stop if change is None else min(self._stop, change)
        num_epochs = int(np.searchsorted(ends, stop - self.step, side="right"))
        if not num_epochs:
            return None
        for name, each in at.items():
            packs = int(counts[name][num_epochs - 1])
            sources[name] = each._replace(epoch=each.epoch + num_epochs - 1, packs=packs)
        self.step += int(ends[num_epochs - 1])
        return int(totals[:num_epochs].sum())

    def _packs_ahead(self) -> int:
        """Return the maximum packs to the next event or to the stop; enter a window that contains the stop."""
        mixture, batch = self._mixture, self._batch
        most = (self._stop - self.step) * batch - self.begun
        if self.window is not None:
            return min(most, self.window.num_left)
        to_event = mixture.packs_to_change(self.step, global_batch=batch) - self.begun
        size = mixture.window_steps(batch)
        if not size:
            return min(most, to_event)
        if self.begun:  # windows begin with a step
            return min(most, batch - self.begun)
        if self._ranges is None:
            if mixture.schedule is None:
                to_event = min(to_event, mixture.left_of(self.sources) or 0)
            if most >= to_event:
                return to_event
            if (whole := most // batch // size * size * batch) > 0:
                return whole
        self.window = mixture.window_at(self.cursor, global_batch=batch)
        return most if self.window is None else min(most, self.window.num_left)

    def _take(self, count: int) -> int:
        """Take packs in turn; return their number: fewer if the epoch, or all sources, end."""
        self.passed = self.window
        if self.window is None:
            return self._mixture.take(
                self.sources, self.step, count, global_batch=self._batch, begun=self.begun, until=self._until,
                ranges=self._ranges,
            )  # fmt: skip
        taken = self._mixture.take_in_window(
            self.window, self.sources, count, global_batch=self._batch, ranges=self._ranges
        )
        self.window = self.window.after(taken) if taken == count else None
        return taken


def skipped(mixture: TurnTaking, cursor: Cursor, num_steps: int, *, global_batch: int) -> Cursor:
    """Return the cursor after `num_steps` steps."""
    events = Events(mixture, cursor, global_batch=global_batch, stop=cursor.step + num_steps)
    for _ in events:
        pass
    return events.cursor


Part = tuple[Cursor, WindowCursor | None, int]  # a cursor, the window there, and without a window the turn of a pack


def part_with(pack: SourceRange, mixture: TurnTaking, cursor: Cursor, *, global_batch: int, end: int) -> Part | None:
    """Return the part of a run with a pack, a range of length 1: its window, or a cursor from which turns are counted.

    The part begins before step `end`. None if the pack is not in such a part, or was read before.
    """
    source, wanted, size = pack.source, (pack.epoch, pack.first), mixture.window_steps(global_batch)
    if source not in mixture.plans or (cursor.window is None and source not in mixture.read_names):
        return None
    stop = end + mixture.steps_of_window(cursor, global_batch=global_batch)  # of a window that begins before the end
    events = Events(mixture, cursor, global_batch=global_batch, stop=stop, until=pack)
    while events.step < end:
        before, begun = replace(events.cursor, sources=dict(events.sources)), events.begun
        if (before.window or before).sources.get(source, before.sources[source]).place > wanted:
            return None
        num_packs = next(events)
        if events.sources[source].place <= wanted:
            continue
        if begun:  # after a window that ends in a step
            steps = before.step - cursor.step + (begun + num_packs - 1) // global_batch
            return skipped(mixture, cursor, steps, global_batch=global_batch), None, 0
        if before.window is None and size:
            first = (num_packs - 1) // global_batch // size * size
            before = skipped(mixture, before, first, global_batch=global_batch)
            return before, mixture.window_at(before, global_batch=global_batch), 0
        return before, before.window, num_packs - 1
    return None


def last_step_of(source: str, mixture: TurnTaking, cursor: Cursor, *, global_batch: int, end: int) -> int | None:
    """Return the step before `end` with the last pack of a source ended by max_epochs; None without any."""
    part: Part | None = None
    stop = end + mixture.steps_of_window(cursor, global_batch=global_batch)
    events = Events(mixture, cursor, global_batch=global_batch, stop=stop)
    while part is None and source in mixture.max_epochs:
        is_over = events.window is None and not mixture.has_epochs_left(source, events.sources[source])
        if is_over or events.step >= end:
            return None
        next(events)
        at = events.sources[source]
        if mixture.has_epochs_left(source, at):
            continue
        part = cursor, cursor.window, 0
        if events.passed is None:
            last = mixture.plan_of(source, at).num_packs(at.epoch - 1)
            pack = SourceRange(source, at.epoch - 1, last - 1, last)
            part = part_with(pack, mixture, cursor, global_batch=global_batch, end=end)
            break
    if part is None:
        return None
    before, window, turn = part
    if window is not None:
        turn = int(mixture.turns_of(window, source).max(initial=-1)) - window.num_done
    step = before.step + turn // global_batch
    return step if before.step <= step < end else None
