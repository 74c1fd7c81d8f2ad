"""Packs of several sources and epochs, as a mixture takes them in turn; ranges of them by source and epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..checks import plain_number, whole_number
from ..errors import ConfigError
from .changed_plan import ChangedPlan
from .cursor import Changes, LengthChange, SourceCursor
from .kernels.turns import NEVER, Sizes, no_sizes, take_epochs
from .pack_plan import KnownTokens, PackPlan
from .packing import ends_of, runs


class SourceRange(NamedTuple):
    """Packs [first, stop) of an epoch of a source."""

    source: str
    epoch: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False, slots=True)
class SourceRanges(Sequence[SourceRange]):
    """Ranges in turn, as columns: a step of a thousand small sources has thousands of ranges.

    names: of sources; a source has another number after each change of its packing_length. rows: int64[n, 4], number
    of the source in `names`, epoch, first pack, stop.
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
        """Return ranges of the same names joined in order."""
        return SourceRanges(ranges[0].names, np.concatenate([each.rows for each in ranges]))

    def singly(self) -> SourceRanges:
        """Return the packs in turn as ranges of length 1."""
        counts = self.rows[:, 3] - self.rows[:, 2]
        rows = np.repeat(self.rows, counts, axis=0)
        rows[:, 2] = runs(self.rows[:, 2], counts)
        rows[:, 3] = rows[:, 2] + 1
        return SourceRanges(self.names, rows)

    def part(self, first: int, stop: int) -> SourceRanges:
        """Return the ranges of the packs at positions [first, stop)."""
        ends = ends_of(self.rows[:, 3] - self.rows[:, 2])
        begin = int(np.searchsorted(ends, first, side="right")) - 1
        end = int(np.searchsorted(ends, stop))
        rows = self.rows[begin:end].copy()
        if len(rows):
            rows[0, 2] += first - ends[begin]
            rows[-1, 3] -= ends[end] - stop
        return SourceRanges(self.names, rows)

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


class RangePacks(NamedTuple):
    """Packs of an epoch of a source, or of several short epochs: their epochs, numbers and positions in all ranges.

    int64[num_packs] each; epochs ascend. number: of the source in SourceRanges.
    """

    number: int
    epochs: NDArray[np.int64]
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]


def by_epoch(
    ranges: SourceRanges, chosen: NDArray[np.int64] | None = None, *, is_short: NDArray[np.bool_]
) -> list[RangePacks]:
    """Return the packs of ranges grouped by epoch of a source; all epochs of a short source form a group.

    chosen: ascending positions of the packs to return; None: all. is_short: bool[sources].
    """
    if not len(ranges):
        return []
    sources, epochs, firsts, stops = ranges.rows.T
    begins = ends_of(stops - firsts)[:-1]
    joins = np.where(is_short[sources], 0, epochs)
    order = np.lexsort((firsts, epochs, joins, sources))  # plans make packs in ascending order
    sources, joins, epochs, firsts, counts = (each[order] for each in (sources, joins, epochs, firsts, stops - firsts))
    groups = np.flatnonzero((np.diff(sources, prepend=-1) != 0) | (np.diff(joins, prepend=-1) != 0))
    if chosen is None:
        numbers, positions, of_packs = runs(firsts, counts), runs(begins[order], counts), np.repeat(epochs, counts)
        ends = ends_of(counts)[np.append(groups, len(order))]
    else:
        at = np.argsort(order)[np.searchsorted(begins, chosen, side="right") - 1]
        by_range = np.argsort(at, kind="stable")
        at, positions = at[by_range], chosen[by_range]
        numbers, of_packs = firsts[at] + positions - begins[order][at], epochs[at]
        ends = np.searchsorted(at, np.append(groups, len(order)))
    bounds = ends.tolist()
    heads = zip(sources[groups].tolist(), bounds, bounds[1:], strict=False)
    found = [RangePacks(source, of_packs[a:b], numbers[a:b], positions[a:b]) for source, a, b in heads]
    return [found[group] for group in np.argsort(order[groups]).tolist()]  # by first range


def join_known(values: Sequence[NDArray[np.int64] | None], counts: Sequence[int]) -> NDArray[np.int64] | None:
    """Join arrays of these lengths, with zeros for each None; only None gives None."""
    if all(each is None for each in values):
        return None
    return join(np.zeros(n, np.int64) if each is None else each for each, n in zip(values, counts, strict=True))


def join(arrays: object) -> NDArray[np.int64]:
    """Join arrays; an empty list gives an empty array."""
    joined: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *arrays])  # type: ignore[misc]
    return joined.astype(np.int64, copy=False)


# The sources of a mixture as arrays while they take turns. cursors + shares -> ranges, cursors after them.
#
# A step of a thousand sources has packs of most sources, and often a source reaches the end of its epoch: cursors are
# read once per step, and written back once.

MAX_ROWS = 1 << 14  # ranges to take at once, besides a range per source
MAX_COUNTS = 1 << 16  # counts of epochs of all sources to read at once
MAX_TOKENS = 1 << 19  # tokens of packs of all sources to read at once
MOST_BITS = 25  # of the tokens of a pack; more are counted in units of several tokens


_new_cursor = partial(tuple.__new__, SourceCursor)  # at a third of the cost of a call of the class


class SourceTurns:
    """The sources with packs left: `names`, and their current `epochs`.

    sources: all cursors, moved by `write`. numbers: of the names, as in SourceRanges. known_counts: numbers of packs of
    an epoch of a source and of the next epochs counted together (see PackPlan). known_tokens: for turns by tokens, see
    PackPlan; full_pack: tokens of a full pack; at_once: packs of a step. num_epochs: of a source; None: a source ends
    with its current epoch, and stays there. most: maximum number of packs.
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
        known_tokens: Callable[[str, int, int, int], KnownTokens] | None = None,
        full_pack: int = 1,
        at_once: int = 0,
    ):
        self._known_tokens = known_tokens if len(names) > 1 else None
        self._shift = max(0, full_pack.bit_length() - MOST_BITS)
        self._at_once = at_once
        self._sizes = no_sizes(len(names))
        if self._known_tokens is not None:
            width = at_once + max(at_once, min(most, MAX_TOKENS // len(names)))
            nothing = np.zeros((2, len(names)), np.int64)
            is_cut, full = np.zeros(len(names), np.bool_), -(-full_pack >> self._shift)
            self._sizes = Sizes(np.empty((len(names), width), np.int64), nothing[0], nothing[1], is_cut, full)
        self.sources, self._num_epochs = sources, num_epochs
        self._most_known = min(most + 1, max(1, MAX_COUNTS // max(1, len(names))))  # epochs of each
        self._known_counts = known_counts
        cursors = [sources[name] for name in names]
        self.names = [*names]
        self._numbers = np.array(numbers, np.int64)
        self._first_epochs = np.array([at.epoch for at in cursors], np.int64)  # first epochs of the known counts
        self._at = np.zeros(len(names), np.int64)  # epochs after the first
        self._packs = np.array([at.packs for at in cursors], np.int64)
        self._credits = np.array([at.credit for at in cursors], np.int64)
        self._counts = [self._known(name, at.epoch) for name, at in zip(names, cursors, strict=True)]
        self._joined: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # the counts, for take_epochs
        self._ended: int | None = None  # number of the source whose known epochs are over

    def _known(self, name: str, epoch: int) -> NDArray[np.int64]:
        most = 1 if self._num_epochs is None else min(self._most_known, self._num_epochs(name) - epoch)
        return self._known_counts(name, epoch)[: int(most)]

    @property
    def epochs(self) -> list[int]:
        epochs: list[int] = (self._first_epochs + self._at).tolist()
        return epochs

    def go_on(self) -> bool:
        """Return whether any source has packs left; count the packs of an epoch only when it begins."""
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
                sizes = np.array([len(each) for each in self._counts])
                for other in np.flatnonzero(2 * self._at > sizes).tolist():  # they soon end, too
                    self._first_epochs[other] += self._at[other]
                    self._at[other] = 0
                    self._counts[other] = self._known(self.names[other], int(self._first_epochs[other]))
                return
        before, epoch, packs = self.sources[name], self._first_epochs[number] + self._at[number], self._packs[number]
        credit = int(self._credits[number])
        self.sources[name] = SourceCursor(before.plan, int(epoch), int(packs), credit, before.changes)
        del self.names[number], self._counts[number]
        self._numbers, self._first_epochs, self._at, self._packs, self._credits = (
            np.delete(values, number)
            for values in (self._numbers, self._first_epochs, self._at, self._packs, self._credits)
        )
        tokens, used, have = (np.delete(values, number, axis=0) for values in self._sizes[:3])
        self._sizes = Sizes(tokens, used, have, np.delete(self._sizes.goes_on, number), self._sizes.full)

    def _next_epoch(self, number: int) -> None:
        self._first_epochs[number] += self._at[number] + 1
        self._at[number] = self._packs[number] = 0
        self._sizes.used[number] = self._sizes.have[number]

    def _find_tokens(self) -> None:
        """Find the tokens of next packs where too few are known."""
        assert self._known_tokens is not None
        tokens, used, have, goes_on, _ = self._sizes
        if not np.any(needs := (have == used) | (goes_on & (have - used < self._at_once))):
            return
        for number in np.flatnonzero(needs | (2 * used > have)).tolist():  # others soon need them, too
            epoch = int(self._first_epochs[number] + self._at[number])
            found = self._known_tokens(self.names[number], epoch, int(self._packs[number]), tokens.shape[1])
            used[number], have[number] = 0, min(len(found.tokens), tokens.shape[1])
            goes_on[number] = found.goes_on or len(found.tokens) > have[number]
            tokens[number, : have[number]] = -(-found.tokens[: have[number]] >> self._shift)

    def take(
        self,
        count: int,
        quotas: NDArray[np.int64],
        ends: NDArray[np.int64],
        *,
        least: int,
        until: SourceRange | None,
        steps: tuple[int, int],
        ranges: list[NDArray[np.int64]] | None,
    ) -> tuple[int, bool]:
        """Take the next `count` packs, up to the end of known epochs or up to a pack; return the number of packs taken.

        quotas, ends, least, steps: see take_epochs. until: a range of length 1; also return whether this pack is taken
        by now. ranges: list to add rows of SourceRanges to.
        """
        wanted = self.names.index(until.source) if until is not None and until.source in self.names else None
        stop = np.array([-1, 0, 0])
        if until is not None and wanted is not None:
            stop = np.array([wanted, until.epoch - self._first_epochs[wanted], until.first])
        sizes = self._sizes
        if len(self.names) == 1:
            sizes = no_sizes(1)
        elif self._known_tokens is not None:
            self._find_tokens()
            ends = np.minimum(ends, NEVER // sizes.full) * sizes.full
        self._credits += share_out(-int(self._credits.sum()), quotas[0])
        if self._joined is None:
            self._joined = np.concatenate(self._counts), ends_of(np.array([len(each) for each in self._counts]))
        rows = np.empty((0 if ranges is None else min(count, MAX_ROWS) + len(self.names), 4), np.int64)
        done, num_rows, ended = take_epochs(
            count, self._at, self._packs, *self._joined, self._credits, quotas, ends, int(quotas[0].sum()) * sizes.full,
            least, stop, steps, rows, sizes,
        )  # fmt: skip
        self._ended = ended if ended >= 0 else None
        if ranges is not None:
            taken = rows[:num_rows]
            taken[:, 1] += self._first_epochs[taken[:, 0]]
            taken[:, 0] = self._numbers[taken[:, 0]]
            ranges.append(taken)
        if until is None or wanted is None:
            return done, False
        return done, (self.epochs[wanted], int(self._packs[wanted])) > (until.epoch, until.first)

    def write(self) -> bool:
        """Move the cursors to the sources' positions; return whether the turns can go on there."""
        if self._ended is not None and self._num_epochs is not None:  # begin the next epoch at once
            self._next_epoch(self._ended)
        before = [self.sources[name] for name in self.names]
        plans, changes = (map(attrgetter(name), before) for name in ("plan", "changes"))
        values = zip(plans, self.epochs, self._packs.tolist(), self._credits.tolist(), changes, strict=True)
        self.sources.update(zip(self.names, map(_new_cursor, values), strict=True))
        return self._ended is None


class PlansByLength:
    """The plans of sources by number: first of each source from step 0 on, then after changes of packing_length.

    names, plans, is_short: of each number; see SourceRanges.
    """

    def __init__(self, plans: Mapping[str, PackPlan]):
        self._plans = plans
        self._firsts = {name: number for number, name in enumerate(plans)}
        self._numbers: dict[tuple[str, Changes], int] = {(name, ()): number for name, number in self._firsts.items()}
        self.names, self.plans = list(plans), list(plans.values())
        self.is_short = np.array([plan.is_short for plan in self.plans])
        self._steps = sorted({step for plan in self.plans for step, _ in plan.packing.later_lengths})
        for name, plan in plans.items():
            for step, length in plan.packing.later_lengths:
                if not plan.has_packs(length):
                    raise ConfigError(
                        f"source {name!r} has no packs from step {step} on: all its samples are longer than "
                        f"packing_length {length}, and dropped; raise it"
                    )

    def number(self, name: str, changes: Changes) -> int:
        """Return the number of a source after some changes."""
        if not changes:
            return self._firsts[name]
        if (name, changes) not in self._numbers:
            self.plans.append(ChangedPlan(self.plan(name, changes[:-1]), changes[-1]))
            self._numbers[name, changes] = len(self.names)
            self.names.append(name)
            self.is_short = np.append(self.is_short, False)
        return self._numbers[name, changes]

    def plan(self, name: str, changes: Changes) -> PackPlan:
        """Return the plan of a source after some changes."""
        return self.plans[self.number(name, changes)] if changes else self._plans[name]

    def at(self, sources: Mapping[str, SourceCursor]) -> tuple[Mapping[str, PackPlan], Mapping[str, int]]:
        """Return the plan and the number of each source at its cursor."""
        if not self._has_changes(sources):
            return self._plans, self._firsts
        numbers = {name: self.number(name, sources[name].changes) for name in self._plans}
        return {name: self.plans[number] for name, number in numbers.items()}, numbers

    def _has_changes(self, sources: Mapping[str, SourceCursor]) -> bool:
        """Return whether there are steps with changes, or a cursor has a change of former settings."""
        return bool(self._steps) or any(map(attrgetter("changes"), sources.values()))

    def numbers_of(self, other: PlansByLength) -> NDArray[np.int64]:
        """Return the number here of each number of another mixture."""
        return np.array([self.number(name, changes) for name, changes in other._numbers], np.int64)

    def change(self, sources: MutableMapping[str, SourceCursor], step: int, *, begins_epochs: bool) -> bool:
        """Give the sources the packing_length of a step from their positions on; return whether any has another one.

        begins_epochs: begin the next epoch of a source without further packs of the new length.
        """
        is_changed = False
        if not self._has_changes(sources):
            return is_changed
        for name, plan in self._plans.items():
            at, length = sources[name], plan.packing.length_at(step)
            if length == self.plan(name, at.changes).packing.packing_length:
                continue
            kept = [each for each in at.changes if each[:2] < at.place]  # others changed no pack
            at = sources[name] = at._replace(changes=(*kept, LengthChange(*at.place, length)))
            if begins_epochs and at.packs == self.plan(name, at.changes).num_packs(at.epoch):
                sources[name] = at._replace(epoch=at.epoch + 1, packs=0)
            is_changed = True
        return is_changed

    def next_change(self, step: int) -> int | None:
        """Return the next step after this step with another packing_length; None without one."""
        return next((first for first in self._steps if first > step), None)


# Weights of sources along a run -> their shares in each phase, in whole numbers. Integer arithmetic only.

Weights = Mapping[str, float]  # source -> share of the tokens, in any unit
UNIT = 1 << 40  # a pack, in the unit of shares and credits
TOKEN_UNIT = 1 << 36  # a token, in the same, of turns by tokens


def parse_schedule(weights: Weights | Mapping[int, Weights], names: Sequence[str]) -> list[tuple[int, Weights]]:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights must map sources to shares, or first steps to such maps, got {weights!r}")
    by_step: dict[Any, Any] = {key: value for key, value in weights.items() if isinstance(value, Mapping)}
    if len(by_step) not in (0, len(weights)) or any(isinstance(step, str) for step in by_step):
        raise ConfigError(f"weights must map sources to shares, or first steps to such maps, got {dict(weights)!r}")
    for step in by_step:
        whole_number("a first step of weights", step, least=0)
    schedule: list[tuple[Any, Any]] = sorted(by_step.items()) if by_step else [(0, weights)]
    if schedule[0][0] != 0:
        raise ConfigError(f"a schedule of weights must begin at step 0, got step {schedule[0][0]}")
    checked: list[tuple[int, Weights]] = []
    for step, shares in schedule:
        for name, share in shares.items():
            if name not in names:
                raise ConfigError(f"weights name {name!r}, the sources are {', '.join(names)}")
            if isinstance(share, bool) or not (isinstance(share, Real) and math.isfinite(share) and float(share) >= 0):
                raise ConfigError(f"the weight of {name!r} must be a number that is 0 or more, got {share!r}")
        if not any(shares.values()):
            raise ConfigError(f"the weights from step {step} on are all 0: nothing would be read")
        checked.append((int(step), {name: plain_number(share) for name, share in shares.items()}))
    return checked


def checked_epochs(max_epochs: Mapping[str, int] | None) -> dict[str, int]:
    """Return the maximum epochs of each source; ConfigError for values other than whole numbers."""
    if not isinstance(max_epochs, Mapping | None):
        raise ConfigError(f"max_epochs must map sources to numbers of epochs, got {max_epochs!r}: write {{SOURCE: 2}}")
    counts = (max_epochs or {}).items()
    return {name: whole_number(f"max_epochs of {name!r}", count, least=1) for name, count in counts}


def to_quotas(shares: Sequence[Fraction | int], unit: int = UNIT) -> NDArray[np.int64]:
    """Return shares as whole numbers with the sum `unit`: int64[len(shares)]; the largest remainders are rounded up.

    >>> to_quotas([Fraction(3), Fraction(1)]).tolist() == [3 * UNIT // 4, UNIT // 4]
    True
    """
    denominator = math.lcm(*(share.denominator for share in shares))
    numbers = [share.numerator * (denominator // share.denominator) for share in shares]
    total = sum(numbers)
    quotas, rests = map(list, zip(*(divmod(number * unit, total) for number in numbers), strict=True))
    by_rest = sorted(range(len(shares)), key=lambda number: (-rests[number], number))
    for number in by_rest[: unit - sum(quotas)]:
        quotas[number] += 1
    return np.array(quotas, np.int64)


def passed_on(weights: Sequence[list[Fraction]]) -> list[list[Fraction]]:
    """Return the weights of each phase; a phase of zeros gets those of the next phase with weights, or of the last."""
    some = [number for number, shares in enumerate(weights) if any(shares)]
    return [
        weights[min((other for other in some if other >= number), default=some[-1])] for number in range(len(weights))
    ]


def share_out(credit: int, quotas: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a credit shared in proportion to quotas: int64, of their shape."""
    unit = int(quotas.sum())
    shares = np.array([credit * int(quota) // unit for quota in quotas.tolist()], np.int64) if credit else 0 * quotas
    shares[int(np.argmax(quotas))] += credit - int(shares.sum())
    return shares
