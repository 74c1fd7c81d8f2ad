from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import ConfigError, StorageError
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.prefetch import Prefetcher


def prefetcher(fetch: Callable[[int], Path | None], *, threads: int = 2, ahead: int = 4, timeout_s: float = 20):  # type: ignore[no-untyped-def]
    config = FetchConfig(threads=threads, ahead=ahead, timeout_s=timeout_s)
    return Prefetcher(fetch, name=lambda shard_id: f"s3://b/{shard_id}", config=config)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_shards_are_fetched_in_the_order_of_need_and_a_bounded_number_ahead() -> None:
    fetched: list[int] = []

    def fetch(shard_id: int) -> Path:
        fetched.append(shard_id)
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=1, ahead=4)
    ahead.request(range(10, 30))
    ahead.request([12, 40])
    wait_until(lambda: len(fetched) == 4)
    time.sleep(0.05)
    assert fetched == [10, 11, 12, 13]
    assert [ahead.take(shard_id) for shard_id in range(10, 30)] == [Path(str(n)) for n in range(10, 30)]
    assert ahead.take(40) == Path("40")
    assert fetched == [*range(10, 30), 40]


def test_what_a_reader_waits_for_comes_before_what_was_requested() -> None:
    fetched: list[int] = []
    go = threading.Event()

    def fetch(shard_id: int) -> Path:
        go.wait(20)
        fetched.append(shard_id)
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=1, ahead=2)
    ahead.request(range(100))
    threading.Timer(0.1, go.set).start()
    assert ahead.take(99) == Path("99")
    assert fetched.index(99) <= 1


def test_a_shard_that_a_reader_has_taken_waits_its_turn_when_it_is_requested_again() -> None:
    fetched: list[int] = []
    go, begun = threading.Event(), threading.Event()

    def fetch(shard_id: int) -> Path:
        fetched.append(shard_id)
        if shard_id == 0:
            begun.set()
            go.wait(20)
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=1, ahead=8)
    ahead.take(2)
    ahead.request([0, 1, 2])
    assert begun.wait(20)
    go.set()
    assert [ahead.take(shard_id) for shard_id in range(3)] == [Path(str(n)) for n in range(3)]
    assert fetched == [2, 0, 1, 2]


def test_several_are_fetched_at_once() -> None:
    together = threading.Barrier(3, timeout=20)

    def fetch(shard_id: int) -> Path:
        together.wait()
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=3, ahead=8)
    ahead.request(range(6))
    assert [ahead.take(shard_id) for shard_id in range(6)] == [Path(str(n)) for n in range(6)]


def test_a_shard_that_another_process_downloads_holds_up_nobody() -> None:
    busy = [True]

    def fetch(shard_id: int) -> Path | None:
        return None if shard_id == 0 and busy[0] else Path(str(shard_id))

    ahead = prefetcher(fetch, threads=1)
    ahead.request(range(4))
    assert [ahead.take(shard_id) for shard_id in (1, 2, 3)] == [Path("1"), Path("2"), Path("3")]
    threading.Timer(0.1, lambda: busy.clear() or busy.append(False)).start()  # type: ignore[func-returns-value]
    assert ahead.take(0) == Path("0")


def test_a_failure_is_raised_to_its_reader_alone_and_may_be_tried_again() -> None:
    failing = [True]

    def fetch(shard_id: int) -> Path:
        if shard_id == 1 and failing[0]:
            raise StorageError("s3://b/1: gone")
        return Path(str(shard_id))

    ahead = prefetcher(fetch)
    ahead.request(range(3))
    assert ahead.take(0) == Path("0")
    with pytest.raises(StorageError, match="s3://b/1: gone"):
        ahead.take(1)
    assert ahead.take(2) == Path("2")
    failing[0] = False
    assert ahead.take(1) == Path("1")


def test_a_failure_under_way_when_all_was_forgotten_is_nobodys() -> None:
    failing, go = [True], threading.Event()

    def fetch(shard_id: int) -> Path:
        if failing[0]:
            go.wait(20)
            raise StorageError(f"s3://b/{shard_id}: gone")
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=2, ahead=2)
    ahead.request(range(2))
    wait_until(lambda: ahead.is_begun(0) and ahead.is_begun(1))
    ahead.forget()
    ahead.request([1])
    failing[0] = False
    threading.Timer(0.1, go.set).start()
    assert [ahead.take(shard_id) for shard_id in (1, 0)] == [Path("1"), Path("0")]


def test_what_is_needed_later_begins_when_all_that_is_needed_soon_is_here() -> None:
    begun: list[int] = []
    go = {shard_id: threading.Event() for shard_id in range(6)}

    def fetch(shard_id: int) -> Path:
        begun.append(shard_id)
        go[shard_id].wait(20)
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=4, ahead=6)
    ahead.request([4, 5], later=True)
    ahead.request([0, 1])
    ahead.request([2, 3], later=True)
    wait_until(lambda: set(begun) >= {0, 1})
    go[0].set()
    assert ahead.take(0) == Path("0")
    soon = set(begun) - {4, 5}  # these may have begun before anything was needed soon
    assert soon == {0, 1}
    ahead.request([2])  # it is needed soon now
    wait_until(lambda: 2 in begun)
    go[1].set()
    wait_until(lambda: ahead.has(1))
    time.sleep(0.05)
    assert 3 not in begun
    for event in go.values():
        event.set()
    assert [ahead.take(shard_id) for shard_id in range(1, 6)] == [Path(str(n)) for n in range(1, 6)]
    assert sorted(begun) == [*range(6)]


def test_what_is_needed_later_waits_for_what_another_process_downloads() -> None:
    busy, begun = [True], []

    def fetch(shard_id: int) -> Path | None:
        begun.append(shard_id)
        return None if shard_id == 0 and busy else Path(str(shard_id))

    ahead = prefetcher(fetch, threads=2)
    ahead.request([0])
    ahead.request([1, 2], later=True)
    wait_until(lambda: begun.count(0) > 1)
    assert set(begun) == {0}
    busy.clear()
    wait_until(lambda: ahead.has(1) and ahead.has(2))
    assert ahead.has(0)


def test_what_was_forgotten_takes_no_room_of_what_is_asked_for_next() -> None:
    go = threading.Event()
    ahead = prefetcher(lambda shard_id: Path(str(shard_id)) if go.wait(20) else None, threads=2, ahead=2)
    ahead.request(range(10))
    wait_until(lambda: ahead.is_begun(0) and ahead.is_begun(1))
    ahead.forget()
    go.set()
    ahead.request([10, 11])
    wait_until(lambda: ahead.has(10) and ahead.has(11))
    assert not any(ahead.is_begun(shard_id) for shard_id in range(10))


def test_the_wait_for_a_shard_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmms_stream.storage.prefetch._GRACE_S", 0.1)
    ahead = prefetcher(lambda shard_id: None, timeout_s=0.2)
    with pytest.raises(StorageError, match=r"s3://b/5 was not downloaded within 0\.2 s: another process holds"):
        ahead.take(5)


@pytest.mark.parametrize("settings", [{"threads": 0}, {"ahead": 0}, {"attempts": 0}, {"timeout_s": -1.0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        FetchConfig(**settings)


def test_threads_end_when_there_is_nothing_to_do_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmms_stream.storage.prefetch._IDLE_S", 0.05)

    others = set(threading.enumerate())  # those of earlier tests may end meanwhile

    def num_threads() -> int:
        return sum(thread.name == "lmms-fetch" and thread not in others for thread in threading.enumerate())

    ahead = prefetcher(lambda shard_id: Path(str(shard_id)), threads=3, ahead=2)
    ahead.request(range(10))
    wait_until(lambda: num_threads() == 0)
    assert ahead.take(9) == Path("9")
    wait_until(lambda: num_threads() == 0)
    assert [ahead.take(shard_id) for shard_id in range(9)] == [Path(str(n)) for n in range(9)]
    wait_until(lambda: num_threads() == 0)


def test_what_is_asked_for_as_an_idle_thread_ends_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmms_stream.storage.prefetch._IDLE_S", 0.05)
    ahead = prefetcher(lambda shard_id: Path(str(shard_id)), threads=1, timeout_s=1)
    assert ahead.take(1) == Path("1")
    with ahead._changed:  # so that the thread's wait has ended, and it has not looked yet
        time.sleep(0.2)
        assert ahead.take(2) == Path("2")


def test_while_a_reader_looks_nothing_is_begun_but_what_it_waits_for() -> None:
    fetched: list[int] = []

    def fetch(shard_id: int) -> Path:
        fetched.append(shard_id)
        return Path(str(shard_id))

    ahead = prefetcher(fetch, threads=1, ahead=4)
    with ahead.held():
        ahead.request(range(10, 14))
        assert ahead.take(12) == Path("12")
        time.sleep(0.05)
        assert fetched == [12]
        assert ahead.leave(10)  # its reader found it
        assert not ahead.has(11)
    wait_until(lambda: ahead.has(11) and ahead.has(13))
    assert fetched == [12, 11, 13]
    assert not ahead.leave(11)  # fetched meanwhile: it is taken, so that there is room for others
    assert ahead.take(11) == Path("11")


def test_a_shard_that_is_under_way_is_not_left() -> None:
    go = threading.Event()
    ahead = prefetcher(lambda shard_id: Path(str(shard_id)) if go.wait(20) else None)
    ahead.request([1])
    wait_until(lambda: ahead.is_begun(1))
    assert not ahead.leave(1)
    assert not ahead.has(1)
    go.set()
    assert ahead.take(1) == Path("1")
