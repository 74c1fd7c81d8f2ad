"""Threads of this process, for tasks that wait for a store or hash more than they run Python."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from ...processes.pool import Job, Pool

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextmanager
def open_threads(job: Job[Task, Result], num_workers: int) -> Iterator[Pool[Task, Result]]:
    """A pool of threads. What tasks tell of their progress is not passed on."""
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
