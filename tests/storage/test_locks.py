from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmms_stream.errors import StorageError
from lmms_stream.storage.eviction import LEDGER_NAME, CacheQuota
from lmms_stream.storage.locks import locked, map_in_use

from ..conftest import run_command

# Holds the lock at sys.argv[1] until a line comes, which it obeys.
HOLD = """
import os, sys
from pathlib import Path
from lmms_stream.storage.locks import locked

path = Path(sys.argv[1])
with locked(path, timeout_s=30) as file:
    assert file is not None
    print("held", flush=True)
    if sys.stdin.readline() == "remove\\n":
        path.unlink()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def is_free(path: Path) -> bool:
    with locked(path, timeout_s=0) as file:
        return file is not None


def test_what_another_process_holds_is_not_had_at_once_and_not_in_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path):
        assert not is_free(path)
        started = time.monotonic()
        with locked(path, timeout_s=0.3) as file:
            assert file is None
        assert time.monotonic() - started >= 0.3


def test_who_waits_has_it_when_its_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        tell(process, "release")
        with locked(path, timeout_s=30) as file:
            assert file is not None
            assert not is_free(path)
    assert is_free(path)


def test_a_lock_of_short_work_that_a_stopped_process_holds_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmms_stream.storage.locks.LONGEST_HOLD_S", 0.3)
    path = tmp_path / LEDGER_NAME
    record = tmp_path / ".a.lock"
    record.write_bytes(b"")
    with holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        named = rf"{path} was held by another process for 0\.3 s: end that process"
        quota = CacheQuota([tmp_path], 1000)
        with pytest.raises(StorageError, match=named):
            quota.reserve(record, 10, timeout_s=30)
        with pytest.raises(StorageError, match=named):
            quota.settle(record, 0)
        with pytest.raises(StorageError, match=named):
            map_in_use(path)


def test_a_process_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        process.kill()
        with locked(path, timeout_s=30) as file:
            assert file is not None


def test_who_waited_for_a_file_that_was_removed_holds_the_one_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        script = HOLD.replace("assert file is not None", "assert os.fstat(file.fileno()).st_ino == path.stat().st_ino")
        with subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as waiting:
            time.sleep(1)  # it has opened the file that is removed
            tell(process, "remove")
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "held\n"
            assert not is_free(path)
            tell(waiting, "release")
            assert waiting.wait(30) == 0


def test_a_process_that_was_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from lmms_stream.storage.locks import locked

path = Path(sys.argv[1])
ended, end = os.pipe()
with locked(path, timeout_s=0):
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
with locked(path, timeout_s=0) as file:
    assert file is not None
os.close(end)
os.waitpid(pid, 0)
"""
    result = run_command(sys.executable, "-c", script, str(tmp_path / "lock"), timeout_s=60)
    assert result.returncode == 0, result.stderr


def test_no_two_processes_hold_it_at_a_time(tmp_path: Path) -> None:
    """Each counts one up in turn, and removes the lock's file now and then."""
    script = """
import sys
from pathlib import Path
from lmms_stream.storage.locks import locked

path, count = Path(sys.argv[1]) / "lock", Path(sys.argv[1]) / "count"
for number in range(200):
    with locked(path, timeout_s=60) as file:
        assert file is not None
        count.write_text(str(int(count.read_text()) + 1))
        if number % 3 == 0:
            path.unlink()
"""
    (tmp_path / "count").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(100) for process in processes] == [0] * 3
    assert (tmp_path / "count").read_text() == "600"
