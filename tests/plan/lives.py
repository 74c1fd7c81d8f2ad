"""A run in plain Python: pack by pack, with every event looked for after every pack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from lmms_stream.plan.assign import LINEAR_COST, pack_costs
from lmms_stream.plan.changed_plan import ChangedPlan
from lmms_stream.plan.cursor import LengthChange
from lmms_stream.plan.kernels.turns import NEVER
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig, PackRange
from lmms_stream.plan.source_ranges import TOKEN_UNIT, UNIT, parse_schedule, passed_on, share_out, to_quotas
from lmms_stream.plan.windows import ACROSS_SOURCES, DEAL, WindowedMixture, window_steps

from .test_turns import token_turn, turns_one_by_one
from .test_windows import Pack, sorted_window

Read = tuple[str, int, int]  # source, epoch, pack


class At(NamedTuple):
    """Position in a source, as in SourceCursor."""

    epoch: int = 0
    packs: int = 0
    credit: int = 0
    changes: tuple[LengthChange, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Sources of a run, and its plans in each stretch. sizes: samples of each shard of each source."""

    sizes: Mapping[str, tuple[int, ...]]
    seed: int
    nodes: int
    strategy: str
    overlong: Any
    first_length: int
    made: dict[Any, PackPlan] = field(default_factory=dict)
    packs: dict[Any, PackRange] = field(default_factory=dict)

    def plan(self, name: str, later: Mapping[int, int] = {}) -> PackPlan:
        key = name, tuple(sorted(later.items()))
        if key not in self.made:
            rng = np.random.default_rng([self.seed, ord(name)])
            lengths = rng.integers(1, 9 if self.overlong == "error" else 60, sum(self.sizes[name])).astype(np.int32)
            packing = PackingConfig(
                packing_length=self.first_length, later_lengths=tuple(later.items()), strategy=self.strategy, window=16,
                overlong=self.overlong,
            )  # fmt: skip
            order = OrderConfig(seed=self.seed + ord(name), num_canonical_nodes=self.nodes, shuffle_block_size=16)
            self.made[key] = PackPlan(lengths, self.sizes[name], order=order, packing=packing)
        return self.made[key]

    def changed(self, name: str, changes: tuple[LengthChange, ...]) -> PackPlan:
        """Return the plan after some changes."""
        if not changes:
            return self.plan(name)
        if (name, changes) not in self.made:
            self.made[name, changes] = ChangedPlan(self.changed(name, changes[:-1]), changes[-1])
        return self.made[name, changes]

    def pack(self, name: str, at: At) -> PackRange:
        key = name, at.epoch, at.packs, at.changes
        if key not in self.packs:
            self.packs[key] = self.changed(name, at.changes).packs(at.epoch, at.packs, at.packs + 1)
        return self.packs[key]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a stretch."""

    names: tuple[str, ...]
    weights: Any
    max_epochs: Mapping[str, int]
    balance: str | int
    global_batch: int
    later: Mapping[int, int]

    def mixture(self, sources: Sources) -> WindowedMixture:
        plans = {name: sources.plan(name, self.later) for name in self.names}
        return WindowedMixture(plans, weights=self.weights, max_epochs=self.max_epochs, balance=self.balance)


@dataclass
class Window:
    """reads: packs of the turns after sorting. after: positions of the sources after each turn."""

    reads: list[tuple[Read, PackRange]]
    after: list[dict[str, At]]
    done: int = 0

    @property
    def names_left(self) -> set[str]:
        return {read[0] for read, _ in self.reads[self.done :]}


class Life:
    """A run under the settings of a stretch; `at` and `window` stay when the settings change."""

    def __init__(self, sources: Sources, settings: Settings, *, at: Mapping[str, At] = {}, step: int = 0):
        self.sources, self.settings, self.step = sources, settings, step
        self.at: dict[str, At] = dict(at)
        self.window: Window | None = None
        self.quotas: dict[Any, list[list[int]]] = {}
        self.counted: dict[tuple[str, int], int] = {}  # packs of the epochs that were read last
        self.resumed(settings)

    def copy(self) -> Life:
        found = copy(self)
        found.at, found.counted, found.window = dict(self.at), dict(self.counted), copy(self.window)
        return found

    def resumed(self, settings: Settings) -> Life:
        """Take other settings from the next step on."""
        weights = settings.weights
        if (self.settings.weights is None) != (weights is None):  # credits of packs, or of tokens
            self.at = {name: at._replace(credit=0) for name, at in self.at.items()}
        self.settings, self.quotas = settings, {}
        self.schedule = None if weights is None else parse_schedule(weights, settings.names)
        shares = self.schedule or [(0, dict.fromkeys(settings.names, 1.0))]
        self.read_names = {name for name in settings.names if any(of_step.get(name) for _, of_step in shares)}
        names = dict.fromkeys([*(self.at if len(self.at) > 1 else ()), *settings.names, *self.at])
        self.at = {name: self.at.get(name, At()) for name in names}
        for name in settings.names:
            at = self.at[name]
            if self.schedule is not None and at.packs == self.num_packs(name, at):
                self.at[name] = at._replace(epoch=at.epoch + 1, packs=0)
        if self.window is None and self.apply_events():
            self.begin_epoch()
        return self

    def num_packs(self, name: str, at: At) -> int:
        return self.sources.changed(name, at.changes).num_packs(at.epoch)

    def has_packs(self, name: str) -> bool:
        at = self.at[name]
        if self.schedule is None:
            return at.packs < self.num_packs(name, at)
        return at.epoch < self.settings.max_epochs.get(name, math.inf)

    def is_over(self) -> bool:
        return not any(self.has_packs(name) for name in self.read_names)

    def apply_events(self) -> bool:
        """Apply what is due before the next pack of step `self.step`; return whether the epoch ended."""
        ended = self.is_over()
        if not ended:
            self.change()
            ended = self.is_over()
        return ended

    def change(self) -> None:
        for name in self.settings.names:
            at = self.at[name]
            due = [length for step, length in sorted(self.settings.later.items()) if step <= self.step]
            length = due[-1] if due else self.sources.first_length
            if length == (at.changes[-1].length if at.changes else self.sources.first_length):
                continue
            kept = tuple(each for each in at.changes if (each.epoch, each.packs) < (at.epoch, at.packs))
            at = at._replace(changes=(*kept, LengthChange(at.epoch, at.packs, length)))
            if self.schedule is not None and at.packs == self.num_packs(name, at):
                at = at._replace(epoch=at.epoch + 1, packs=0)
            self.at[name] = at

    def begin_epoch(self) -> None:
        if self.schedule is None:
            for name in self.settings.names:
                self.at[name] = self.at[name]._replace(epoch=self.at[name].epoch + 1, packs=0, credit=0)
        self.change()

    def take(self, in_step: int) -> tuple[Read, PackRange] | None:
        """Take the next pack in turn; None if no source has any."""
        names = [name for name in self.at if name in self.read_names and self.has_packs(name)]
        if not names:
            return None
        chosen, credits = 0, [0]
        if len(names) > 1:
            ends = [int(NEVER)]
            if self.schedule is None:
                shares = []
                for name in names:
                    at = self.at[name]
                    last = at.changes[-1] if at.changes else None
                    before = last.packs if last is not None and last.epoch == at.epoch else 0
                    shares.append(self.num_packs(name, at) - before)
                quotas = self.quotas_of([shares])
            else:
                by_phase = passed_on([[Fraction(repr(float(w.get(n, 0)))) for n in names] for _, w in self.schedule])
                now = sum(first <= self.step for first, _ in self.schedule) - 1
                quotas = self.quotas_of(by_phase[now:])
                batch = self.settings.global_batch
                ends = [(first - self.step) * batch - in_step for first, _ in self.schedule[now + 1 :]] + ends
            lacks = [self.at[name].credit for name in names]
            more = share_out(-sum(lacks), np.array(quotas[0])).tolist()
            credits = [a + b for a, b in zip(lacks, more, strict=True)]
            if self.schedule is not None:
                full = max(self.sources.changed(name, self.at[name].changes).full_pack for name in self.settings.names)
                chosen = token_turn(credits, quotas, ends, full)
                tokens = int(self.sources.pack(names[chosen], self.at[names[chosen]]).lengths.sum())
                credits = [a + quota * tokens for a, quota in zip(credits, quotas[0], strict=True)]
                credits[chosen] -= TOKEN_UNIT * tokens
            else:
                left = [1 << 40] * len(names)
                least = UNIT // max(2, 2 * len(self.read_names) - 2)
                (chosen,) = turns_one_by_one(1, left, credits, quotas, ends, least)
        for name, credit in zip(names, credits, strict=True):
            self.at[name] = self.at[name]._replace(credit=credit)
        name, at = names[chosen], self.at[names[chosen]]
        pack = self.sources.pack(name, at)
        self.counted[name, at.epoch] = self.num_packs(name, at)
        self.at[name] = at._replace(packs=at.packs + 1)
        if self.schedule is not None and at.packs + 1 == self.num_packs(name, at):
            self.at[name] = at._replace(epoch=at.epoch + 1, packs=0)
        return (name, at.epoch, at.packs), pack

    def quotas_of(self, shares: Sequence[Sequence[Any]]) -> list[list[int]]:
        key = tuple(map(tuple, shares))
        if key not in self.quotas:
            unit = UNIT if self.schedule is None else TOKEN_UNIT
            self.quotas[key] = [to_quotas(each, unit).tolist() for each in shares]
        return self.quotas[key]

    def listed(self, taken: list[tuple[Read, PackRange]]) -> list[tuple[Read, PackRange]]:
        """Return packs of a step as a step lists them: by source, in parts that end with an epoch of a source."""
        found: list[tuple[Read, PackRange]] = []
        part: list[tuple[Read, PackRange]] = []
        order = list(self.at)
        for (name, epoch, number), pack in taken:
            part.append(((name, epoch, number), pack))
            if number + 1 == self.counted[name, epoch]:
                found += sorted(part, key=lambda each: (order.index(each[0][0]), *each[0][1:]))
                part = []
        return found + sorted(part, key=lambda each: (order.index(each[0][0]), *each[0][1:]))

    def open_window(self) -> None:
        settings = self.settings
        nodes = math.lcm(*(self.sources.plan(name).num_canonical_nodes for name in settings.names))
        steps = window_steps(settings.balance, global_batch=settings.global_batch, num_canonical_nodes=nodes)
        first, begin = self.step, dict(self.at)
        taken: list[Any] = []
        after: list[Any] = []
        starts = {step for step, _ in self.schedule or ()} | {*settings.later}
        while self.step < first + steps and (self.step == first or self.step not in starts):
            in_step = len(taken) % settings.global_batch
            if (found := self.take(in_step)) is None:
                break
            taken.append(found)
            after.append(dict(self.at))
            self.step = first + len(taken) // settings.global_batch
        self.step, self.at = first, begin
        if not taken:
            return
        packs, size = [], settings.global_batch
        taken = [each for n in range(0, len(taken), size) for each in self.listed(taken[n : n + size])]
        for (name, epoch, number), made in taken:
            parts = nodes // self.sources.plan(name).num_canonical_nodes
            work = int(pack_costs(made, linear_cost=LINEAR_COST)[0])
            packs.append(Pack(name, epoch, number, parts * int(made.canonical_nodes[0]), 0, work))
        seed = self.sources.plan(next(name for name in self.at if name in self.read_names)).order.seed
        across = settings.balance == ACROSS_SOURCES
        steps_of = sorted_window(packs, global_batch=size, seed=seed, first=first, across_sources=across)
        by_read = dict(taken)
        self.window = Window([(read, by_read[read]) for step in steps_of for read in step], after)

    def next_step(self) -> tuple[list[tuple[Read, PackRange]], bool]:
        """Return the packs of the next step, and whether an epoch (with weights: all sources) ends with it."""
        found: list[tuple[Read, PackRange]] = []
        in_turn: list[tuple[Read, PackRange]] = []  # without a window
        ended = False
        if self.window is None and self.settings.balance != DEAL:
            self.open_window()
        while len(found) + len(in_turn) < self.settings.global_batch and not ended:
            if (window := self.window) is not None:
                found.append(window.reads[window.done])
                self.at |= window.after[window.done]
                window.done += 1
                if window.done == len(window.reads):
                    self.window = None
                    if len(found) < self.settings.global_batch:
                        ended = self.apply_events()
                continue
            taken = self.take(len(found) + len(in_turn))
            if taken is not None:
                in_turn.append(taken)
            ended = self.is_over()
        self.step += 1
        if self.window is None:
            ended = ended or self.apply_events()
            if ended:
                self.begin_epoch()
        return found + self.listed(in_turn), ended
