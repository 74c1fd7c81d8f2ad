"""Which packs of which source make a step. plans + weights + cursor -> [mixture] -> pack ranges; arithmetic only.

A pack holds samples of one source, and packs are nearly full, so shares of packs are shares of tokens. Within a
phase (a stretch with the same weights and the same sources) the sources take turns by Tijdeman's algorithm for the
chairman assignment problem (Discrete Mathematics 32, 1980): after any number of packs, each of k sources has had
its exact share to within 1 - 1 / (2k - 2) packs. A phase begins where the weights change, a source is added or
ends, or (without weights) an epoch begins; what was consumed before is never touched.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .cursor import Cursor, SourceCursor
from .pack_plan import PackPlan, short_digest
from .pack_range import PackRange, ends_of, runs

Weights = Mapping[str, float]  # source -> share of the tokens, in any unit
_EVERY_SOURCE_ONCE = "each source once"  # the phase without weights


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRange:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The packs of a step, at most global_batch, and where training stands after it."""

    ranges: tuple[SourceRange, ...]
    after: Cursor
    ends_epoch: bool  # without weights: the epoch; with weights: everything

    @property
    def num_packs(self) -> int:
        return sum(taken.stop - taken.first for taken in self.ranges)


class Mixture:
    """Steps over several plans.

    weights: shares of the tokens, or a schedule {first step: weights} that begins at step 0; sources without a
    weight are left out. None: an epoch holds each source once, evenly interleaved, and ends with a short step.
    max_epochs: how often a source is repeated with weights (default: for ever); then the others go on without it.
    Raises ConfigError for weights that make no sense.
    """

    def __init__(
        self,
        plans: Mapping[str, PackPlan],
        *,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
    ):
        if not plans:
            raise ConfigError("a mixture needs at least one source")
        self.plans = dict(plans)
        self.names = tuple(self.plans)
        self.schedule = None if weights is None else _parse_schedule(weights, self.names)
        self.max_epochs = dict(max_epochs or {})
        for name, count in self.max_epochs.items():
            if name not in self.plans:
                raise ConfigError(f"max_epochs names {name!r}, the sources are {', '.join(self.names)}")
            if self.schedule is None:
                raise ConfigError("max_epochs needs weights: without weights each source comes once an epoch")
            if count < 1:
                raise ConfigError(f"max_epochs of {name!r} must be at least 1, got {count}")
        self.num_canonical_nodes = math.lcm(*(plan.num_canonical_nodes for plan in self.plans.values()))

    def start(self) -> Cursor:
        """The cursor before the first step."""
        return self.adopt(Cursor(sources={}))

    def adopt(self, cursor: Cursor) -> Cursor:
        """A cursor made ready for these sources: those it lacks begin at their first pack.

        Sources that are no longer mixed keep their cursor in it. CursorError when a source follows another plan
        or stands beyond its epoch.
        """
        cursor.check_plans({name: plan.fingerprint for name, plan in self.plans.items()})
        sources = dict(cursor.sources)
        for name, plan in self.plans.items():
            at = sources.get(name, SourceCursor(plan=plan.fingerprint))
            num_packs = plan.num_packs(at.epoch)
            if num_packs == 0:
                raise ConfigError(f"source {name!r} has no packs: all its samples are dropped; raise packing_length")
            at.check_packs(name, num_packs)
            if self.schedule is not None and at.packs == num_packs:
                at = SourceCursor(plan=at.plan, epoch=at.epoch + 1, taken=at.taken)
            sources[name] = at
        if self.schedule is None and self._is_over(sources):  # the source that had packs left is mixed no more
            self._begin_epoch(sources)
        return Cursor(step=cursor.step, phase=cursor.phase, sources=sources)

    def packs_left(self, cursor: Cursor) -> int | None:
        """Packs to the end: of the epoch without weights, of all sources' max_epochs with; None: it has no end."""
        if self.schedule is None:
            return sum(self._left_in_epoch(name, cursor.sources[name]) for name in self.names)
        total = 0
        for name in self.names:
            at = cursor.sources[name]
            if not any(weights.get(name) for _, weights in self.schedule):
                continue
            if name not in self.max_epochs:
                return None
            if self._has_epochs_left(name, at):
                total += self._left_in_epoch(name, at)
                total += sum(self.plans[name].num_packs(e) for e in range(at.epoch + 1, self.max_epochs[name]))
        return total

    def step(self, cursor: Cursor, *, global_batch: int) -> Step:
        """The next step; one without packs at an end. Without weights, an epoch's last step may be short."""
        sources = dict(cursor.sources)
        phase = cursor.phase
        ranges: list[SourceRange] = []
        left = global_batch
        while left:
            phase, quotas = self._phase(cursor.step, phase, sources)
            if not quotas:
                break
            taken = self._take_turns(quotas, sources, left)
            for name, count in taken.items():
                at = sources[name]
                ranges.append(SourceRange(source=name, epoch=at.epoch, first=at.packs, stop=at.packs + count))
                sources[name] = self._advance(name, at, count)
                left -= count
        ends_epoch = left > 0 or self._is_over(sources)
        if self.schedule is None and ends_epoch:
            self._begin_epoch(sources)
        after = Cursor(step=cursor.step + 1, phase=phase, sources=sources)
        return Step(ranges=tuple(ranges), after=after, ends_epoch=ends_epoch)

    def skip(self, cursor: Cursor, num_steps: int, *, global_batch: int) -> Cursor:
        """The cursor after `num_steps` steps that nobody reads (around a spike of the loss, say)."""
        for _ in range(num_steps):
            cursor = self.step(cursor, global_batch=global_batch).after
        return cursor

    def packs(self, ranges: Sequence[SourceRange]) -> PackRange:
        """The packs of some ranges in turn; canonical nodes count to this mixture's num_canonical_nodes."""
        found = []
        for of_epoch in _by_epoch(ranges):
            plan = self.plans[of_epoch.source]
            packs = plan.take(of_epoch.epoch, of_epoch.numbers)
            nodes = packs.canonical_nodes * (self.num_canonical_nodes // plan.num_canonical_nodes)
            sources = np.full(len(packs), self.names.index(of_epoch.source))
            found.append(dataclasses.replace(packs, canonical_nodes=nodes, sources=sources))
        if len(found) == 1:
            return found[0]
        joined = PackRange(
            sample_ids=_join(each.sample_ids for each in found),
            starts=_join(each.starts for each in found),
            lengths=_join(each.lengths for each in found),
            offsets=ends_of(_join(np.diff(each.offsets) for each in found)),
            canonical_nodes=_join(each.canonical_nodes for each in found),
            sources=_join(each.sources for each in found),
        )
        return joined.take(np.argsort(_join(each.positions for each in _by_epoch(ranges))))

    def blocks(self, ranges: Sequence[SourceRange]) -> list[tuple[int, SourceBlock]]:
        """The shuffle blocks that packs of some ranges come from, each with the position of its first pack."""
        return [
            (int(each.positions[first]), SourceBlock(source=each.source, epoch=each.epoch, node=node, block=block))
            for each in _by_epoch(ranges)
            for first, node, block in self.plans[each.source].blocks(each.epoch, each.numbers)
        ]

    def _begin_epoch(self, sources: dict[str, SourceCursor]) -> None:
        for name in self.names:
            sources[name] = SourceCursor(plan=sources[name].plan, epoch=sources[name].epoch + 1)

    def _is_over(self, sources: Mapping[str, SourceCursor]) -> bool:
        """Whether the epoch (with weights: every source's last epoch) is consumed; counts no packs ahead of time."""
        if self.schedule is None:
            return not any(self._left_in_epoch(name, sources[name]) for name in self.names)
        weighted = [name for name in self.names if any(weights.get(name) for _, weights in self.schedule)]
        return not any(self._has_epochs_left(name, sources[name]) for name in weighted)

    def _has_epochs_left(self, name: str, at: SourceCursor) -> bool:
        return at.epoch < self.max_epochs.get(name, math.inf)

    def _left_in_epoch(self, name: str, at: SourceCursor) -> int:
        return self.plans[name].num_packs(at.epoch) - at.packs

    def _phase(self, step: int, phase: str, sources: dict[str, SourceCursor]) -> tuple[str, dict[str, int]]:
        """The phase at hand and its quotas: whole numbers in proportion to which the sources take turns.

        A new phase sets `taken` of all sources to 0. No quotas: everything is consumed.
        """
        if self.schedule is None:
            identity = _identity(f"{_EVERY_SOURCE_ONCE}: {', '.join(self.names)}")
            left = {name: self._left_in_epoch(name, sources[name]) for name in self.names}
            quotas = {
                name: count + (sources[name].taken if identity == phase else 0) if any(left.values()) else 0
                for name, count in left.items()
            }
        else:
            weights = next(weights for first, weights in reversed(self.schedule) if first <= step)
            shares = {
                name: Fraction(repr(float(weights[name])))
                for name in self.names
                if weights.get(name) and self._has_epochs_left(name, sources[name])
            }
            scale = math.lcm(*(share.denominator for share in shares.values()))
            quotas = {name: int(share * scale) for name, share in shares.items()}
            identity = _identity(json.dumps(quotas))
        if identity != phase:
            for name, at in sources.items():
                sources[name] = SourceCursor(plan=at.plan, epoch=at.epoch, packs=at.packs)
        return identity, {name: quota for name, quota in quotas.items() if quota}

    def _take_turns(self, quotas: Mapping[str, int], sources: Mapping[str, SourceCursor], count: int) -> dict[str, int]:
        """How many packs each source gives, until `count` are taken or one comes to the end of its epoch."""
        names = list(quotas)
        left = [self._left_in_epoch(name, sources[name]) for name in names]
        if len(names) == 1:
            return {names[0]: min(count, left[0])}
        shares = list(quotas.values())
        taken = [sources[name].taken for name in names]
        before = list(taken)
        open_ended = self.schedule is not None
        for _ in range(count):
            chosen = _chairman(shares, taken)
            taken[chosen] += 1
            left[chosen] -= 1
            if left[chosen] == 0 and (open_ended or not any(left)):
                break
        return {name: after - start for name, after, start in zip(names, taken, before, strict=True) if after > start}

    def _advance(self, name: str, at: SourceCursor, count: int) -> SourceCursor:
        """The cursor after `count` more packs of the epoch; with weights, the next epoch follows at once."""
        packs, taken = at.packs + count, at.taken + count
        if self.schedule is not None and packs == self.plans[name].num_packs(at.epoch):
            return SourceCursor(plan=at.plan, epoch=at.epoch + 1, taken=taken)
        return SourceCursor(plan=at.plan, epoch=at.epoch, packs=packs, taken=taken)


def _chairman(quotas: Sequence[int], taken: Sequence[int]) -> int:
    """Whose turn it is: Tijdeman's rule in whole numbers.

    With shares q / Q, turn n and k sources: of those that lack at least 1 / (2k - 2) packs, the one for which
    (1 - 1 / (2k - 2) - lack) / share is least, so the one that would be overdue first.
    """
    total, turn, width = sum(quotas), sum(taken) + 1, 2 * len(quotas) - 2
    chosen, least = -1, Fraction(0)
    for number, (quota, had) in enumerate(zip(quotas, taken, strict=True)):
        lack = (quota * turn - had * total) * width  # in units of 1 / (total * width)
        if lack >= total:
            urgency = Fraction(total * (width - 1) - lack, quota)
            if chosen < 0 or urgency < least:
                chosen, least = number, urgency
    return chosen


def _parse_schedule(weights: Weights | Mapping[int, Weights], names: Sequence[str]) -> list[tuple[int, Weights]]:
    by_step: dict[Any, Any] = {key: value for key, value in weights.items() if isinstance(value, Mapping)}
    schedule: list[tuple[Any, Any]] = sorted(by_step.items()) if by_step else [(0, weights)]
    if len(by_step) not in (0, len(weights)) or any(isinstance(step, str) for step in by_step):
        raise ConfigError(f"weights must map sources to shares, or first steps to such maps, got {dict(weights)!r}")
    if schedule[0][0] != 0:
        raise ConfigError(f"a schedule of weights must begin at step 0, got step {schedule[0][0]}")
    checked: list[tuple[int, Weights]] = []
    for step, shares in schedule:
        for name, share in shares.items():
            if name not in names:
                raise ConfigError(f"weights name {name!r}, the sources are {', '.join(names)}")
            if not (isinstance(share, int | float) and math.isfinite(share) and share >= 0):
                raise ConfigError(f"the weight of {name!r} must be a number that is 0 or more, got {share!r}")
        if not any(shares.values()):
            raise ConfigError(f"the weights from step {step} on are all 0: nothing would be read")
        checked.append((int(step), dict(shares)))
    return checked


@lru_cache  # it is asked for at every step
def _identity(phase: str) -> str:
    return short_digest(phase.encode())


class _EpochPacks(NamedTuple):
    """Packs of one epoch of a source: their numbers in it, and their positions among the packs of all ranges."""

    source: str
    epoch: int
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]


def _by_epoch(ranges: Sequence[SourceRange]) -> list[_EpochPacks]:
    counts = np.array([taken.stop - taken.first for taken in ranges], np.int64)
    firsts = np.array([taken.first for taken in ranges], np.int64)
    begins = ends_of(counts)[:-1]
    members: dict[tuple[str, int], list[int]] = {}
    for number, taken in enumerate(ranges):
        members.setdefault((taken.source, taken.epoch), []).append(number)
    return [
        _EpochPacks(source, epoch, runs(firsts[mine], counts[mine]), runs(begins[mine], counts[mine]))
        for (source, epoch), mine in members.items()
    ]


def _join(arrays: object) -> NDArray[np.int64]:
    joined: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *arrays])  # type: ignore[misc]
    return joined.astype(np.int64, copy=False)
