"""Packs of each step, from several sources. plans + weights + cursor -> [mixture] -> pack ranges; arithmetic only.

The sources take turns, see turn_taking.py; the events of a run are in events.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError
from .cursor import EPOCHS, SEEDED, TOKENS, Cursor, SourceCursor, WindowCursor, differing_fields
from .events import Events, part_with, skipped
from .source_ranges import TOKEN_UNIT, UNIT, SourceRange, SourceRanges
from .turn_taking import TurnTaking

logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The packs of a step, at most global_batch, and the cursor after the step."""

    ranges: SourceRanges
    after: Cursor
    ends_epoch: bool  # without weights: end of the epoch; with weights: end of all sources
    window: WindowCursor | None = None  # before the step, if all packs of the step are in a window

    @property
    def num_packs(self) -> int:
        return self.ranges.num_packs


class Mixture(TurnTaking):
    """Steps over several plans.

    weights: shares of the tokens, or a schedule {first step: weights} from step 0 on; sources without a weight are not
    read. None: an epoch holds each source once, evenly interleaved, and ends with a short step. max_epochs: epochs of a
    source with weights (default: no limit); other sources continue after its end. Raises ConfigError for invalid
    weights.
    """

    @property
    def listed_weights(self) -> list[Any] | None:
        """The schedule of weights as JSON values, [first step, weights] of each phase; None without weights."""
        return None if self.schedule is None else [[step, dict(weights)] for step, weights in self.schedule]

    def start(self) -> Cursor:
        """Return the cursor before the first step."""
        return self.adopt(Cursor(sources={}))

    def adopt(self, cursor: Cursor) -> Cursor:
        """Return a cursor with all sources of this mixture: new sources begin at their first pack.

        Former sources keep their cursor. The sources stay in the cursor's order, and new ones follow. CursorError if a
        source follows another plan, and for numbers out of range.
        """
        is_old = len(cursor.sources) > 1 and not cursor.shares
        self._share("" if is_old else TOKENS if self.schedule is not None else EPOCHS)
        if cursor.shares not in ("", self.shares):  # credits are of another kind
            cursor = replace(cursor, sources={name: at._replace(credit=0) for name, at in cursor.sources.items()})
        self._fit_plans(cursor)
        cursor.check_plans({name: plan.fingerprint for name, plan in self.plans.items()})
        if cursor.step and not any(at.place > (0, 0) for at in cursor.sources.values()):
            raise CursorError(
                f"the saved cursor is at step {cursor.step}, and no pack of {', '.join(cursor.sources) or 'a source'} "
                "is read: it is damaged; use another checkpoint"
            )
        lengths = [plan.longest_pack for plan in self.plans.values()]
        lengths += [change.length for at in cursor.sources.values() for change in at.changes]
        pack = TOKEN_UNIT * max(lengths) if self.shares == TOKENS else UNIT
        for name, at in cursor.sources.items() if cursor.sources.keys() <= self.plans.keys() else ():
            if abs(at.credit) > pack * (len(cursor.sources) + 1):  # a pack, and parts of packs of ended sources
                raise CursorError(
                    f"the saved cursor has credit {at.credit} of {name!r}, more than any turns give: it is damaged; "
                    "use another checkpoint"
                )
        begins = {name: SourceCursor(plan=plan.fingerprint) for name, plan in self.plans.items()}
        has_order = cursor.has_order and len(cursor.sources) > 1  # a source alone has no order
        sources = (dict(cursor.sources) if has_order else {}) | begins | dict(cursor.sources)
        former = [(name, at.plan) for name, at in cursor.sources.items() if name not in self.plans]
        for name, plan in self.plans.items():
            for before, saved in former if name not in cursor.sources else ():  # positions belong to names
                if differing_fields(saved, plan.fingerprint) in ("", SEEDED):
                    logger.warning(
                        f"source {name!r} begins at its first pack, and the state's source {before!r} has the same "
                        f"samples: name it {before!r} to continue there"
                    )
        for name in self.names:
            at = sources[name]
            self.check_position(name, at)
            num_packs = self.plan_of(name, at).num_packs(at.epoch)
            if num_packs == 0:
                raise ConfigError(f"source {name!r} has no packs: all its samples are dropped; raise packing_length")
            if self.schedule is not None and at.packs == num_packs:
                at = at._replace(epoch=at.epoch + 1, packs=0)
            sources[name] = at
        events = Events(self, replace(cursor, sources=sources, has_order=True), global_batch=1)
        events.arrive()
        return events.cursor

    def packs_left(self, cursor: Cursor, *, global_batch: int = 0) -> int | None:
        """Return the packs to the end of the epoch, or with weights of all max_epochs; None: no end.

        global_batch: see take; needed if packing_length changes on the way.
        """
        if self.schedule is not None and any(name not in self.max_epochs for name in self.read_names):
            return None
        global_batch = global_batch or (0 if cursor.window is None else cursor.window.global_batch)
        events, total = Events(self, cursor, global_batch=global_batch, most_epochs=1), 0
        while not events.ended:
            if events.window is None and self.by_length.next_change(events.step) is None:
                return total + self.left_of(events.sources)
            if not global_batch:
                raise ConfigError("the packs left depend on the global batch while packing_length changes: give it")
            total += next(events)
        return total

    def packs_of_epochs(self, cursor: Cursor, num_epochs: int, *, global_batch: int) -> list[int]:
        """Return the packs of each epoch from a cursor to the end of `num_epochs` epochs of the first sources."""
        found: list[int] = []
        for _ in range(num_epochs - max(cursor.sources[name].epoch for name in self.names)):
            found.append(self.packs_left(cursor, global_batch=global_batch) or 0)
            cursor = self.skip(cursor, max(1, -(-found[-1] // global_batch)), global_batch=global_batch)
        return found

    def epochs_at(self, cursor: Cursor) -> list[tuple[str, int]]:
        """Return the sources with packs left, each with its current epoch."""
        return [(name, cursor.sources[name].epoch) for name in self._mixed(cursor)]

    def epochs_ahead(self, cursor: Cursor) -> list[tuple[str, int]]:
        """Return the sources past the middle of an epoch with the next epoch; [] without weights: all end together."""
        if self.schedule is None:
            return []
        found = []
        for name in self._mixed(cursor):
            at = cursor.sources[name]
            if 2 * at.packs >= self.plan_of(name, at).num_packs(at.epoch) and at.epoch + 1 < self._num_epochs(name):
                found.append((name, at.epoch + 1))
        return found

    def _mixed(self, cursor: Cursor) -> list[str]:
        return [name for name in self.read_names if self.has_epochs_left(name, cursor.sources[name])]

    def step(self, cursor: Cursor, *, global_batch: int) -> Step:
        """Return the next step, which has no packs if none are left.

        Without weights an epoch's last step may be short.
        """
        return self.turns(cursor, global_batch=global_batch)

    def turns(self, cursor: Cursor, *, global_batch: int) -> Step:
        """Return the next step with its packs in turn, whatever its window gives it."""
        ranges: list[NDArray[np.int64]] = [np.empty((0, 4), np.int64)]
        events = Events(self, cursor, global_batch=global_batch, stop=cursor.step + 1, ranges=ranges)
        num_packs, window = next(events), events.passed
        while events.step == cursor.step:  # a window ended in the step
            num_packs += next(events)
        return Step(
            ranges=SourceRanges(self.by_length.names, np.concatenate(ranges)),
            after=events.cursor,
            ends_epoch=events.ended,
            window=window if window is not None and num_packs <= window.num_left else None,
        )

    def skip(self, cursor: Cursor, num_steps: int, *, global_batch: int) -> Cursor:
        """Return the cursor after `num_steps` skipped steps, for example around a spike of the loss.

        Without weights whole epochs are skipped by their number of steps; with weights all turns are taken at once.
        """
        return skipped(self, cursor, num_steps, global_batch=global_batch)

    def step_of(self, cursor: Cursor, pack: SourceRange, *, global_batch: int, num_steps: int) -> Cursor | None:
        """Return the cursor before the step that reads a pack; None if none of the next num_steps reads the pack.

        pack: a range of length 1. All turns before the pack are taken at once.
        """
        end = cursor.step + num_steps
        if (part := part_with(pack, self, cursor, global_batch=global_batch, end=end)) is None:
            return None
        before, window, turn = part
        if window is not None:
            turn = int(self.turns_of(window, pack.source, pack=pack)[0]) - window.num_done
        step = self.skip(before, turn // global_batch, global_batch=global_batch) if turn >= 0 else None
        return step if step is not None and step.step < end else None

    def reach(self, cursor: Cursor) -> Mapping[str, SourceCursor]:
        """Return the cursors of sources after the last pack that may be read before this cursor."""
        return cursor.sources
