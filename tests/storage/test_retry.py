from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest
from lmms_stream.errors import ConfigError, StorageError
from lmms_stream.storage.failures import disk_error
from lmms_stream.storage.retry import Retry, persist


def run(
    action: Callable[[Callable[[], None]], int],
    *,
    attempts: int = 3,
    timeout_s: float = 20,
    refusal: Callable[[Exception], StorageError | None] = lambda error: None,
) -> int:
    retry = Retry(attempts=attempts, timeout_s=timeout_s)
    return persist(action, where="s3://b/k", retry=retry, refusal=refusal, remedy="check the store")


def test_what_fails_at_first_is_tried_again() -> None:
    failures = [ConnectionError("reset"), ConnectionError("reset")]

    def action(proceed: Callable[[], None]) -> int:
        proceed()
        if failures:
            raise failures.pop()
        return 7

    assert run(action) == 7
    assert failures == []


def test_the_last_error_names_the_object_the_cause_and_the_attempts() -> None:
    def action(proceed: Callable[[], None]) -> int:
        raise EOFError("cut short")

    with pytest.raises(StorageError, match=r"^s3://b/k: cut short \(after 3 attempts\): check the store$"):
        run(action)


def test_what_cannot_get_better_is_not_tried_again() -> None:
    calls = []

    def action(proceed: Callable[[], None]) -> int:
        calls.append(1)
        raise PermissionError("no")

    with pytest.raises(StorageError, match="refused"):
        run(action, refusal=lambda error: StorageError("refused"))
    assert len(calls) == 1


def test_a_request_that_hangs_is_left_behind_in_time_and_ends_when_it_looks() -> None:
    hanging, ended = threading.Event(), threading.Event()

    def action(proceed: Callable[[], None]) -> int:
        hanging.wait(240)
        try:
            proceed()
        finally:
            ended.set()
        return 1

    with pytest.raises(StorageError, match=r"s3://b/k: no complete answer within 0\.2 s \(attempt 1\): check"):
        run(action, timeout_s=0.2)
    assert not ended.is_set()
    hanging.set()
    assert ended.wait(10)


def test_time_that_runs_out_between_attempts_names_the_last_error() -> None:
    def action(proceed: Callable[[], None]) -> int:
        raise ConnectionError("reset by peer")

    with pytest.raises(StorageError, match=r"within 0\.5 s \(attempt \d, the last error was: reset by peer\)"):
        run(action, attempts=99, timeout_s=0.5)


@pytest.mark.parametrize("settings", [{"attempts": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"(attempts|timeout_s) must be"):
        Retry(**settings)  # type: ignore[arg-type]


def test_errors_of_the_disk_say_what_to_do() -> None:
    full = disk_error("x", OSError(errno.ENOSPC, "No space left on device"))
    assert "x: no room on the disk of this node (No space left on device): free some" in str(full)
    assert "set cache_limit" in str(full)
    assert str(disk_error("x", OSError(errno.EACCES, "Permission denied", "/f"))) == (
        "x: Permission denied: /f: check the path and its rights"
    )
