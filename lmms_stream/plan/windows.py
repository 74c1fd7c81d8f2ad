"""Steps of packs with similar work. mixture + window -> [windows] -> packs of each turn; integer arithmetic only.

A window is a number of successive steps. The turns of the mixture decide the source and canonical node of each pack of
a step. In a window, the packs of a source in a canonical node are sorted by work and given to the turns of the same
source and canonical node, in a random order of the steps: the packs of a step then have similar work, and steps differ.
Each step keeps its share of each source, each node keeps its shards, and each pack of the window is read once. With
media, packs are divided into classes of similar work of the tower, and sorted by the work of tokens within a class.

Across sources, all packs of a canonical node are sorted together, and given to all turns of the node. Packs of all
sources in a step then have similar work, and sources have their shares only in whole windows. Only sorting decides the
source of a turn, so positions of sources inside a window count turns, not packs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..checks import whole_number
from ..errors import ConfigError, CursorError
from .assign import LINEAR_COST, pack_costs
from .cursor import TOKENS, Cursor, SourceCursor, WindowCursor
from .mixture import Mixture, Step
from .pack_plan import PackPlan, short_digest
from .packing import PackRange
from .source_ranges import SourceRange, SourceRanges, Weights

DEAL, WINDOW, ACROSS_SOURCES = "deal", "window", "across_sources"
LEAST_STEPS, MOST_STEPS = 64, 256  # of a window, unless given
PACKS_PER_NODE = 2048  # of a window in each canonical node, where MOST_STEPS allow them
_STREAM = 46  # of the order of steps, apart from other random streams of the seed


def window_steps(balance: str | int, *, global_batch: int, num_canonical_nodes: int) -> int:
    """Return the steps of a window, 0 for `deal`.

    >>> [window_steps("window", global_batch=size, num_canonical_nodes=8) for size in (8, 128, 512)]
    [256, 128, 64]
    """
    if balance == DEAL:
        return 0
    if balance in (WINDOW, ACROSS_SOURCES):
        return min(MOST_STEPS, max(LEAST_STEPS, -(-PACKS_PER_NODE * num_canonical_nodes // global_batch)))
    return int(balance)


def checked_balance(balance: str | int) -> str | int:
    """Return `balance`; ConfigError unless it is deal, window, across_sources or a number of steps of at least 2."""
    if balance in (DEAL, WINDOW, ACROSS_SOURCES):
        return balance
    if isinstance(balance, str):
        raise ConfigError(
            f"balance must be {DEAL}, {WINDOW}, {ACROSS_SOURCES} or the number of steps of a window, got {balance!r}: "
            "write one of these"
        )
    return whole_number("balance", balance, least=2)


class SortedPacks:
    """The packs of a window, made for some canonical nodes, and the pack of each turn.

    turns: all packs of the window in turn. nodes: canonical node of each, int64[num_packs].
    packs: the made packs. made: turns of these, int64, ascending.
    """

    def __init__(
        self,
        window: WindowCursor,
        turns: SourceRanges,
        *,
        seed: int,
        nodes: NDArray[np.int64],
        packs: PackRange,
        made: NDArray[np.int64],
    ):
        self.window, self.turns, self.packs, self.made = window, turns, packs, made
        places = np.random.default_rng([seed, _STREAM, window.step]).permutation(window.num_steps)
        group = nodes[made]
        if not window.across_sources:
            group = group * (1 + packs.sources.max(initial=0)) + packs.sources
        by_place = np.lexsort((places[made // window.global_batch], group))
        self._made = np.full(window.num_packs, -1, np.int64)  # number of the turn's pack in `packs`
        self._made[made[by_place]] = self._by_work(packs, group, window)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The pack of each turn as a row of SourceRanges; of nodes that were not made, in turn."""
        rows, is_made = self.turns.singly().rows, self._made >= 0
        rows[is_made] = rows[self.made[self._made[is_made]]]
        return rows

    @staticmethod
    def _by_work(packs: PackRange, group: NDArray[np.int64], window: WindowCursor) -> NDArray[np.int64]:
        """Return the numbers of the packs, sorted by group and work; packs of equal work stay in turn."""
        work = pack_costs(packs, linear_cost=window.linear_cost)
        if packs.patches is None or not packs.patches.any():
            return np.lexsort((work, group))
        by_tower = np.lexsort((packs.patches, group))
        begins, counts = np.unique(group[by_tower], return_index=True, return_counts=True)[1:]
        has_media = packs.patches[by_tower[begins + counts - 1]] > 0  # other nodes do not matter: they may not be made
        rank = np.arange(len(group)) - np.repeat(begins, counts)
        num_classes = np.where(has_media, math.isqrt(window.num_steps), 1)
        tower_class = np.empty(len(group), np.int64)
        tower_class[by_tower] = rank * np.repeat(num_classes, counts) // np.repeat(counts, counts)
        return np.lexsort((work, tower_class, group))

    def take(self, turns: NDArray[np.int64]) -> PackRange:
        """Return the packs of some turns of nodes that were made."""
        return self.packs.take(self._made[turns])

    def places(self, source: str, num_turns: int) -> NDArray[np.int64]:
        """Return epoch and number of the packs of a source in the first turns: int64[n, 2]."""
        return self.rows[:num_turns][self.is_of(source)[:num_turns], 1:3]

    def is_of(self, source: str) -> NDArray[np.bool_]:
        """Return the turns with a pack of a source, bool[num_packs]."""
        return np.isin(self.rows[:, 0], [number for number, name in enumerate(self.turns.names) if name == source])

    def turns_of(self, source: str, pack: SourceRange | None) -> NDArray[np.int64]:
        """Return the turns with packs of a source, or with a pack, a range of length 1."""
        is_in_turn = self.is_of(source)
        if pack is not None:
            is_in_turn &= (self.rows[:, 1:3] == pack[1:3]).all(axis=1)
        return np.flatnonzero(is_in_turn)


class WindowedMixture(Mixture):
    """A mixture whose steps are of packs with similar work.

    balance: "window", "across_sources", or the number of steps of a window; with "deal" only the window of a state is
    finished. Other arguments: see Mixture.
    """

    def __init__(
        self,
        plans: Mapping[str, PackPlan],
        *,
        weights: Weights | Mapping[int, Weights] | None = None,
        max_epochs: Mapping[str, int] | None = None,
        balance: str | int = DEAL,
    ):
        super().__init__(plans, weights=weights, max_epochs=max_epochs)
        self.balance = checked_balance(balance)
        for name, plan in plans.items():
            if self.balance != DEAL and not plan.order.shuffle:
                raise ConfigError(
                    f"balance {balance!r} changes the order of packs, and source {name!r} has shuffle: false: set "
                    f"balance to {DEAL}, or shuffle to true"
                )

    def _take_plans(self) -> None:
        super()._take_plans()  # with other numbers of the sources than the last window
        self._former: tuple[WindowCursor, Mixture] | None = None  # of a window that began with other sources or weights
        self._turns: tuple[WindowCursor, SourceRanges, NDArray[np.int64] | None] | None = None  # last window, nodes
        self._of_window: tuple[WindowCursor, bytes, SortedPacks] | None = None

    def adopt(self, cursor: Cursor) -> Cursor:
        """Return Mixture.adopt. A window of other sources, weights or max_epochs is finished before they apply.

        CursorError inside a window for a source missing here, for weights in the cursor or here alone, and for
        contradictory numbers.
        """
        self._fit_plans(cursor)
        if cursor.window is not None:
            self._mixture_of(cursor.window)
        adopted = super().adopt(cursor)
        if cursor.window is not None:
            self._check_window(cursor, cursor.window)
        return adopted

    def _check_window(self, cursor: Cursor, window: WindowCursor) -> None:
        """Raise CursorError unless the window has its packs, and its turns so far lead to the cursor's sources."""
        mixture, sources = self._mixture_of(window), dict(window.sources)
        for name, at in sources.items():
            mixture.check_position(name, at)
        turns = self._in_turn(window)
        mixture.take(sources, window.step, window.num_done, global_batch=window.global_batch)
        computed = {"packs": turns.num_packs, "turns": _digest(turns), **sources}
        saved = {"packs": window.num_packs, "turns": window.turns or computed["turns"], **cursor.sources}
        for name, value in computed.items():
            if saved.get(name) != value:
                raise CursorError(
                    f"the state is inside a window (see balance) of {name} {saved.get(name)}, and its sources give "
                    f"{name} {value}: the state was changed after it was saved, use another checkpoint"
                )

    @cached_property
    def _mix(self) -> str:
        """Settings of the turns of the sources, without their order, as text."""
        return json.dumps([self.listed_weights, dict(self.max_epochs)], sort_keys=True)

    def _mixture_of(self, window: WindowCursor) -> Mixture:
        """Return the mixture in which a window began."""
        if window.mix == self._mix and window.sources.keys() == self.plans.keys():
            return self
        if self._former is None or self._former[0] != window.begin or self._former[1].shares != self.shares:
            self._former = window.begin, self._made_former(window)
        return self._former[1]

    def _made_former(self, window: WindowCursor) -> Mixture:
        try:
            weights, max_epochs = json.loads(window.mix)
            schedule = None if weights is None else {int(step): shares for step, shares in weights}
        except (ValueError, TypeError) as error:
            raise CursorError(f"the saved cursor is damaged ({error!r}): use another checkpoint") from error
        missing = [name for name in window.sources if name not in self.plans]
        why = f"it reads {missing[0]}, which is not here" if missing else ""
        if (schedule is None) != (self.schedule is None):
            why = "only one of both has weights"
        if why:
            last = window.step + window.num_steps
            raise CursorError(
                f"the state is inside a window (see balance), with other sources or weights, and {why}: continue "
                f"with the former ones to step {last} (max_steps), and change them there"
            )
        plans = {name: self.plans[name] for name in window.sources}
        former = Mixture(plans, weights=schedule, max_epochs=max_epochs)
        former._share(self.shares)
        return former

    def step(self, cursor: Cursor, *, global_batch: int) -> Step:
        window = cursor.window or self.window_at(cursor, global_batch=global_batch)
        step = self.turns(replace(cursor, window=window), global_batch=global_batch)
        if window is None:
            return step
        num_packs = min(step.num_packs, window.num_left)
        rows = self.window_packs(window).rows[window.num_done : window.num_done + num_packs]
        later = step.ranges.singly().rows[num_packs:]
        return replace(step, ranges=SourceRanges(self.by_length.names, np.concatenate([rows, later])))

    def window_at(self, cursor: Cursor, *, global_batch: int) -> WindowCursor | None:
        if self.balance == DEAL:
            return None
        steps = self.window_steps(global_batch)
        most = min(steps * global_batch, self.packs_to_change(cursor.step, global_batch=global_batch))
        ranges: list[NDArray[np.int64]] = []
        num_packs = self.take(dict(cursor.sources), cursor.step, most, global_batch=global_batch, ranges=ranges)
        if not num_packs:
            return None
        sources = {name: at for name, at in cursor.sources.items() if name in self.plans}
        turns = SourceRanges(self.by_length.names, np.concatenate(ranges))
        window = WindowCursor(
            cursor.step, sources, global_batch, num_packs, LINEAR_COST, self._mix,
            across_sources=self.balance == ACROSS_SOURCES, turns=_digest(turns),
        )  # fmt: skip
        self._turns = window, turns, None
        return window

    def packs_to_change(self, step: int, *, global_batch: int) -> int:
        of_length = super().packs_to_change(step, global_batch=global_batch)
        if self.balance == DEAL:
            return of_length
        return min(of_length, int(self._phases(step, global_batch, global_batch=global_batch)[1][0]))

    def window_steps(self, global_batch: int) -> int:
        return window_steps(self.balance, global_batch=global_batch, num_canonical_nodes=self.num_canonical_nodes)

    def window_packs(self, window: WindowCursor, nodes: NDArray[np.bool_] | None = None) -> SortedPacks:
        """Return the packs of a window; the last window is kept. nodes: bool[num_canonical_nodes], see SortedPacks."""
        key = window.begin, b"" if nodes is None else nodes.tobytes()
        if self._of_window is None or self._of_window[:2] != key:
            turns, of_turns = self.turns_of_window(window)
            made = np.arange(window.num_packs) if nodes is None else np.flatnonzero(nodes[of_turns])
            packs = self.packs(turns, made)
            read = self._mixture_of(window).read_names
            seed = self.plans[next(name for name in window.sources if name in read)].order.seed
            self._of_window = *key, SortedPacks(window, turns, seed=seed, nodes=of_turns, packs=packs, made=made)
        return self._of_window[2]

    def turns_of_window(self, window: WindowCursor) -> tuple[SourceRanges, NDArray[np.int64]]:
        """Return the packs of a window in turn, and the canonical node of each, int64[num_packs]."""
        turns = self._in_turn(window)
        assert self._turns is not None
        nodes = self._turns[2]
        if nodes is None:
            nodes = self.canonical_nodes(turns)
            self._turns = *self._turns[:2], nodes
        return turns, nodes

    def _in_turn(self, window: WindowCursor) -> SourceRanges:
        """Return the packs of a window in turn; those of the last window are kept."""
        if self._turns is None or self._turns[0] != window.begin:
            mixture, batch = self._mixture_of(window), window.global_batch
            ranges: list[NDArray[np.int64]] = []
            mixture.take(dict(window.sources), window.step, window.num_packs, global_batch=batch, ranges=ranges)
            rows = np.concatenate([np.empty((0, 4), np.int64), *ranges])
            if mixture is not self:
                rows[:, 0] = self.by_length.numbers_of(mixture.by_length)[rows[:, 0]]
            self._turns = window.begin, SourceRanges(self.by_length.names, rows), None
        return self._turns[1]

    def steps_of_window(self, cursor: Cursor, *, global_batch: int) -> int:
        steps = self.window_steps(global_batch)
        return max(steps, -(-cursor.window.num_left // global_batch) if cursor.window is not None else 0)

    def samples_ahead(self, source: str, num_packs: int, *, epoch: int, global_batch: int) -> int:
        """Return the samples of an epoch that the workers of a node read ahead. num_packs: packs that they read ahead.

        A window reads its packs in any order: where it begins, workers also read the window before it.
        """
        steps, plan = self.window_steps(global_batch), self.plans[source]
        if steps:
            shares: list[Mapping[str, float]] = [{name: plan.num_packs(0) for name, plan in self.plans.items()}]
            if self.schedule is not None:
                shares = [weights for _, weights in self.schedule]
            if self.shares == TOKENS:
                fill = {name: max(1, plan.num_tokens(0)) / plan.num_packs(0) for name, plan in self.plans.items()}
                shares = [{name: share / fill[name] for name, share in each.items()} for each in shares]
            share = max(each.get(source, 0) / sum(each.values()) for each in shares)
            num_packs += 2 * math.ceil(steps * global_batch * share)  # about the most of a window
        return num_packs * plan.epoch_size // plan.num_packs(epoch)

    def reach(self, cursor: Cursor) -> Mapping[str, SourceCursor]:
        sources = dict(cursor.sources)
        if (window := cursor.window) is not None:
            self.take_in_window(window, sources, window.num_left, global_batch=window.global_batch)
        return sources

    def take_in_window(
        self,
        window: WindowCursor,
        sources: dict[str, SourceCursor],
        count: int,
        *,
        global_batch: int,
        ranges: list[NDArray[np.int64]] | None = None,
    ) -> int:
        """Take the next packs of a window, by the steps of the window.

        Turns of a window are listed by source in each step of the window: other steps are cut from this list.
        """
        mixture, batch, done = self._mixture_of(window), window.global_batch, window.num_done
        own = ranges if mixture is self and batch == global_batch and done % batch == 0 else None
        of_window = {name: sources[name] for name in window.sources}
        taken = mixture.take(of_window, window.step, count, global_batch=batch, begun=done, ranges=own)
        sources.update(of_window)
        if ranges is not None and own is None:
            ranges.append(self._in_turn(window).part(done, done + taken).rows)
        return taken

    def turns_of(self, window: WindowCursor, source: str, *, pack: SourceRange | None = None) -> NDArray[np.int64]:
        if pack is None and not window.across_sources:  # sorting keeps the source of a turn
            turns = self._in_turn(window)
            return np.flatnonzero(np.array(turns.names)[turns.singly().rows[:, 0]] == source)
        return self.window_packs(window).turns_of(source, pack)


def _digest(turns: SourceRanges) -> str:
    """Return a digest of packs in turn, by names: the numbers of sources depend on the mixture."""
    rows = turns.rows.copy()  # they end with each step, and with each epoch of a source
    numbers, at = np.unique(rows[:, 0], return_inverse=True)
    names, by_name = np.unique([turns.names[number] for number in numbers], return_inverse=True)
    rows[:, 0] = by_name[at]
    return short_digest(json.dumps(names.tolist()).encode() + rows.tobytes())
