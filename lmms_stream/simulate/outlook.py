"""When a node needs the shards of all sources next, as the loaders on it would tell its cache. blocks entered -> times.

A loader looks at each source alone, whose cache has a limit of its own. Here all share one, so times are told in steps:
epochs from now, times the steps that an epoch of the source takes at its first weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan.next_use import NextUse, Places, place, served_nodes
from ..plan.source_ranges import SourceBlock
from .sources import Sources

_LONG = 1e9  # an epoch of a source that is read later only


class NodeOutlook:
    """See loader/cache_outlook.py, by which this goes.

    margin_steps: how long a block that was left counts as in use. num_nodes: that can serve canonical nodes of their
    own (see World.num_group_nodes), of which this is number `node`.
    """

    def __init__(self, sources: Sources, node: int, *, num_nodes: int, limit_bytes: int, margin_steps: int):
        self._margin = margin_steps
        self._restarts = sources.mixture.schedule is None  # loaders begin anew with each epoch
        self._sources = []
        for name, plan in sources.plans.items():
            serves = served_nodes(node, num_nodes=num_nodes, num_canonical_nodes=plan.num_canonical_nodes)
            next_use = NextUse(plan, serves=serves, sizes=sources.shards[name].stored, limit_bytes=limit_bytes)
            self._sources.append(_Source(name, next_use, serves, _steps_of_epoch(sources, name)))
        self.since = -1  # a shard that was used in a later step is in use, whatever is foretold

    def changes(self, entered: Sequence[tuple[int, SourceBlock]]) -> list[int]:
        """Take in blocks that are entered from here on, by step; the steps with which what is foretold changes."""
        steps: set[int] = set()
        for source in self._sources:
            source.entered += [
                (step, block) for step, block in entered if block.source == source.name and source.serves[block.node]
            ]
            steps.update(source.passing, (step for step, _ in source.entered))
            steps.update(step + self._margin for step, _ in source.entered)
        return sorted(steps)

    def move_to(self, step: int) -> None:
        """Stand at a step."""
        for source in self._sources:
            while source.entered and source.entered[0][0] <= step:
                begun, block = source.entered.pop(0)
                if source.enter(block, until=begun + self._margin, restarts=self._restarts):
                    self.since = begun - 1
            if source.places is not None and source.places.pass_to(step):
                self.since = step - 1
            source.passing = [each for each in source.passing if each > step]

    def times(self) -> NDArray[np.float64]:
        """Steps until each shard of all sources is needed, inf where it is not: float64[num_shards]."""
        return np.concatenate([source.times() for source in self._sources])


class _Source:
    """Where the canonical nodes of a source are."""

    def __init__(self, name: str, next_use: NextUse, serves: NDArray[np.bool_], steps_of_epoch: float):
        self.name = name
        self.serves = serves
        self.entered: list[tuple[int, SourceBlock]] = []
        self.passing: list[int] = []  # steps with which blocks are let go
        self.places: Places | None = None
        self._next_use = next_use
        self._steps = steps_of_epoch

    def enter(self, block: SourceBlock, *, until: int, restarts: bool) -> bool:
        """Come to a block; whether loaders begin anew there."""
        begins = self.places is None or (restarts and block.epoch > self.places.epoch)
        if self.places is None or begins:
            self.places = Places(len(self.serves), epoch=block.epoch)
        self.places.enter(block.node, place(block.epoch, block.block), until=until)
        self.passing.append(until)
        return begins

    def times(self) -> NDArray[np.float64]:
        places = self.places or Places(len(self.serves), epoch=0)
        found: NDArray[np.float64] = self._next_use.times(places.held, places.now).astype(np.float64) * self._steps
        return found


def _steps_of_epoch(sources: Sources, name: str) -> float:
    """How long an epoch of a source takes, against those of the others."""
    schedule = sources.mixture.schedule
    if schedule is None:
        return 1.0
    weight = float(schedule[0][1].get(name, 0.0))
    return sources.plans[name].num_packs(0) / weight if weight else _LONG
