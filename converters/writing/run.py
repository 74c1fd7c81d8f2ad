"""The tasks of a conversion, in order: units are encoded, and the encoded units made into shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engines.processes import Pool
from .encoded_units import UnitEncoder, UnitTask, about_path
from .layout import Laying
from .reading import Reading
from .shards import ShardMaker, ShardTask
from .work import Work


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker does: it encodes units, and makes shards of encoded units."""

    units: UnitEncoder
    shards: Sequence[ShardMaker]

    def __call__(self, task: UnitTask | ShardTask, on_bytes: Callable[[int], None]) -> dict[str, Any]:
        if isinstance(task, ShardTask):
            return self.shards[task.output].make(task)
        self.units.encode(task, on_bytes)
        return {}


def task_name(task: UnitTask | ShardTask) -> str:
    return task.name if isinstance(task, ShardTask) else f"unit {task.number}, of {task.source_name}"


class Run:
    """Has all units encoded, and the encoded units, in the order of the sources, made into shards.

    ahead: units that may be encoded before the one that is laid next. on_bytes, on_rows: told how many bytes of the
    sources earlier runs have done already, and how many samples were laid.
    """

    def __init__(
        self,
        pool: Pool[UnitTask | ShardTask, dict[str, Any]],
        reading: Reading,
        laying: Laying,
        work: Work,
        *,
        ahead: int,
        on_bytes: Callable[[int], None],
        on_rows: Callable[[int], None],
    ):
        self._pool = pool
        self._reading = reading
        self._laying = laying
        self._work = work
        self._ahead = ahead
        self._on_bytes = on_bytes
        self._on_rows = on_rows
        self._units = reading.units()
        self._next_unit: UnitTask | None = next(self._units, None)
        self._encoded: dict[int, UnitTask] = {}  # units that wait for those before them to be laid
        self._shards: deque[ShardTask] = deque()  # to be made
        self._num_given = 0
        # Listed once: a network folder that is asked for a file by name may remember for a while that it was missing,
        # also when another machine has written it since.
        self._encoded_before = {path.name for path in work.units.iterdir()}

    def go(self) -> None:
        while True:
            self._lay()
            task = self._next_task() if self._pool.num_idle else None
            if task is not None:
                self._pool.give(task)
                self._num_given += 1
            elif self._num_given:
                for done, entry in self._pool.wait():
                    self._num_given -= 1
                    self._has_done(done, entry)
            elif self._laying.is_finished and not self._shards:
                return

    def _lay(self) -> None:
        """Lay the units that come next, as far as they are encoded."""
        while (task := self._encoded.pop(self._laying.next_unit, None)) is not None:
            before = self._laying.num_samples
            self._shards.extend(self._laying.lay(task, self._reading))
            self._on_rows(self._laying.num_samples - before)
        if self._laying.is_full:
            self._next_unit = None
        if self._next_unit is None and not self._num_given and not self._shards and not self._laying.is_finished:
            self._shards.extend(self._laying.finish())

    def _next_task(self) -> UnitTask | ShardTask | None:
        """A shard before a unit, so that encoded units are removed as soon as they may."""
        if self._shards:
            shard = self._shards.popleft()
            self._work.announce(shard.output, shard.number)
            return shard
        while (unit := self._next_unit) is not None and unit.number - self._laying.next_unit < self._ahead:
            self._next_unit = next(self._units, None)
            if about_path(self._work.units, unit.number).name not in self._encoded_before:
                return unit
            self._encoded[unit.number] = unit  # by an earlier run
            self._reading.has_read(unit)
            self._on_bytes(unit.unit.num_bytes)
            self._lay()
            if self._shards:
                return self._next_task()
        return None

    def _has_done(self, task: UnitTask | ShardTask, entry: dict[str, Any]) -> None:
        if isinstance(task, ShardTask):
            self._work.keep_shard(task.output, task.number, entry)
            self._laying.has_made(task)
        else:
            self._encoded[task.number] = task
            self._reading.has_read(task)
