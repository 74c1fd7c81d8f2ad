"""Requests to remote stores: outages are limited by time, other failures by number.

All stores have the same rule. A store that throttles, is unwell or cannot be reached (see failures.py) is asked again,
with growing pauses, until `timeout_s` is over. A failure beyond repair by further attempts ends the request at once.
Any other failure counts as one of the `attempts`.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ..checks import check_fields, check_seconds
from ..errors import ConfigError, StorageError
from .failures import certificate_failure, first_line, is_out_of_reach, is_throttled

T = TypeVar("T")
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0
REPORT_AFTER_S, REPORT_EVERY_S = 5.0, 60.0  # of waiting for a store
logger = logging.getLogger("lmms_stream")
_last_report_s = -REPORT_EVERY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Limits of a request to a remote store: `timeout_s` seconds in all, and `attempts` failures.

    Attempts during an outage of the store are not counted. The pause before the next attempt doubles, from a quarter of
    a second to eight seconds, minus a random part of up to a half.
    """

    attempts: int = 5
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.attempts < 1:
            raise ConfigError(f"attempts must be at least 1, got {self.attempts}")
        check_seconds("timeout_s", self.timeout_s)


DEFAULT_RETRY = Retry()

Count = Callable[..., None]  # adds to some counts, by the names in FetchCounts


def _uncounted(**amounts: int) -> None:
    """Count nothing."""


_count: ContextVar[Count] = ContextVar("count", default=_uncounted)


@contextmanager
def counted(count: Count) -> Iterator[None]:
    """Count the requests and evictions of this thread inside, with the requests' own threads."""
    before = _count.set(count)
    try:
        yield
    finally:
        _count.reset(before)


def count_here(**amounts: int) -> None:
    """Add to the counts of the innermost `counted` of this thread, if any."""
    _count.get()(**amounts)


class _GivenUpError(Exception):
    """Nobody waits for this request any more."""


def persist(
    action: Callable[[Callable[[], None]], T],
    *,
    where: str,
    retry: Retry,
    refusal: Callable[[Exception], StorageError | None],
    remedy: str,
) -> T:
    """Return the result of `action`, called again until it succeeds or a limit of `retry` is reached.

    refusal: returns the error to raise at once, or None if another attempt may help; not called for a store that
    throttles. The action runs in a thread, which is abandoned after `timeout_s`: a server that trickles can hold a read
    forever. `action` calls its argument now and then; the call raises an error when nobody waits any more.
    """
    request = _Request(action, where=where, retry=retry, refusal=refusal)
    thread = start_thread(request.run, name="lmms-request")
    thread.join(retry.timeout_s)
    if request.outcome:
        return request.outcome[0]
    error = request.last_error
    request.given_up.set()
    if not request.has_ended:
        raise StorageError(f"{where}: {request.reason_for_timeout(remedy)}") from error or TimeoutError()
    assert error is not None
    raise request.refuse(error) or StorageError(
        f"{where}: {first_line(error)} (after {request.num_attempts} attempts): {remedy}"
    ) from error


class _Request(Generic[T]):
    """Attempts at a request."""

    def __init__(
        self,
        action: Callable[[Callable[[], None]], T],
        *,
        where: str,
        retry: Retry,
        refusal: Callable[[Exception], StorageError | None],
    ):
        self._action, self._where, self._retry, self._refusal = action, where, retry, refusal
        self._count = _count.get()  # of the asking thread
        self.outcome: list[T] = []
        self.last_error: Exception | None = None
        self.num_attempts = self._num_failures = 0
        self.has_ended = False
        self.given_up = threading.Event()

    def run(self) -> None:
        """Try until success, or until an error ends the request."""
        begun = time.monotonic()
        while not self.given_up.is_set():
            self.num_attempts += 1
            self._count(num_requests=1, num_retries=int(self.num_attempts > 1))
            try:
                self.outcome.append(self._action(self._proceed))
                return
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                self.last_error = error
                if self._ends_with(error):
                    self.has_ended = True
                    return
                _report(self._where, error, waited_s=time.monotonic() - begun, limit_s=self._retry.timeout_s)
                backoff_s = min(FIRST_BACKOFF_S * 2 ** min(self.num_attempts - 1, 9), LONGEST_BACKOFF_S)
                backoff_s *= random.SystemRandom().uniform(0.5, 1)
                if is_throttled(error):
                    self._count(throttled_ms=round(1000 * backoff_s))  # before the pause: others see it at once
                self.given_up.wait(backoff_s)

    def _proceed(self) -> None:
        if self.given_up.is_set():
            raise _GivenUpError

    def _ends_with(self, error: Exception) -> bool:
        if is_throttled(error):
            return False
        if self.refuse(error) is not None:
            return True
        if is_out_of_reach(error):
            return False
        self._num_failures += 1
        return self._num_failures >= self._retry.attempts

    def refuse(self, error: Exception) -> StorageError | None:
        """Return the error for a failure beyond repair by further attempts; None for other failures."""
        certificate = certificate_failure(error)
        if certificate is not None:
            return StorageError(
                f"{self._where}: the server's certificate is refused ({certificate}): check the endpoint and the clock "
                "of this machine, or name the file of its authority in AWS_CA_BUNDLE and REQUESTS_CA_BUNDLE"
            )
        return self._refusal(error)

    def reason_for_timeout(self, remedy: str) -> str:
        """Return the text of the last error before the timeout, and the remedy."""
        error, limit_s = self.last_error, self._retry.timeout_s
        if error is None:
            return (
                f"no complete answer within {limit_s:g} s (attempt {self.num_attempts}): {remedy}, or raise timeout_s"
            )
        if is_throttled(error):
            return (
                f"the store was overloaded or unwell for {limit_s:g} s (attempt {self.num_attempts}, its last answer "
                f"was: {first_line(error)}): try again later, send fewer requests at once, or raise timeout_s"
            )
        return (
            f"no complete answer within {limit_s:g} s (attempt {self.num_attempts}, the last error was: "
            f"{first_line(error)}): {remedy}, or raise timeout_s"
        )


def _report(where: str, error: Exception, *, waited_s: float, limit_s: float) -> None:
    """Warn of a wait, at most once a minute in a process."""
    global _last_report_s
    now = time.monotonic()
    if waited_s >= REPORT_AFTER_S and now - _last_report_s >= REPORT_EVERY_S:
        _last_report_s = now
        logger.warning("%s: %s; asked again for up to %g s", where, first_line(error), limit_s)


# Threads that a fork never catches while they end: a process asks for an index, then forks its loader workers.
#
# After Python has joined a thread, C libraries may still free the thread's data; OpenSSL 3 does this under a lock
# of the whole process. A fork at this moment copies the lock as held by a thread that the child does not have, and the
# child's first connection waits forever. A fork therefore waits for threads that are ending.
#
# A fork also waits until torch's own threads sleep. At the end of a collective, gloo's threads enter Python, under
# a lock that Python 3.11 takes in the child before it makes a new one.

LONGEST_WAIT_S = 5.0
LONGEST_TORCH_WAIT_S = 0.5
_POLL_S = 0.0005
_ending: set[int] = set()  # kernel ids of threads whose target has returned, until the threads have disappeared


def start_thread(target: Callable[[], None], *, name: str) -> threading.Thread:
    """Start and return a daemon thread; after `target` returns, forks of this process wait until the thread is gone.

    Forks wait at most LONGEST_WAIT_S, and not for threads with a running target.
    """

    def run() -> None:
        try:
            target()
        finally:
            _ending.add(threading.get_native_id())

    _forget_those_gone()
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _forget_those_gone() -> None:
    for native_id in tuple(_ending):
        if not Path(f"/proc/self/task/{native_id}").exists():
            _ending.discard(native_id)


def _wait_for_those_ending() -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    _forget_those_gone()
    while _ending and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        _forget_those_gone()


def _wait_for_torch() -> None:
    deadline = time.monotonic() + LONGEST_TORCH_WAIT_S
    while _torch_runs() and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # releases the GIL for the ending threads


def _torch_runs() -> bool:
    """Return whether a thread named by torch, instead of by Python, is in any state but sleep."""
    for task in os.scandir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            name, _, state = Path(task.path, "stat").read_text().partition("(")[2].rpartition(") ")
            if name.startswith("pt_") and not state.startswith("S"):
                return True
    return False


os.register_at_fork(before=_wait_for_torch)
os.register_at_fork(before=_wait_for_those_ending, after_in_child=_ending.clear)
