"""Requests to remote stores: tried again with back-off, and bounded in time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ConfigError, StorageError
from .threads import start_thread

T = TypeVar("T")
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How hard a request to a remote store is tried: up to `attempts` times, within `timeout_s` seconds in all.

    Between attempts the wait doubles, from a quarter of a second to eight, less a random part of up to a half. Where a
    store that has answered before cannot be reached, attempts go on for `outage_s` seconds.
    """

    attempts: int = 5
    timeout_s: float = 600.0
    outage_s: float = 120.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts must be at least 1, got {self.attempts}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be more than 0 seconds, got {self.timeout_s}")
        if not self.outage_s >= 0:
            raise ConfigError(f"outage_s must be 0 seconds or more, got {self.outage_s}")


DEFAULT_RETRY = Retry()


class _GivenUpError(Exception):
    """Nobody waits for this request any more."""


def persist(
    action: Callable[[Callable[[], None]], T],
    *,
    where: str,
    retry: Retry,
    refusal: Callable[[Exception], StorageError | None],
    remedy: str,
    is_outage: Callable[[Exception], bool] = lambda _: False,
) -> T:
    """What `action` gives, tried again with back-off while `refusal` knows no reason to give up at once.

    is_outage: whether an error says that a store which has answered before cannot be reached now.
    It runs in a thread that is left behind when `timeout_s` is over, because a server that trickles can hold a
    read for ever; `action` calls its argument now and then, which ends it once nobody waits.
    """
    outcome: list[T] = []
    failure: list[Exception] = []
    num_attempts = 0
    given_up = threading.Event()

    def proceed() -> None:
        if given_up.is_set():
            raise _GivenUpError

    def attempts() -> None:
        nonlocal num_attempts
        outage_s = 0.0  # since it could not be reached
        while not given_up.is_set():
            begun = time.monotonic()
            num_attempts += 1
            try:
                outcome.append(action(proceed))
                return
            except Exception as error:  # noqa: BLE001 - it is raised by the thread that waits
                failure.append(error)
                waits = is_outage(error) and outage_s < retry.outage_s
                if refusal(error) is not None or (num_attempts >= retry.attempts and not waits):
                    return
                backoff = min(FIRST_BACKOFF_S * 2 ** min(num_attempts - 1, 9), LONGEST_BACKOFF_S)
                given_up.wait(backoff * random.SystemRandom().uniform(0.5, 1))
                outage_s = outage_s + time.monotonic() - begun if is_outage(error) else 0.0

    thread = start_thread(attempts, name="lmms-request")
    thread.join(retry.timeout_s)
    if outcome:
        return outcome[0]
    if thread.is_alive():
        given_up.set()
        cause = f", the last error was: {failure[-1]}" if failure else ""
        of_all = f" of {retry.attempts}" if num_attempts <= retry.attempts else ""  # more where it could not be reached
        raise StorageError(
            f"{where}: no complete answer within {retry.timeout_s:g} s (attempt {num_attempts}{of_all}{cause}): "
            f"{remedy}, or raise timeout_s"
        )
    error = failure[-1]
    raise refusal(error) or StorageError(f"{where}: {error} (after {num_attempts} attempts): {remedy}") from error
