"""When a node needs the shards of a source next, as the loaders on it would tell its cache. blocks entered -> times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan.next_use import NextUse, Places, place, served_nodes
from ..plan.source_ranges import SourceBlock
from .sources import Sources


class Outlook:
    """Foretells as loader/cache_outlook.py does.

    margin_steps: how long a block that was left counts as in use. nodes: ranks of each node that can serve canonical
    nodes of its own (see World.group_nodes); this is number `node`. limit_bytes: of the source's cache.
    """

    def __init__(
        self, sources: Sources, name: str, node: int, *, nodes: Sequence[int], limit_bytes: int, margin_steps: int
    ):
        plan = sources.plans[name]
        self._name = name
        self._margin = margin_steps
        self._restarts = sources.mixture.schedule is None  # loaders begin anew with each epoch
        self._serves = served_nodes(node, nodes=nodes, num_canonical_nodes=plan.num_canonical_nodes)
        self._next_use = NextUse(plan, serves=self._serves, sizes=sources.shards[name].stored, limit_bytes=limit_bytes)
        self._entered: list[tuple[int, SourceBlock]] = []
        self._passing: list[int] = []  # steps with which blocks are let go
        self._places: Places | None = None
        self.since = -1  # a shard that was used in a later step is in use, whatever is foretold

    def changes(self, entered: Sequence[tuple[int, SourceBlock]]) -> list[int]:
        """Take in blocks that are entered from here on, by step; the steps with which what is foretold changes."""
        self._entered += [
            (step, block) for step, block in entered if block.source == self._name and self._serves[block.node]
        ]
        begun = [step for step, _ in self._entered]
        return sorted({*self._passing, *begun, *(step + self._margin for step in begun)})

    def move_to(self, step: int) -> None:
        """Stand at a step."""
        while self._entered and self._entered[0][0] <= step:
            begun, block = self._entered.pop(0)
            if self._enter(block, until=begun + self._margin):
                self.since = begun - 1
        if self._places is not None and self._places.pass_to(step):
            self.since = step - 1
        self._passing = [each for each in self._passing if each > step]

    def times(self) -> NDArray[np.float64]:
        """Epochs until each shard of the source is needed, inf where it is not: float64[num_shards]."""
        places = self._places or Places(len(self._serves), epoch=0)
        found: NDArray[np.float64] = self._next_use.times(places.held, places.now).astype(np.float64)
        return found

    def _enter(self, block: SourceBlock, *, until: int) -> bool:
        """Come to a block; whether loaders begin anew there."""
        begins = self._places is None or (self._restarts and block.epoch > self._places.epoch)
        if self._places is None or begins:
            self._places = Places(len(self._serves), epoch=block.epoch)
        self._places.enter(block.node, place(block.epoch, block.block), until=until)
        self._passing.append(until)
        return begins
