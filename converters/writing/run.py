"""The tasks of a conversion, in order: units are encoded, and the encoded units made into shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DataError
from ..engines.processes import Pool
from .encoded_units import UnitEncoder, UnitTask, about_path
from .layout import Laying
from .reading import Reading
from .shards import ShardMaker, ShardTask
from .work import Work


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker does: it encodes units, and makes shards of encoded units.

    Of a shard comes back its entry in index.json; of a unit whether it is whole, or the error that it gave.
    """

    units: UnitEncoder
    shards: Sequence[ShardMaker]

    def __call__(self, task: UnitTask | ShardTask, on_bytes: Callable[[int], None]) -> dict[str, Any]:
        if isinstance(task, ShardTask):
            return self.shards[task.output].make(task)
        try:
            return {"is_whole": self.units.encode(task, on_bytes)}
        except DataError as error:
            return {"error": error}


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
        self._num_cut = 1  # units that the sources gave
        self._encoded: dict[int, UnitTask] = {}  # units that wait for those before them to be laid
        self._failed: set[int] = set()  # those of them that ended early, at a row that does not fit
        self._errors: dict[int, DataError] = {}  # of units, to be raised when their turn comes
        self._shards: deque[ShardTask] = deque()  # to be made
        self._num_given = 0
        self._num_making = 0  # of those given, shards
        # Listed once: a network folder that is asked for a file by name may remember for a while that it was missing,
        # also when another machine has written it since.
        self._encoded_before = {path.name for path in work.units.iterdir()}

    def go(self) -> None:
        """Do all of it. At a row that does not fit, shards that are being made are first made to their end and kept."""
        try:
            self._do_all()
        except DataError:
            while self._num_making:
                self._wait()
            raise

    def _do_all(self) -> None:
        while True:
            self._lay()
            task = self._next_task() if self._pool.num_idle else None
            if task is not None:
                self._pool.give(task)
                self._num_given += 1
                self._num_making += isinstance(task, ShardTask)
            elif self._num_given:
                self._wait()
            elif self._laying.is_finished and not self._shards:
                return

    def _lay(self) -> None:
        """Lay the units that come next, as far as they are encoded.

        Errors are raised in the order of the sources, and none of what lies behind the limit: how a conversion ends
        does not depend on how many units were begun meanwhile.
        """
        while not self._laying.is_full:
            number = self._laying.next_unit
            if number in self._errors:
                raise self._errors[number]
            task = self._encoded.pop(number, None)
            if task is None:
                break
            before = self._laying.num_samples
            self._shards.extend(self._laying.lay(task, self._reading, is_whole=number not in self._failed))
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
            self._cut_next()
            if about_path(self._work.units, unit.number).name not in self._encoded_before:
                return unit
            self._encoded[unit.number] = unit  # by an earlier run
            self._reading.has_read(unit)
            self._on_bytes(unit.unit.num_bytes)
            self._lay()
            if self._shards:
                return self._next_task()
        return None

    def _cut_next(self) -> None:
        try:
            self._next_unit = next(self._units, None)
        except DataError as error:
            self._next_unit = None
            self._errors[self._num_cut] = error
        self._num_cut += 1

    def _wait(self) -> None:
        """For some of the tasks that were given."""
        for task, entry in self._pool.wait():
            self._num_given -= 1
            self._num_making -= isinstance(task, ShardTask)
            self._has_done(task, entry)

    def _has_done(self, task: UnitTask | ShardTask, entry: dict[str, Any]) -> None:
        if isinstance(task, ShardTask):
            self._work.keep_shard(task.output, task.number, entry)
            self._laying.has_made(task)
            return
        self._reading.has_read(task)
        if "error" in entry:
            self._errors[task.number] = entry["error"]
            return
        self._encoded[task.number] = task
        if not entry["is_whole"]:
            self._failed.add(task.number)
