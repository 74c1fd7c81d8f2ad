"""Workers on a Ray cluster that do tasks for the command that started them: a pool of actors, one for each CPU.

Each is sent what is done with a task once. They end with the command's connection, however that ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import ConfigError, WorkerError
from ...processes.pool import Doing, Job, Mark, Pool, check_num_workers, result_of
from ...version import VERSION
from .ray_cluster import import_ray

Task = TypeVar("Task")
Result = TypeVar("Result")

_SEE_TIMEOUT_S = 5.0  # until a shared folder must show what another node wrote
_END_TIMEOUT_S = 10.0  # until workers must have ended
_POLL_S = 0.1
_REASON_LENGTH = 300


class RayEngine:
    """The cluster that this process is connected to. start_timeout_s: in which one worker must have started."""

    def __init__(self, start_timeout_s: float):
        self._start_timeout_s = start_timeout_s

    @property
    def num_cpus(self) -> int:
        return max(1, int(import_ray().cluster_resources().get("CPU", 0)))

    @contextmanager
    def open_pool(
        self,
        job: Job[Task, Result],
        num_workers: int,
        *,
        name: Callable[[Task], str],
        on_progress: Callable[[int], None],
        marks: Sequence[Mark],
    ) -> Iterator[Pool[Task, Result]]:
        """Tasks are given from when the first worker has started; the others get tasks once they have, too."""
        check_num_workers(num_workers)
        ray = import_ray()
        try:
            pickled = ray.cloudpickle.dumps(job)
        except Exception as error:
            raise ConfigError(f"the processor cannot be sent to other machines ({error!r}): change it") from error
        actor = ray.remote(_Worker).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        sent = ray.put(pickled)
        pool = _Actors[Task, Result]([actor.remote(sent) for _ in range(num_workers)], marks, name, on_progress)
        try:
            pool.wait_for_first(self._start_timeout_s)
            yield pool
        finally:
            pool.end()


class _Worker:
    """The actor, in a process of its own on some node."""

    def __init__(self, pickled_job: bytes):
        self._doing: Doing[Any] = Doing(pickled_job)

    def begin(self, folder: str, version: str, marks: Sequence[Mark]) -> str:
        """What keeps this worker from its work, if anything does. folder: that relative paths start from."""
        with suppress(OSError):  # a source that is then not found is an error that names it
            os.chdir(folder)
        node = f"the Ray node {socket.gethostname()}"
        if version != VERSION:
            return f"{node} has version {VERSION} of lmms_stream, this command {version}: install the same"
        mark = unseen(marks, timeout_s=_SEE_TIMEOUT_S)
        return f"{node} does not see {mark.path}, which this command has written: {mark.remedy}" if mark else ""

    def do(self, task: Any) -> tuple[int, Any]:
        """How much was done, and the task's result or error."""
        done: list[int] = []
        answer = self._doing.answer(task, done.append)
        return sum(done), answer


def unseen(marks: Sequence[Mark], *, timeout_s: float) -> Mark | None:
    """The first mark that this process does not see, not even when the time is over."""
    deadline = time.monotonic() + timeout_s
    for mark in marks:
        while not _is_seen(mark):
            if time.monotonic() >= deadline:
                return mark
            time.sleep(_POLL_S)
    return None


def _is_seen(mark: Mark) -> bool:
    try:
        return mark.holds in mark.path.read_bytes()
    except OSError:
        return False


class _Actors(Generic[Task, Result]):
    """A Pool. Results are awaited by reference, each of which is a task of one actor, or its start."""

    def __init__(
        self,
        actors: Sequence[Any],
        marks: Sequence[Mark],
        name: Callable[[Task], str],
        on_progress: Callable[[int], None],
    ):
        self._ray = import_ray()
        self._actors = actors
        self._name = name
        self._on_progress = on_progress
        folder = str(Path.cwd())
        self._starting = {actor.begin.remote(folder, VERSION, marks): actor for actor in actors}
        self._idle: list[Any] = []
        self._given: dict[Any, tuple[Any, Task]] = {}

    @property
    def num_idle(self) -> int:
        while self._starting and self._join(timeout_s=0):
            pass
        return len(self._idle)

    def give(self, task: Task) -> None:
        actor = self._idle.pop()
        self._given[actor.do.remote(task)] = actor, task

    def wait(self) -> list[tuple[Task, Result]]:
        if not self._given:
            return []
        (ready,), _ = self._ray.wait([*self._given, *self._starting], num_returns=1)
        if ready in self._starting:
            self._join(timeout_s=0)
            return []
        actor, task = self._given.pop(ready)
        name = self._name(task)
        num_done, answer = self._received(ready, name)
        self._on_progress(num_done)
        self._idle.append(actor)
        return [(task, result_of(answer, name))]

    def wait_for_first(self, timeout_s: float) -> None:
        if not self._join(timeout_s=timeout_s):
            total, free = (
                resources().get("CPU", 0) for resources in (self._ray.cluster_resources, self._ray.available_resources)
            )
            raise WorkerError(
                f"no worker could start on the Ray cluster within {timeout_s:g} s ({free:g} of its {total:g} CPUs are "
                "free): run the same command when there is room, or with a longer --ray-timeout"
            )

    def _join(self, *, timeout_s: float) -> bool:
        """Let one worker that has started get tasks, if there is any."""
        ready, _ = self._ray.wait(list(self._starting), num_returns=1, timeout=timeout_s)
        for reference in ready:
            actor = self._starting.pop(reference)
            problem = self._received(reference, "its start")
            if problem:
                raise WorkerError(problem)
            self._idle.append(actor)
        return bool(ready)

    def _received(self, reference: Any, name: str) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:_REASON_LENGTH]
            raise WorkerError(
                f"a Ray worker was lost at {name}: run the same command again, with fewer --workers if memory ran out; "
                f"it goes on (all nodes need this version of lmms_stream and its libraries; Ray says: {reason})"
            ) from error

    def end(self) -> None:
        """Kill the workers, and wait until their tasks have ended."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)
            if self._given:
                self._ray.wait(list(self._given), num_returns=len(self._given), timeout=_END_TIMEOUT_S)
