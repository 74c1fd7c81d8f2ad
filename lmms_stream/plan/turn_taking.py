"""Several sources taking turns. plans + weights + positions -> packs in turn; arithmetic only.

A pack holds samples of one source, perhaps of several streams (see PackPlan). Weights are shares of the tokens of
packs. Each turn goes to the source with the earliest deadline, among sources that lack tokens of their share: packets
of any size share a line in this way in worst-case fair weighted fair queueing (Bennett and Zhang, 1996). The deadline
of a source is the last turn before the source lacks more than a full pack. After any number of packs each source has
had its share over the whole run to within a full pack of tokens. The deadline follows the scheduled weights of the next
turns and counts full packs: at a change of weights, the deadline is exact for full packs. The cursor keeps the lack of
each source.

Without weights, and in runs that an earlier release began, shares are of packs. The sources take turns by Tijdeman's
algorithm for the chairman assignment problem (Discrete Mathematics 32, 1980), the same for packs of equal size: a
source must lack at least 1 / (2k - 2) packs, and its deadline is the last turn before it lacks more than 1 - 1 / (2k -
2) packs. Each of k sources then has its share to within 1 - 1 / (2k - 2) packs.

After a source ends, the other sources share its turns and its lack. A phase of the schedule whose sources have all
ended takes the weights of the next phase with packs left, or else of the last phase before with packs left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError
from .cursor import EPOCHS, TOKENS, Cursor, SourceCursor, WindowCursor
from .kernels.turns import NEVER
from .pack_plan import PackPlan, of_own_seed
from .packing import PackRange, ends_of
from .source_ranges import (
    TOKEN_UNIT,
    UNIT,
    PlansByLength,
    SourceBlock,
    SourceRange,
    SourceRanges,
    SourceTurns,
    Weights,
    by_epoch,
    checked_epochs,
    join,
    join_known,
    parse_schedule,
    passed_on,
    to_quotas,
)

MAX_PHASES_AHEAD = 64  # phases of a schedule to search for deadlines
_QuotasKey = tuple[tuple[str, ...], tuple[Any, ...]]  # sources, and without weights their epochs and changes


class TurnTaking:
    """The sources of a Mixture and their turns, between two events of a run (see events.py)."""

    def __init__(
        self,
        plans: Mapping[str, PackPlan],
        *,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
    ):
        if not plans:
            raise ConfigError("a mixture needs at least one source")
        self._given = plans
        self.plans = {name: plan.sharing(len(plans)) for name, plan in plans.items()}
        self.names = tuple(self.plans)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.schedule = None if weights is None else parse_schedule(weights, self.names)
        self.read_names = self.names  # with weights only the sources with a weight
        if self.schedule is not None:
            self.read_names = tuple(n for n in self.names if any(weights.get(n) for _, weights in self.schedule))
            self._phase_starts = np.array([first for first, _ in self.schedule], np.int64)
        self._is_read = frozenset(self.read_names)
        self._quotas: tuple[_QuotasKey, NDArray[np.int64]] | None = None  # of the last sources with packs left
        self._share(EPOCHS if self.schedule is None else TOKENS)
        self.max_epochs = checked_epochs(max_epochs)
        for name in self.max_epochs:
            if name not in self.plans:
                raise ConfigError(f"max_epochs names {name!r}, the sources are {', '.join(self.names)}")
            if self.schedule is None:
                raise ConfigError("max_epochs needs weights: without weights each source comes once an epoch")
        self._take_plans()
        self.num_canonical_nodes = math.lcm(*(plan.num_canonical_nodes for plan in self.plans.values()))

    def _take_plans(self) -> None:
        for plan in self.plans.values():
            plan.counts_tokens |= self.schedule is not None and len(self.read_names) > 1
        self.by_length = PlansByLength(self.plans)
        self._kept: tuple[tuple[int, int, list[str], list[SourceCursor]], SourceTurns] | None = None  # the last turns

    def _fit_plans(self, cursor: Cursor) -> None:
        """Take the plans of sources with their first seeds; new sources have seeds of their own, see own_seeds."""

        def likeness(plan: PackPlan, began: str) -> int:
            return sum(a == b for a, b in zip(plan.fingerprint.split("-"), began.split("-"), strict=False))

        before = [*self.plans.values()]
        for name, plan in self._given.items():
            began, chosen = cursor.sources[name].plan if name in cursor.sources else plan.fingerprint, plan
            if began != plan.fingerprint:
                chosen = max(plan, plan.other or of_own_seed(plan, name), key=partial(likeness, began=began))
            if chosen.fingerprint != self.plans[name].fingerprint:
                self.plans[name] = chosen.sharing(len(self._given))
        if before != [*self.plans.values()]:
            self._take_plans()

    def _share(self, shares: str) -> None:
        """Share tokens by weights, packs by those of the epochs, or (old cursors) packs; see Cursor."""
        self.shares, self._quotas, self._kept = shares, None, None

    def plan_of(self, name: str, at: SourceCursor) -> PackPlan:
        """Return the plan of a source at a cursor, with the changes of packing_length so far."""
        return self.by_length.plan(name, at.changes)

    def check_position(self, name: str, at: SourceCursor) -> None:
        """Raise CursorError for a position, or a former change of packing_length, after the packs of its epoch."""
        places = [*(change[:2] for change in at.changes), at.place]
        if max(places) > at.place:
            raise CursorError(
                f"the saved cursor changes packing_length of {name!r} after its position, pack {at.packs} of epoch "
                f"{at.epoch}: it is damaged; use another checkpoint"
            )
        for number, (epoch, packs) in enumerate(places):
            if epoch < at.epoch:  # not counted again
                continue
            num_packs = self.by_length.plan(name, at.changes[:number]).num_packs(epoch)
            if packs > num_packs:
                raise CursorError(
                    f"the saved cursor is at pack {packs} of epoch {epoch} of {name!r}, which has {num_packs} packs: "
                    "use another checkpoint"
                )

    def left_of(self, sources: Mapping[str, SourceCursor]) -> int:
        """Return packs_left from some cursors on, without windows and later changes of packing_length."""
        if self.schedule is None:
            return sum(self._left_in_epoch(name, sources[name]) for name in self.names)
        left = [(name, sources[name]) for name in self.read_names if self.has_epochs_left(name, sources[name])]
        return sum(
            self._left_in_epoch(name, at)
            + self.plan_of(name, at).num_packs_of_epochs(at.epoch + 1, self.max_epochs[name])
            for name, at in left
        )

    def take(
        self,
        sources: dict[str, SourceCursor],
        step: int,
        count: int,
        *,
        global_batch: int,
        begun: int = 0,
        until: SourceRange | None = None,
        ranges: list[NDArray[np.int64]] | None = None,
    ) -> int:
        """Take `count` packs from a step on, or up to the end (without weights: of the epoch), without other events.

        Move `sources` behind these packs, add rows for them to `ranges`, in each step by source, and return their
        number. The order of `sources` decides between equal turns, and only the packing_length at the positions says
        how long packs are: later ones may change at a resume. begun: packs taken before, since the beginning of the
        step. until: the last pack to take, a range of length 1.
        """
        turn = step * global_batch + begun  # turns count from step 0
        key = global_batch, count, [*sources], [*sources.values()]
        if until is None and self._kept is not None and self._kept[0] == key:  # the next of many equal steps
            turns = self._kept[1]
            turns.sources = sources
            return self._take_turns(turns, turn, count, global_batch, None, ranges)
        names = [name for name in sources if name in self._is_read and self._has_packs(name, sources[name])]
        plans, numbers = self.by_length.at(sources)
        by_tokens = self.shares == TOKENS
        if len(names) == 1 and self.schedule is None and until is None:  # most runs: no turns to take
            name, at = names[0], sources[names[0]]
            taken = min(count, self._left_in_epoch(name, at))
            sources[name] = SourceCursor(at.plan, at.epoch, at.packs + taken, 0, at.changes)
            if ranges is not None:
                ranges.append(np.array([[numbers[name], at.epoch, at.packs, at.packs + taken]], np.int64))
            return taken
        turns = SourceTurns(
            sources,
            names,
            numbers=[numbers[name] for name in names],
            known_counts=lambda name, epoch: plans[name].known_counts(epoch),
            num_epochs=None if self.schedule is None else self._num_epochs,
            most=count,
            known_tokens=(lambda name, *at: plans[name].known_tokens(*at)) if by_tokens else None,
            full_pack=max(plan.full_pack for plan in plans.values()) if by_tokens else 1,
            at_once=min(global_batch, count + 1),
        )
        return self._take_turns(turns, turn, count, global_batch, until, ranges)

    def _take_turns(
        self,
        turns: SourceTurns,
        turn: int,
        count: int,
        global_batch: int,
        until: SourceRange | None,
        ranges: list[NDArray[np.int64]] | None,
    ) -> int:
        sources, done, is_found = turns.sources, 0, False
        while done < count and not is_found and turns.go_on():
            step, in_step = divmod(turn + done, global_batch)
            steps = global_batch - in_step, min(global_batch, count + 1)
            rows, ends = self._phases(step, steps[0], global_batch=global_batch)
            most = min(count - done, int(ends[0]))  # stop at the end of the first phase, then look at later phases
            quotas = self._quotas_of(sources, tuple(turns.names), tuple(turns.epochs))[rows]
            least = 1 if self.shares == TOKENS else UNIT // max(2, 2 * len(self.read_names) - 2)
            num_packs, is_found = turns.take(most, quotas, ends, least=least, until=until, steps=steps, ranges=ranges)
            done += num_packs
        is_complete = turns.write()
        self._kept = ((global_batch, count, [*sources], [*sources.values()]), turns) if is_complete else None
        return done

    def canonical_nodes(self, ranges: Sequence[SourceRange]) -> NDArray[np.int64]:
        """Return the canonical node of each pack of some ranges, as in `packs`, without making packs."""
        ranges = SourceRanges.of(self.by_length.names, ranges)
        nodes = np.empty(ranges.num_packs, np.int64)
        for each in by_epoch(ranges, is_short=self.by_length.is_short):
            plan = self.by_length.plans[each.number]
            parts = self.num_canonical_nodes // plan.num_canonical_nodes
            nodes[each.positions] = parts * plan.canonical_nodes(each.epochs, each.numbers)
        return nodes

    def packs(self, ranges: Sequence[SourceRange], chosen: NDArray[np.int64] | None = None) -> PackRange:
        """Return the packs of some ranges in turn; canonical nodes are below the mixture's num_canonical_nodes.

        chosen: ascending positions of the packs to return; None: all.
        """
        epochs = by_epoch(SourceRanges.of(self.by_length.names, ranges), chosen, is_short=self.by_length.is_short)
        found = [self.by_length.plans[each.number].take(each.epochs, each.numbers) for each in epochs]
        counts = [len(each) for each in found]

        def of_packs(values: Iterable[int]) -> NDArray[np.int64]:
            return np.repeat(np.fromiter(values, np.int64, len(found)), counts)

        names = [self.by_length.names[each.number] for each in epochs]
        parts = of_packs(self.num_canonical_nodes // self.plans[name].num_canonical_nodes for name in names)
        joined = PackRange(
            sample_ids=join(each.sample_ids for each in found),
            starts=join(each.starts for each in found),
            lengths=join(each.lengths for each in found),
            offsets=ends_of(join(np.diff(each.offsets) for each in found)),
            canonical_nodes=parts * join(each.canonical_nodes for each in found),
            sources=of_packs(self._numbers[name] for name in names),
            patches=join_known([each.patches for each in found], counts),
            epochs=join(each.epochs for each in epochs),
            repeats=join_known([each.repeats for each in found], [len(each.sample_ids) for each in found]),
        )
        positions = join(each.positions for each in epochs)
        return joined if np.all(positions[1:] > positions[:-1]) else joined.take(np.argsort(positions))

    def blocks(self, ranges: Sequence[SourceRange]) -> list[tuple[int, SourceBlock]]:
        """Return the shuffle blocks of some ranges' packs, each with the position of its first pack."""
        return [
            (int(each.positions[first]), SourceBlock(self.by_length.names[each.number], epoch, node, block))
            for each in by_epoch(SourceRanges.of(self.by_length.names, ranges), is_short=self.by_length.is_short)
            for first, epoch, node, block in self.by_length.plans[each.number].blocks(each.epochs, each.numbers)
        ]

    def steps_of_window(self, cursor: Cursor, *, global_batch: int) -> int:
        """Return the most steps of a window from a cursor on, see windows.py; 0 without windows."""
        return 0

    def window_steps(self, global_batch: int) -> int:
        """Return the steps of a window, 0 without windows."""
        return 0

    def window_at(self, cursor: Cursor, *, global_batch: int) -> WindowCursor | None:
        """Return the window beginning at a cursor without a window; None without windows or packs."""
        return None

    def take_in_window(
        self,
        window: WindowCursor,
        sources: dict[str, SourceCursor],
        count: int,
        *,
        global_batch: int,
        ranges: list[NDArray[np.int64]] | None = None,
    ) -> int:
        """Take the next `count` packs of a window, at most its rest, like `take`."""
        raise NotImplementedError("only a WindowedMixture has windows")

    def turns_of(self, window: WindowCursor, source: str, *, pack: SourceRange | None = None) -> NDArray[np.int64]:
        """Return the turns of a window with packs of a source, or with a pack, ascending: int64[n]."""
        raise NotImplementedError("only a WindowedMixture has windows")

    def packs_to_change(self, step: int, *, global_batch: int) -> int:
        """Return the packs from a step on with the same packing_length, and with windows the same weights."""
        change = self.by_length.next_change(step)
        return int(NEVER) if change is None else (change - step) * global_batch

    def change(self, sources: dict[str, SourceCursor], step: int) -> bool:
        """Give the sources the packing_length of a step from their positions on; return whether it is another one."""
        return self.by_length.change(sources, step, begins_epochs=self.schedule is not None)

    def begin_epoch(self, sources: dict[str, SourceCursor]) -> None:
        """Begin the next epoch of all sources; with weights each source begins its own, in `take`."""
        if self.schedule is None:
            for name in self.names:
                sources[name] = sources[name]._replace(epoch=sources[name].epoch + 1, packs=0, credit=0)

    def is_over(self, sources: Mapping[str, SourceCursor]) -> bool:
        """Return whether the epoch (with weights: each source's last epoch) is consumed; counts no packs early."""
        return not any(self._has_packs(name, sources[name]) for name in self.read_names)

    def has_epochs_left(self, name: str, at: SourceCursor) -> bool:
        return at.epoch < self._num_epochs(name)

    def _num_epochs(self, name: str) -> float:
        return self.max_epochs.get(name, math.inf)

    def _left_in_epoch(self, name: str, at: SourceCursor) -> int:
        return self.plan_of(name, at).num_packs(at.epoch) - at.packs

    def _phases(self, step: int, left: int, *, global_batch: int) -> tuple[slice, NDArray[np.int64]]:
        """Return the phases from the current phase on, and the last turn of each. left: turns left in the step."""
        if self.schedule is None:
            return slice(0, 1), np.array([NEVER])
        first = int(np.searchsorted(self._phase_starts, step, side="right")) - 1
        rows = slice(first, min(first + MAX_PHASES_AHEAD, len(self._phase_starts)))
        ends = (self._phase_starts[first + 1 : rows.stop] - step - 1) * global_batch + left
        return rows, np.append(ends, NEVER)

    def _has_packs(self, name: str, at: SourceCursor) -> bool:
        if self.schedule is None:
            return self._left_in_epoch(name, at) > 0
        return self.has_epochs_left(name, at)

    def _quotas_of(
        self, sources: Mapping[str, SourceCursor], names: tuple[str, ...], epochs: tuple[int, ...]
    ) -> NDArray[np.int64]:
        """Return the shares of the sources with packs left in each phase: int64[phases, len(names)].

        Without weights the shares are the packs of the sources' epochs, since a change of packing_length.
        """
        key: _QuotasKey = names, ()
        if self.schedule is None:
            key = names, (epochs, tuple(sources[name].changes for name in names))
        if self._quotas is not None and self._quotas[0] == key:
            return self._quotas[1]
        if self.schedule is None:
            plans = [self.plan_of(name, sources[name]) for name in names]
            quotas = to_quotas([plan.packs_in_turn(epoch) for plan, epoch in zip(plans, epochs, strict=True)])[None]
        else:
            weights = [[Fraction(repr(float(each.get(name, 0)))) for name in names] for _, each in self.schedule]
            unit = TOKEN_UNIT if self.shares == TOKENS else UNIT
            quotas = np.stack([to_quotas(shares, unit) for shares in passed_on(weights)])
        self._quotas = key, quotas
        return quotas
