"""The tasks of a conversion, in order: units are encoded, and the encoded units made into shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import DataError, LmmsStreamError
from ...processes.pool import Pool
from .encoded_units import UnitTask
from .reading import FetchTask, Reading
from .shards import ShardMaker, ShardTask

Task = UnitTask | ShardTask | FetchTask
_AHEAD = 4  # units per worker to encode ahead of placement


class Encoder(Protocol):
    """Encodes the unit of a task into the work folder or a store; returns False if a row ended the unit early."""

    def encode(self, task: UnitTask, on_bytes: Callable[[int], None]) -> bool: ...


class Placer(Protocol):
    """Takes encoded units in order, and returns the shards that they fill."""

    next_unit: int
    num_samples: int
    is_finished: bool

    @property
    def is_full(self) -> bool: ...
    def is_encoded(self, task: UnitTask) -> bool: ...
    def place(self, task: UnitTask, reading: Reading, *, is_whole: bool) -> Iterable[ShardTask]: ...
    def finish(self) -> Iterable[ShardTask]: ...
    def begin(self, task: ShardTask) -> None: ...
    def keep(self, task: ShardTask, entry: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """Work of a worker: fetch a source, encode a unit, or make a shard from encoded units.

    Results: for a shard, its entry in index.json; for a unit, `is_whole` or its error; for a source, an error or {}.
    """

    units: Encoder
    shards: Sequence[ShardMaker]

    def __call__(self, task: Task, on_bytes: Callable[[int], None]) -> dict[str, Any]:
        if isinstance(task, ShardTask):
            return self.shards[task.output].make(task)
        if isinstance(task, FetchTask):
            return _fetched(task)
        try:
            return {"is_whole": self.units.encode(task, on_bytes)}
        except DataError as error:
            return {"error": error}


def _fetched(task: FetchTask) -> dict[str, Any]:
    try:
        task.fetch()
    except LmmsStreamError as error:
        return {"error": error}
    return {}


def task_name(task: Task) -> str:
    if isinstance(task, ShardTask):
        return task.name
    return task.source_name if isinstance(task, FetchTask) else f"unit {task.number}, of {task.source_name}"


class Run:
    """Encodes all units, and makes shards from the encoded units in the order of the sources.

    on_bytes: receives bytes of the sources that earlier runs have encoded. on_rows: receives numbers of placed samples.
    """

    def __init__(
        self,
        pool: Pool[Task, dict[str, Any]],
        reading: Reading,
        placement: Placer,
        *,
        num_workers: int,
        on_bytes: Callable[[int], None],
        on_rows: Callable[[int], None],
    ):
        self._pool = pool
        self._reading = reading
        self._placement = placement
        self._ahead = _AHEAD * num_workers
        self._at_most_fetching = num_workers // 2
        self._on_bytes = on_bytes
        self._on_rows = on_rows
        self._units = reading.units()
        self._next_unit: UnitTask | None = None  # also None during the fetch of its source
        self._has_all = False  # whether all units were cut
        self._num_cut = 0  # units
        self._encoded: dict[int, UnitTask] = {}  # encoded units behind units that are not placed yet
        self._failed: set[int] = set()  # encoded units with an early end, at a row that does not fit
        self._errors: dict[int, LmmsStreamError] = {}  # of units, to be raised when their turn comes
        self._shards: deque[ShardTask] = deque()  # to be made
        self._num_given = 0
        self._num_making = 0  # shards among the given tasks
        self._num_fetching = 0  # sources among the given tasks

    def go(self) -> None:
        """Run all tasks. At a row that does not fit, wait until the shards in progress are stored."""
        try:
            self._do_all()
        except DataError:
            while self._num_making:
                self._wait()
            raise

    def _do_all(self) -> None:
        while True:
            self._place()
            task = self._next_task() if self._pool.num_idle else None
            if task is not None:
                self._pool.give(task)
                self._num_given += 1
                self._num_making += isinstance(task, ShardTask)
                self._num_fetching += isinstance(task, FetchTask)
            elif self._num_given:
                self._wait()
            elif self._placement.is_finished and not self._shards:
                return

    def _place(self) -> None:
        """Place the next units, up to the first unit that is not encoded yet.

        Errors are raised in the order of the sources, and no error from behind the limit: the end of a conversion does
        not depend on the number of units in progress.
        """
        while not self._placement.is_full:
            number = self._placement.next_unit
            if number in self._errors:
                raise self._errors[number]
            task = self._encoded.pop(number, None)
            if task is None:
                break
            before = self._placement.num_samples
            self._shards.extend(self._placement.place(task, self._reading, is_whole=number not in self._failed))
            self._on_rows(self._placement.num_samples - before)
        if self._placement.is_full:
            self._next_unit, self._has_all = None, True
        is_laid = self._has_all and self._next_unit is None and not self._num_given
        if is_laid and not self._shards and not self._placement.is_finished:
            self._shards.extend(self._placement.finish())

    def _next_task(self) -> Task | None:
        """Return the next task; a shard before a unit, to remove encoded units early.

        Half of the workers may fetch sources before other units are encoded, to have the sources in time; a single
        worker fetches a source at its turn.
        """
        if self._shards:
            shard = self._shards.popleft()
            self._placement.begin(shard)
            return shard
        if self._num_fetching < self._at_most_fetching and (fetch := self._next_fetch()) is not None:
            return fetch
        if self._next_unit is None:
            self._cut_next()
        while (unit := self._next_unit) is not None and unit.number - self._placement.next_unit < self._ahead:
            self._cut_next()
            if not self._placement.is_encoded(unit):
                return unit
            self._encoded[unit.number] = unit  # encoded by an earlier run
            self._reading.has_read(unit)
            self._on_bytes(unit.unit.num_bytes)
            self._place()
            if self._shards:
                return self._next_task()
        return self._next_fetch() if self._next_unit is None and not self._num_fetching else None

    def _next_fetch(self) -> FetchTask | None:
        return None if self._has_all else self._reading.next_fetch()

    def _cut_next(self) -> None:
        self._next_unit = None
        if self._has_all:
            return
        try:
            self._next_unit = next(self._units)
        except StopIteration:
            self._has_all = True
        except LmmsStreamError as error:
            self._has_all = True
            self._errors[self._num_cut] = error
        self._num_cut += self._next_unit is not None

    def _wait(self) -> None:
        """Wait for some of the given tasks."""
        for task, entry in self._pool.wait():
            self._num_given -= 1
            self._num_making -= isinstance(task, ShardTask)
            self._num_fetching -= isinstance(task, FetchTask)
            self._has_done(task, entry)

    def _has_done(self, task: Task, entry: dict[str, Any]) -> None:
        if isinstance(task, FetchTask):
            self._reading.has_fetched(task, entry.get("error"))
            return
        if isinstance(task, ShardTask):
            self._placement.keep(task, entry)
            return
        self._reading.has_read(task)
        if "error" in entry:
            self._errors[task.number] = entry["error"]
            return
        self._encoded[task.number] = task
        if not entry["is_whole"]:
            self._failed.add(task.number)
