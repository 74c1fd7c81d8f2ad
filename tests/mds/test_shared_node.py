"""What else is on a node: other runs, other users, a clock that jumps. Nothing of ours stays behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from lmms_stream.errors import StorageError

from ..proxy import FaultProxy, Rule
from .reading import IN_PROCESS_AND_WORKERS, MARKS, SHARDS, Delivered, Reading, child, temporary_files, wait_until

pytestmark = MARKS

NOBODY = 65534  # a user that is not this one


def jump_clock() -> None:
    """Let time.time and time.time_ns be days early and days late in turn."""
    patch, true_time, true_time_ns = pytest.MonkeyPatch(), time.time, time.time_ns
    days = [3 * 86400]

    def jump() -> int:
        days[0] = -days[0]
        return days[0]

    patch.setattr(time, "time", lambda: true_time() + jump())
    patch.setattr(time, "time_ns", lambda: true_time_ns() + jump() * 10**9)


def test_two_runs_with_one_cache_folder_fetch_each_shard_once(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    proxy.set_rules(Rule(path=SHARDS, delay_s=0.3))
    both = replace(reading, num_workers=2)
    with child(both, tmp_path / "one") as one, child(both, tmp_path / "two") as two:
        assert one.outcome() == expected
        assert two.outcome() == expected
    requests = {where: n for (_, where), n in proxy.traffic().requests.items() if re.search(SHARDS, where)}
    assert set(requests.values()) == {1}
    assert temporary_files(reading.cache) == []


def test_a_clock_that_jumps_changes_nothing(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    """Days back and forth while it runs, over a cache from the future and the past."""
    assert reading.deliver() == expected
    folder = reading.cache
    (folder / "shard.00000.mds").unlink()
    (folder / "shard.00003.mds").unlink()
    for number, path in enumerate(sorted(folder.rglob("*"))):
        at = time.time() + (10 if number % 2 else -10) * 86400
        os.utime(path, (at, at))
    proxy.set_rules(Rule(path=SHARDS, times=1, status=503))
    with child(replace(reading, num_workers=2), tmp_path / "child", prepare=jump_clock) as process:
        assert process.outcome() == expected


@contextmanager
def leftovers_in_shared_memory() -> Iterator[dict[Path, bytes]]:
    """What another user's run of MosaicML Streaming leaves, as far as the names are free."""
    made = {}
    names = ("locals", "barrier", "next_epoch", "cache_usage", "shard_states", "shard_access_times", "resume")
    for name in names:
        path = Path("/dev/shm") / f"000000_{name}"
        with suppress(FileExistsError), path.open("xb") as file:
            made[path] = os.urandom(100)
            file.write(made[path])
            path.chmod(0o600)
            with suppress(PermissionError):
                os.chown(path, NOBODY, NOBODY)
    try:
        yield made
    finally:
        for path in made:
            path.unlink()


@IN_PROCESS_AND_WORKERS
def test_what_other_users_left_does_not_collide(
    num_workers: int, reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Delivered
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / f"lmms_stream-{NOBODY}"
    theirs.mkdir(mode=0o700)
    with suppress(PermissionError):
        os.chown(theirs, NOBODY, NOBODY)
    with leftovers_in_shared_memory() as leftovers:
        assert replace(reading, local=None, num_workers=num_workers).deliver() == expected
        assert {path: path.read_bytes() for path in leftovers} == leftovers
    assert list(theirs.iterdir()) == []


def test_a_default_cache_folder_of_another_user_is_refused(
    reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = tmp_path / f"lmms_stream-{os.getuid()}"
    if os.getuid() == 0:
        mine.mkdir(mode=0o777)
        os.chown(mine, NOBODY, NOBODY)
    else:
        mine.symlink_to(tmp_path)
    with pytest.raises(StorageError, match=f"{mine} belongs to somebody else"):
        replace(reading, local=None).deliver()
    assert mine.is_symlink() or list(mine.iterdir()) == []


@IN_PROCESS_AND_WORKERS
def test_nothing_temporary_is_left_after_a_run(num_workers: int, reading: Reading, expected: Delivered) -> None:
    shared = Path("/dev/shm")
    before, children = set(shared.iterdir()), multiprocessing.active_children()
    assert replace(reading, num_workers=num_workers).deliver() == expected
    wait_until(lambda: set(shared.iterdir()) <= before)  # what other processes of the machine make there passes
    assert multiprocessing.active_children() == children
    assert temporary_files(reading.cache) == []
