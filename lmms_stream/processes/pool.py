"""Worker processes of a command: tasks out, results in, in order of completion.

The job is pickled and sent to each worker once. Workers are forked from a server, because tokenizers and threads of the
command would not survive a fork. Workers end with the command, even after a kill. Busy workers of a ProcessPoolExecutor
or of loky outlive a killed command, and their errors do not name the task.
"""

from __future__ import annotations

import os
import pickle
import signal
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
_SLOW = "transformers.models.auto.processing_auto"  # to import: some 5 CPU seconds
_NEEDS_SLOW = b"lmms_stream.processors.families.installed"  # module of a class in a pickled job
_ENDS_S = 10.0  # until a killed worker, or a worker with a closed pipe, has ended
Job = Callable[[Task, Callable[[int], None]], Result]  # function of a task and of a callback for progress


class Pool(Protocol[Task, Result]):
    """Pool of workers for several tasks at a time. num_idle: number of workers without a task."""

    @property
    def num_idle(self) -> int: ...

    def give(self, task: Task) -> None: ...

    def wait(self) -> list[tuple[Task, Result]]:
        """Return finished tasks with their results; empty without given tasks, or if a worker has joined meanwhile.

        Raises the error of a task, and WorkerError for a lost worker.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """File to check on every worker. holds: content of the file. remedy: advice if a worker cannot see the file."""

    path: Path
    holds: bytes
    remedy: str


def check_num_workers(num_workers: int | None) -> None:
    """Raise ConfigError for fewer than one worker; None: the machine determines the number."""
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"the number of workers must be at least 1, got {num_workers}")


def num_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0))


@contextmanager
def open_pool(
    job: Job[Task, Result],
    num_workers: int,
    *,
    name: Callable[[Task], str] = str,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Pool[Task, Result]]:
    """Yield a pool of processes; with one worker, this process itself. name: name of a task, for errors."""
    check_num_workers(num_workers)
    if num_workers == 1:
        yield _ThisProcess(job, on_progress)
        return
    with _started(job, num_workers) as workers:
        yield _Processes(workers, name, on_progress)


def do_all(pool: Pool[Task, Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
    """Yield all tasks with their results, in order of completion."""
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
        with suppress(BrokenPipeError):  # the worker died: _receive raises the error
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
    """Workers, started in a thread: interrupts are raised in the main thread, and would cut a start short.

    An interrupted command does not wait for the thread; the thread kills the started workers itself.
    """

    def __init__(self, job: Any, pickled: bytes, num_workers: int):
        # The server imports the workers' modules once: the job's module, and the slow one that its processor needs.
        self._needed = [type(job).__module__, *([_SLOW] if _NEEDS_SLOW in pickled else [])]
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
            # Started first, because its start would unblock the signal blocked below.
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
        except BaseException as caught:  # noqa: BLE001 - raised again in `started`
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
    """Run a worker: tasks in; counts, results and errors out. The worker ends when the other end of the pipe closes."""
    os.environ.clear()  # the server's, from the command at the server's start
    os.environ.update(environment)
    tempfile.tempdir = None  # determined again from the environment
    end_with_parent()  # also in the middle of a long task
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, and the command its workers
    doing: Doing[Any] = Doing(pickled)
    with suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            pipe.send((True, doing.answer(task, lambda count: pipe.send((False, count)))))


class Doing(Generic[Task]):
    """Execution of tasks in a worker; the answer for a failed task is its error, for the waiting process."""

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
        except Exception as error:  # noqa: BLE001 - raised by the waiting process
            return WorkerError(repr(error))


def result_of(answer: Any, task: str) -> Any:
    """Return the result in a worker's answer; raise an error in the answer. task: name of the task."""
    if isinstance(answer, WorkerError):
        raise WorkerError(f"{task}: {answer}")
    if isinstance(answer, Exception):
        raise answer
    return answer


# Whether a value can be sent to another interpreter. value -> the obstacle.


def obstacle(given: Any) -> str | None:
    """Explain why a value cannot be sent to another interpreter: not picklable, or from the main module; else None."""
    pickler = _MainFinder(BytesIO())
    try:
        pickler.dump(given)
    except Exception as error:  # noqa: BLE001 - whatever pickling raises, the value cannot be sent
        return f"it cannot be pickled ({error})"
    return f"{pickler.found} is defined in the program's main module" if pickler.found else None


class _MainFinder(pickle.Pickler):
    """Pickler with a record of a pickled class or function of the main module."""

    found: str | None = None

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, type | FunctionType) and given.__module__ == "__main__":
            self.found = given.__qualname__
        return NotImplemented
