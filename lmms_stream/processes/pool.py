"""Processes that do tasks for the command that started them: tasks out, results in, whichever is done first.

What they do with a task is an object that is sent to each of them once. They are forked from a server, because
tokenizers and threads of the command would not survive a fork, and they end with the command however that ends: busy
workers of a ProcessPoolExecutor, or of loky, outlive a command that was killed, and their errors name no task.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, Protocol, TypeVar

from ..errors import ConfigError, LmmsStreamError, WorkerError
from ..processors.tokenizers import ONE_THREAD
from .family import end_with_parent
from .fork_server import check_main_guard, start_context

Task = TypeVar("Task")
Result = TypeVar("Result")
_SLOW = ("transformers.models.auto.tokenization_auto", "transformers.models.auto.processing_auto")  # to import
_ENDS_S = 10.0  # for a worker that was killed, or has closed its pipe, to be gone
Job = Callable[[Task, Callable[[int], None]], Result]  # what is done with a task; it may tell how much it has done


class Pool(Protocol[Task, Result]):
    """Does tasks, several at a time; `num_idle` more can be given at once."""

    @property
    def num_idle(self) -> int: ...

    def give(self, task: Task) -> None: ...

    def wait(self) -> list[tuple[Task, Result]]:
        """Tasks that are done, with their results; none if none was given, or if a worker has joined meanwhile.

        Raises what a task raised, and WorkerError for a worker that was lost.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A file that every worker must see, and bytes that stand in it. remedy: where one does not see it."""

    path: Path
    holds: bytes
    remedy: str


def check_num_workers(num_workers: int | None) -> None:
    """ConfigError unless there is one; None is for a number that follows from the machine."""
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"the number of workers must be at least 1, got {num_workers}")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def open_pool(
    job: Job[Task, Result],
    num_workers: int,
    *,
    name: Callable[[Task], str] = str,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Pool[Task, Result]]:
    """A pool of processes; with one worker, this process itself. name: of a task, for errors."""
    check_num_workers(num_workers)
    if num_workers == 1:
        yield _ThisProcess(job, on_progress)
        return
    with _started(job, num_workers) as workers:
        yield _Processes(workers, name, on_progress)


def do_all(pool: Pool[Task, Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
    """All tasks with their results, as they come."""
    num_given = 0
    for task in tasks:
        while not pool.num_idle:
            done = pool.wait()
            num_given -= len(done)
            yield from done
        pool.give(task)
        num_given += 1
    while num_given:
        done = pool.wait()
        num_given -= len(done)
        yield from done


class _ThisProcess(Generic[Task, Result]):
    def __init__(self, job: Job[Task, Result], on_progress: Callable[[int], None]):
        self._job = job
        self._on_progress = on_progress
        self._given: list[Task] = []

    @property
    def num_idle(self) -> int:
        return 1 - len(self._given)

    def give(self, task: Task) -> None:
        self._given.append(task)

    def wait(self) -> list[tuple[Task, Result]]:
        done = [(task, self._job(task, self._on_progress)) for task in self._given]
        self._given = []
        return done


class _Processes(Generic[Task, Result]):
    def __init__(
        self,
        workers: dict[connection.Connection, BaseProcess],
        name: Callable[[Task], str],
        on_progress: Callable[[int], None],
    ):
        self._workers = workers
        self._name = name
        self._on_progress = on_progress
        self._idle = list(workers)
        self._given: dict[connection.Connection, Task] = {}

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def give(self, task: Task) -> None:
        pipe = self._idle.pop()
        self._given[pipe] = task
        with suppress(BrokenPipeError):  # the worker died, which _receive raises
            pipe.send(task)

    def wait(self) -> list[tuple[Task, Result]]:
        done: list[tuple[Task, Result]] = []
        while self._given and not done:
            for pipe in connection.wait(list(self._given)):
                assert isinstance(pipe, connection.Connection)
                is_done, answer = self._receive(pipe)
                if is_done:
                    done.append((self._given.pop(pipe), answer))
                    self._idle.append(pipe)
                else:
                    self._on_progress(answer)
        return done

    def _receive(self, pipe: connection.Connection) -> tuple[bool, Any]:
        worker, task = self._workers[pipe], self._name(self._given[pipe])
        try:
            is_done, answer = pipe.recv()
        except (EOFError, OSError) as error:
            worker.join(_ENDS_S)
            code = worker.exitcode or 0
            cause = (
                f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended (status {code})"
            )
            raise WorkerError(
                f"worker process {worker.pid} {cause} at {task}: run the same command again, with fewer --workers if "
                "memory ran out"
            ) from error
        return is_done, result_of(answer, task)


@contextmanager
def _started(job: Any, num_workers: int) -> Iterator[dict[connection.Connection, BaseProcess]]:
    """Workers by the pipe to each; killed at the end."""
    check_main_guard()
    try:
        pickled = pickle.dumps(job)
    except Exception as error:
        raise ConfigError(f"the processor cannot be sent to other processes ({error!r}): pass num_workers=1") from error
    workers = _Workers(job, pickled, num_workers)
    try:
        yield workers.started()
    finally:
        workers.end()


class _Workers:
    """Started in a thread, since interrupts are raised in the main one, where they would cut a start short.

    That thread is not waited for where a command is interrupted: it ends what it has started by itself.
    """

    def __init__(self, job: Any, pickled: bytes, num_workers: int):
        # The server imports once what every worker needs: what the job is made of, and what this process took.
        self._needed = [type(job).__module__, *(name for name in _SLOW if name in sys.modules)]
        self._told = (pickled, dict(os.environ))
        self._num_workers = num_workers
        self._workers: dict[connection.Connection, BaseProcess] = {}
        self._lock = threading.Lock()
        self._are_unwanted = False
        self._started: Future[None] = Future()

    def started(self) -> dict[connection.Connection, BaseProcess]:
        threading.Thread(target=self._start, name="lmms-start", daemon=True).start()
        self._started.result()
        return self._workers

    def end(self) -> None:
        with self._lock:
            self._are_unwanted = True
            if self._started.done():
                self._kill()

    def _start(self) -> None:
        error: BaseException | None = None
        try:
            # Started first, because its start would unblock the signal that is blocked below.
            resource_tracker.ensure_running()
            # Workers inherit this: Ctrl-C ends the command, and the command its workers.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            context = start_context(self._needed)
            while len(self._workers) < self._num_workers and not self._are_unwanted:
                pipe, theirs = connection.Pipe()
                worker = context.Process(target=_work, args=(theirs, *self._told), daemon=True)
                worker.start()
                theirs.close()
                self._workers[pipe] = worker
        except BaseException as caught:  # noqa: BLE001 - it is raised where the workers are waited for
            error = caught
        with self._lock:
            if self._are_unwanted:
                self._kill()
            self._started.set_result(None) if error is None else self._started.set_exception(error)

    def _kill(self) -> None:
        for pipe, worker in self._workers.items():
            worker.kill()
            worker.join(_ENDS_S)
            pipe.close()


def _work(pipe: connection.Connection, pickled: bytes, environment: dict[str, str]) -> None:
    """A worker: tasks in; counts, results and errors out. It ends when nobody listens any more."""
    os.environ.clear()  # the server's, which began with what the command had then
    os.environ.update(environment)
    tempfile.tempdir = None  # it follows from the environment
    end_with_parent()  # also in the middle of a task, which would keep the worker busy for long
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, and the command its workers
    doing: Doing[Any] = Doing(pickled)
    with suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            pipe.send((True, doing.answer(task, lambda count: pipe.send((False, count)))))


class Doing(Generic[Task]):
    """Does tasks in a worker; the error that a task raised is its answer, for the process that waits for it."""

    def __init__(self, pickled_job: bytes):
        os.environ |= ONE_THREAD  # tokenizers use one thread, since each core has a worker of its own
        self._pickled = pickled_job
        self._job: Any = None

    def answer(self, task: Task, on_progress: Callable[[int], None]) -> Any:
        try:
            self._job = self._job or pickle.loads(self._pickled)
            return self._job(task, on_progress)
        except (LmmsStreamError, OSError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - it is raised by the process that waits
            return WorkerError(repr(error))


def result_of(answer: Any, task: str) -> Any:
    """The result that a worker answered; raises the error, where it answered one. task: its name."""
    if isinstance(answer, WorkerError):
        raise WorkerError(f"{task}: {answer}")
    if isinstance(answer, Exception):
        raise answer
    return answer


# Whether a value can be sent to another interpreter. value -> the obstacle.


def obstacle(given: Any) -> str | None:
    """Why another interpreter cannot be sent this: it cannot be pickled, or is of the program's main module."""
    pickler = _MainFinder(BytesIO())
    try:
        pickler.dump(given)
    except Exception as error:  # noqa: BLE001 - whatever pickling raises, the value cannot be sent
        return f"it cannot be pickled ({error})"
    return f"{pickler.found} is defined in the program's main module" if pickler.found else None


class _MainFinder(pickle.Pickler):
    """Notes a class or function of the main module in what it pickles."""

    found: str | None = None

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, type | FunctionType) and given.__module__ == "__main__":
            self.found = given.__qualname__
        return NotImplemented
