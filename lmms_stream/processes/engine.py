"""Task executors: processes or threads of this machine, or workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

from ..errors import ConfigError
from ..registry import Registry
from .pool import Job, Mark, Pool, check_num_workers, num_cores, open_pool

Task = TypeVar("Task")
Result = TypeVar("Result")

RAY_TIMEOUT_S = 120.0


class Engine(Protocol):
    """Task executor. num_cpus: maximum number of concurrent workers. marks: files visible to all workers, else
    WorkerError.
    """

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
    """Processes of this machine; all processes see the same files, and marks are not checked."""

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
def open_processes(address: str | None, *, num_cpus: int, timeout_s: float) -> Iterator[Engine]:
    """Yield the engine for processes of this machine; ConfigError for an address."""
    if address is not None:
        raise ConfigError(f"the address of a Ray cluster, {address}, is for the engine ray: pass --engine ray")
    yield Processes()


class OpenEngine(Protocol):
    """Gives an engine until the end of the block. address: of a cluster that runs, which must answer in timeout_s;
    None: the engine finds or starts one with num_cpus.
    """

    def __call__(self, address: str | None, *, num_cpus: int, timeout_s: float) -> AbstractContextManager[Engine]: ...


ENGINES = Registry[OpenEngine](
    "engines", {"processes": open_processes, "ray": "plugins.engines.ray_cluster:open_engine"}
)


@contextmanager
def open_engine(
    name: str, *, ray_address: str | None, ray_timeout_s: float, num_workers: int | None
) -> Iterator[Engine]:
    """Open the engine `name` of ENGINES for the block. num_workers: number of workers to request later."""
    check_num_workers(num_workers)
    if (opener := ENGINES.get(name)) is None:
        raise ConfigError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    with opener(ray_address, num_cpus=num_workers or num_cores(), timeout_s=ray_timeout_s) as engine:
        yield engine


# Threads of this process, for tasks with mostly storage waits or checksums.


@contextmanager
def open_threads(job: Job[Task, Result], num_workers: int) -> Iterator[Pool[Task, Result]]:
    """A pool of threads. The progress of tasks is not passed on."""
    executor = ThreadPoolExecutor(num_workers)
    try:
        yield _Threads(executor, job, num_workers)
    finally:
        executor.shutdown(cancel_futures=True)


class _Threads(Generic[Task, Result]):
    def __init__(self, executor: ThreadPoolExecutor, job: Job[Task, Result], num_workers: int):
        self._executor = executor
        self._job = job
        self._num_workers = num_workers
        self._given: dict[Future[Result], Task] = {}

    @property
    def num_idle(self) -> int:
        return self._num_workers - len(self._given)

    def give(self, task: Task) -> None:
        self._given[self._executor.submit(self._job, task, lambda count: None)] = task

    def wait(self) -> list[tuple[Task, Result]]:
        done, _ = wait(self._given, return_when=FIRST_COMPLETED)
        return [(self._given.pop(future), future.result()) for future in done]
