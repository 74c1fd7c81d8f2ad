"""What tasks are done by: processes of this machine, or workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from ...errors import ConfigError
from ...processes.pool import Job, Mark, Pool, check_num_workers, num_cores, open_pool

Task = TypeVar("Task")
Result = TypeVar("Result")

ENGINES = ("processes", "ray")
RAY_TIMEOUT_S = 120.0


class Engine(Protocol):
    """num_cpus: how many workers it can run at once. marks: files that every worker must see, or else WorkerError."""

    @property
    def num_cpus(self) -> int: ...

    def open_pool(
        self,
        job: Job[Task, Result],
        num_workers: int,
        *,
        name: Callable[[Task], str],
        on_progress: Callable[[int], None],
        marks: Sequence[Mark],
    ) -> AbstractContextManager[Pool[Task, Result]]: ...


class Processes:
    """Processes of this machine; they see the files that this one sees, so marks are not looked for."""

    @property
    def num_cpus(self) -> int:
        return num_cores()

    def open_pool(
        self,
        job: Job[Task, Result],
        num_workers: int,
        *,
        name: Callable[[Task], str],
        on_progress: Callable[[int], None],
        marks: Sequence[Mark],
    ) -> AbstractContextManager[Pool[Task, Result]]:
        return open_pool(job, num_workers, name=name, on_progress=on_progress)


@contextmanager
def open_engine(
    name: str, *, ray_address: str | None, ray_timeout_s: float, num_workers: int | None
) -> Iterator[Engine]:
    """The engine of that name, one of ENGINES, until the end of the block. num_workers: how many will be asked for."""
    check_num_workers(num_workers)
    if name == "ray":
        from .ray_cluster import open_cluster
        from .ray_workers import RayEngine

        with open_cluster(ray_address, num_cpus=num_workers or num_cores(), timeout_s=ray_timeout_s):
            yield RayEngine(ray_timeout_s)
        return
    if name not in ENGINES:
        raise ConfigError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    if ray_address is not None:
        raise ConfigError(f"the address of a Ray cluster, {ray_address}, is for the engine ray: pass --engine ray")
    yield Processes()
