"""A connection to a Ray cluster: an existing cluster, or a temporary cluster on only this machine.

Ray is imported at its first use, because it is an optional dependency, and because it reads some settings from the
environment at import.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import ConfigError, WorkerError
from ...processes.pool import Doing, Job, Mark, Pool, check_num_workers, result_of
from ...storage.cache import default_cache_folder
from ...storage.locks import locked
from ...version import VERSION

_LOCK_TIMEOUT_S = 10.0
_STORE_BYTES = 64 << 20  # Ray's memory for each worker: twice the content of a task
_TOKEN = secrets.token_hex(32)  # made once, because Ray keeps the first token of a process
_LOOPBACK = "127.0.0.1"
_KEEP_TO_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray has no other setting for it, on Linux too
# Ray prints pages when a node is lost; our error reports the loss in a line. This pattern hides Ray's pages.
_PRINT_NOTHING = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^"}
_LOCAL_ENVIRONMENT = {
    **_KEEP_TO_LOOPBACK,
    "RAY_AUTH_TOKEN": _TOKEN,  # without a token, Ray would write its own to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # prevents a warning about GPUs on machines without GPUs
}
_LOCAL_ENVIRONMENT_WITHOUT = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")  # both would replace the token


def import_ray() -> Any:
    """Import the library; ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray cannot be imported ({error}): pip install 'lmms-stream[ray]'") from error
    return ray


@contextmanager
def open_cluster(address: str | None, *, num_cpus: int, timeout_s: float) -> Iterator[None]:
    """Connect this process to the cluster at `address` (default: RAY_ADDRESS, or a local cluster with `num_cpus`).

    An existing connection of the process is used, and kept. ConfigError if no cluster can be reached; timeout_s: limit
    for the answer of an existing cluster.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    with _environment(_PRINT_NOTHING | (_KEEP_TO_LOOPBACK if wanted == "local" else {})):
        ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(f"this process is connected to a Ray cluster already: leave out the address {address}")
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_restored_signal())
        settings: dict[str, Any] = {}
        if wanted == "local":
            settings = stack.enter_context(_local_settings(ray, num_cpus))
        else:
            _check_answers(wanted, timeout_s)
        stack.callback(ray.shutdown)
        try:
            ray.init(address=wanted, log_to_driver=False, logging_level="CRITICAL", **settings)
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            reason = " ".join(str(error).split())
            if wanted == "local":
                raise ConfigError(f"Ray cannot start on this machine: {reason}; pass --engine processes") from error
            raise ConfigError(f"the Ray cluster at {wanted} cannot be joined: {reason}") from error
        yield


@contextmanager
def _restored_signal() -> Iterator[None]:
    """Restore SIGTERM's handler at the end: Ray's handler ends the process cleanly, only while connected."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(changes: dict[str, str], *, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Change Ray's settings in the environment until the end of the block; then also remove Ray's own changes."""
    saved = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(saved)


# An existing cluster


def _check_answers(address: str, timeout_s: float) -> None:
    """Check a cluster from another process, with a time limit: Ray itself tries for minutes, and then ends its
    process.
    """
    if "://" in address:
        raise ConfigError(f"{address} is of Ray's client: run this on a node of the cluster, with HOST:PORT or auto")
    remedy = "check --ray-address, and that the cluster runs"
    host, separator, port = address.rpartition(":")
    if separator:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"no Ray cluster answers at {address} ({error}): {remedy}") from error
    program = shutil.which("ray", path=sysconfig.get_path("scripts")) or "ray"
    command = [program, "status", "--address", address]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except OSError as error:
        raise ConfigError(f"the command `ray` cannot be run ({error}): pip install 'lmms-stream[ray]'") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"no Ray cluster answers at {address} within {timeout_s:g} s: {remedy}") from error
    if result.returncode:
        reason = (result.stderr.strip() or "it is not well").splitlines()[-1]
        raise ConfigError(f"no Ray cluster answers at {address} ({reason}): {remedy}")


# A cluster of this machine


@contextmanager
def _local_settings(ray: Any, num_cpus: int) -> Iterator[dict[str, Any]]:
    """Settings for ray.init: reachable only from this machine, with a token, and without a dashboard."""
    if ray.util.get_node_ip_address() != _LOOPBACK:
        name = next(iter(_KEEP_TO_LOOPBACK))
        raise ConfigError(
            "Ray was imported before the conversion, and its cluster would be reachable from other machines: set "
            f"{name}=0 before Ray is imported, or call ray.init() before the conversion"
        )
    with _session_folder() as folder, _environment(_LOCAL_ENVIRONMENT, without=_LOCAL_ENVIRONMENT_WITHOUT):
        yield {
            "num_cpus": num_cpus,
            "num_gpus": 0,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES * (num_cpus + 1),
            "_temp_dir": str(folder),  # ray.init documents this keyword, although it begins with an underscore
        }


@contextmanager
def _session_folder() -> Iterator[Path]:
    """Folder for Ray's logs and sockets, removed at the end, like folders left by killed commands. Its name is short
    because of the length limit of socket names.
    """
    base = default_cache_folder("").parent
    for lock in base.glob("ray-*.lock"):
        with locked(lock, timeout_s=0) as free:
            if free is not None:
                _remove_session(lock)
    lock = base / f"ray-{os.getpid()}.lock"
    with locked(lock, timeout_s=_LOCK_TIMEOUT_S) as ours:
        if ours is None:
            raise ConfigError(f"{lock} is held by another process: remove it")
        try:
            yield lock.with_suffix("")
        finally:
            _remove_session(lock)


def _remove_session(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)


# Workers on a Ray cluster for the tasks of the command that started them: a pool of actors, one for each CPU.
#
# Each worker gets the job once. Workers end with the command's connection, however it ends.

Task = TypeVar("Task")
Result = TypeVar("Result")

_SEE_TIMEOUT_S = 5.0  # for a shared folder to show files of another node
_END_TIMEOUT_S = 10.0  # limit for the end of workers
_POLL_S = 0.1
_REASON_LENGTH = 300


@contextmanager
def open_engine(address: str | None, *, num_cpus: int, timeout_s: float) -> Iterator[RayEngine]:
    """Workers of a cluster; see open_cluster."""
    with open_cluster(address, num_cpus=num_cpus, timeout_s=timeout_s):
        yield RayEngine(timeout_s)


class RayEngine:
    """The cluster that this process is connected to. start_timeout_s: limit for the start of the first worker."""

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
        """Start the workers; yield when the first worker has started. The others get tasks after their own start."""
        check_num_workers(num_workers)
        ray = import_ray()
        try:
            pickled = ray.cloudpickle.dumps(job)
        except Exception as error:
            raise ConfigError(
                f"the processor cannot be sent to other machines ({error!r}): change the processor"
            ) from error
        actor = ray.remote(_Worker).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        sent = ray.put(pickled)
        pool = _Actors[Task, Result]([actor.remote(sent) for _ in range(num_workers)], marks, name, on_progress)
        try:
            pool.wait_for_first(self._start_timeout_s)
            yield pool
        finally:
            pool.end()


class _Worker:
    """The actor, in its own process on some node."""

    def __init__(self, pickled_job: bytes):
        self._doing: Doing[Any] = Doing(pickled_job)

    def begin(self, folder: str, version: str, marks: Sequence[Mark]) -> str:
        """Return the reason why this worker cannot work, or "". folder: start of relative paths."""
        with suppress(OSError):  # a missing source is an error later, with the source's name
            os.chdir(folder)
        node = f"the Ray node {socket.gethostname()}"
        if version != VERSION:
            return f"{node} has version {VERSION} of lmms_stream, this command {version}: install the same"
        mark = unseen(marks, timeout_s=_SEE_TIMEOUT_S)
        return f"{node} does not see {mark.path}, which this command has written: {mark.remedy}" if mark else ""

    def do(self, task: Any) -> tuple[int, Any]:
        """Return the amount of work done, and the task's result or error."""
        done: list[int] = []
        answer = self._doing.answer(task, done.append)
        return sum(done), answer


def unseen(marks: Sequence[Mark], *, timeout_s: float) -> Mark | None:
    """Return the first mark that this process does not see before the timeout."""
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
    """A Pool. It waits for references, each of a task of an actor, or of an actor's start."""

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
        """Make a started worker available for tasks, if there is any."""
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
                "the conversion resumes (all nodes need this version of lmms_stream and its libraries; Ray says: "
                f"{reason})"
            ) from error

    def end(self) -> None:
        """Kill the workers, and wait until their tasks have ended."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)
            if self._given:
                self._ray.wait(list(self._given), num_returns=len(self._given), timeout=_END_TIMEOUT_S)
