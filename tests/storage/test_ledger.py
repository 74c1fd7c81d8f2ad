"""The ledger of a limited cache: what is there is known without a look at all of it, also after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.storage.cache import LocalCache
from lmms_stream.storage.eviction import HEADER_BYTES, LEDGER_NAME, CacheJournal, CacheQuota, Entry, find_download
from lmms_stream.storage.locks import locked
from lmms_stream.storage.record import Record, touch

from ..rounds import in_long_rounds, rounds
from .counting import OBJECT_BYTES, Remote, held, limited_cache, limited_caches, object_wanted


def fill(folder: Path, *, objects: int) -> None:
    """Downloads of ours, as they lie there after a run: those with the least numbers were used least recently."""
    for number in range(objects):
        path, record_path = folder / f"old{number:05}", folder / f".old{number:05}.lock"
        path.write_bytes(b"x" * OBJECT_BYTES)
        with record_path.open("wb") as file:
            Record.of(path, path.name, ours=True).write(file)
        touch(record_path)


def counted(folder: Path) -> dict[str, int]:
    """What a process that comes to the folder finds counted, by the names of records."""
    ledger = CacheJournal(folder)
    with locked(folder / LEDGER_NAME, timeout_s=5) as file:
        assert file is not None
        ledger.catch_up(file, wanted="")
    return {entry.name: entry.num_bytes for entry in ledger.entries}


NUM_FULL = rounds(2000, 8000)
NUM_NEW = NUM_FULL // 10


def test_downloads_into_a_full_cache_of_thousands_of_shards_do_not_read_the_records_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def read_record(path: Path) -> Entry | None:
        read.append(path)
        return find_download(path)

    fill(tmp_path, objects=NUM_FULL)
    cache = limited_cache(tmp_path, objects=NUM_FULL)
    monkeypatch.setattr("lmms_stream.storage.eviction.find_download", read_record)
    cache.fetch("first", object_wanted("first"))
    assert len(read) <= 2 * NUM_FULL  # one look at all of them, which serves all processes, and those that give way
    read.clear()
    for number in range(NUM_NEW):
        cache.fetch(f"new{number:03}", object_wanted(f"new{number:03}"))
    assert len(read) <= 2 * NUM_FULL + 2 * NUM_NEW  # two more looks at most, and the record of what gives way
    assert held(tmp_path) == sorted(
        ["first", *(f"old{n:05}" for n in range(NUM_NEW + 1, NUM_FULL)), *(f"new{n:03}" for n in range(NUM_NEW))]
    )


FETCHES = """
import sys, time
from pathlib import Path
from tests.storage.counting import limited_caches, object_wanted
caches = limited_caches(Path(sys.argv[1]), folders=int(sys.argv[2]), objects=40, timeout_s=60)
print("ready", flush=True)
for number in range(int(sys.argv[4])):
    name = f"{sys.argv[3]}-{number:04}"
    caches[number % len(caches)].fetch(name, object_wanted(name))
    time.sleep(0.01)  # as long as a download takes
"""


def start(folder: Path, name: str, *, folders: int, objects: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FETCHES, str(folder), str(folders), name, str(objects)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
    return process


@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_folders", [6, pytest.param(1, marks=in_long_rounds)])
def test_processes_keep_one_limit_and_those_that_are_killed_take_no_room_with_them(
    tmp_path: Path, num_folders: int
) -> None:
    folders = [cache.folder for cache in limited_caches(tmp_path, folders=num_folders, objects=40)]
    killed = [start(tmp_path, f"killed{n}", folders=num_folders, objects=100_000) for n in range(2)]
    ended = start(tmp_path, "ended", folders=num_folders, objects=60)
    most = 0
    while ended.poll() is None:
        with locked(folders[0] / LEDGER_NAME, timeout_s=60):
            most = max(most, sum(len(held(folder)) for folder in folders))
        time.sleep(0.01)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    assert 30 < most <= 40
    assert ended.returncode == 0
    assert start(tmp_path, "last", folders=num_folders, objects=40).wait(timeout=60) == 0
    names = [f"last-{number:04}" for number in range(40)]
    assert sorted(name for folder in folders for name in held(folder)) == names
    assert {name: size for folder in folders for name, size in counted(folder).items()} == {
        f".{name}.lock": OBJECT_BYTES for name in names
    }


def test_a_download_locks_the_ledgers_of_few_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Path] = []

    def counted_lock(path: Path, *, timeout_s: float) -> Any:
        taken.append(path)
        return locked(path, timeout_s=timeout_s)

    caches = limited_caches(tmp_path, folders=100, objects=100)
    for number, cache in enumerate(caches):
        cache.fetch(f"a{number}", object_wanted(f"a{number}"))
    monkeypatch.setattr("lmms_stream.storage.eviction.locked", counted_lock)
    for number, cache in enumerate(caches):
        cache.fetch(f"b{number}", object_wanted(f"b{number}"))
    assert len(taken) <= 8 * len(caches)
    assert [held(cache.folder) for cache in caches] == [[f"b{number}"] for number in range(100)]


def test_what_another_process_writes_into_any_folder_is_known_at_the_next_download(tmp_path: Path) -> None:
    ours = limited_caches(tmp_path, folders=20, objects=20)
    theirs = limited_caches(tmp_path, folders=20, objects=20)
    for number in range(60):
        caches = ours if number % 3 else theirs
        caches[number * 7 % 20].fetch(f"a{number:02}", object_wanted(f"a{number:02}"))
        assert sum(len(held(cache.folder)) for cache in ours) == min(number + 1, 20)


def test_room_of_files_that_somebody_removed_is_used_before_others_give_way(tmp_path: Path) -> None:
    fill(tmp_path, objects=100)
    cache = limited_cache(tmp_path, objects=100)
    cache.fetch("a", object_wanted("a"))
    for number in range(20, 50):
        (tmp_path / f"old{number:05}").unlink()
    for number in range(40):
        cache.fetch(f"new{number:02}", object_wanted(f"new{number:02}"))
    there = held(tmp_path)
    assert len(there) <= 100
    assert len([name for name in there if name.startswith("old")]) >= 100 - 1 - 30 - 40
    for number in range(40, 70):
        cache.fetch(f"new{number:02}", object_wanted(f"new{number:02}"))
    assert len(held(tmp_path)) == 100  # the room of what was removed is all in use again


def test_files_that_a_process_without_a_ledger_downloaded_are_counted_after_some_downloads(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=100)
    for number in range(100):
        cache.fetch(f"a{number:02}", object_wanted(f"a{number:02}"))
    fill(tmp_path, objects=30)
    for number in range(40):
        cache.fetch(f"b{number:02}", object_wanted(f"b{number:02}"))
    assert len(held(tmp_path)) == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-3],
        lambda data: data + b"+ 10",
        lambda data: data + b"nonsense\n",
        lambda data: b"\0" * HEADER_BYTES + data[HEADER_BYTES:],
        lambda data: data.replace(b'"boot": "', b'"boot": "x', 1),
    ],
)
def test_a_ledger_that_was_cut_short_or_is_of_another_boot_is_made_anew(tmp_path: Path, damage: object) -> None:
    cache = limited_cache(tmp_path, objects=50)
    for number in range(50):
        cache.fetch(f"a{number:02}", object_wanted(f"a{number:02}"))
    expected = counted(tmp_path)
    assert len(expected) == 50
    path = tmp_path / LEDGER_NAME
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    cache.fetch("b", object_wanted("b"))
    assert held(tmp_path) == sorted([*(f"a{number:02}" for number in range(1, 50)), "b"])
    del expected[".a00.lock"]
    assert counted(tmp_path) == expected | {".b.lock": OBJECT_BYTES}


def test_files_of_one_name_in_two_folders_are_both_counted(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    quota = CacheQuota(folders, 6 * OBJECT_BYTES)
    one, two = (LocalCache(Remote(), folder, quota=quota) for folder in folders)
    for number in range(12):
        one.fetch(f"a{number:02}", object_wanted(f"a{number:02}"))
        two.fetch(f"a{number:02}", object_wanted(f"a{number:02}"))
        assert sum(len(held(folder)) for folder in folders) == min(6, 2 * number + 2)
    assert held(folders[0]) == held(folders[1]) == [f"a{number:02}" for number in range(9, 12)]


def test_two_sets_of_folders_that_share_one_keep_what_it_holds_in_one_ledger(tmp_path: Path) -> None:
    def cache_of(folder: Path, *folders: Path) -> LocalCache:
        return LocalCache(Remote(), folder, quota=CacheQuota(folders, 50 * OBJECT_BYTES))

    one, both = tmp_path / "one", tmp_path / "both"
    alone, shared = cache_of(both, both), cache_of(one, one, both)
    for number in range(30):
        shared.fetch(f"a{number:02}", object_wanted(f"a{number:02}"))
        alone.fetch(f"b{number:02}", object_wanted(f"b{number:02}"))
    shared.fetch("c", object_wanted("c"))
    assert len(held(one)) + len(held(both)) == 50
