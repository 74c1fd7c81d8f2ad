from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.plugins.peers.server import CHECK_S, FAN_OUT, STALL_S, Directory, Where

KEY = "source", "shard"


def test_who_asks_first_asks_the_store_and_others_wait_for_it() -> None:
    directory = Directory()
    assert directory.where(KEY, 0, now=0) == "store"
    assert [directory.where(KEY, node, now=0) for node in (1, 2, 1)] == ["wait"] * 3
    directory.add(KEY, 0)
    assert directory.where(KEY, 1, now=0) == 0
    assert directory.where(("source", "other shard"), 1, now=0) == "store"
    assert directory.where(("other source", "shard"), 2, now=0) == "store"


def test_who_looks_for_a_node_to_check_waits_for_others_that_look() -> None:
    directory = Directory()
    directory.where(KEY, 1, now=0)
    with ThreadPoolExecutor(1) as thread:
        with directory._lock:
            found = thread.submit(directory.suspect, KEY, now=CHECK_S)
            assert not wait([found], timeout=0.2).done
        assert found.result(60) == 1


def test_a_node_gives_a_file_to_few_at_a_time() -> None:
    directory = Directory()
    directory.add(KEY, 0)
    found = [directory.where(KEY, node, now=0) for node in range(1, 5)]
    assert found == [0] * FAN_OUT + ["wait"] * (4 - FAN_OUT)
    directory.add(KEY, 1)
    assert {directory.where(KEY, 3, now=0), directory.where(KEY, 4, now=0)} <= {0, 1}


@given(num_nodes=st.integers(1, 20), order=st.randoms(use_true_random=False))
def test_a_file_comes_from_the_store_once_and_spreads_like_a_tree(num_nodes: int, order: object) -> None:
    directory, lacking, given_by = Directory(), set(range(num_nodes)), Counter[Where]()
    rounds = 0
    while lacking:
        taking = []
        for node in sorted(lacking, key=lambda _: order.random()):  # type: ignore[attr-defined]
            where = directory.where(KEY, node, now=rounds)
            if where != "wait":
                given_by[where] += 1
                taking.append(node)
        for node in taking:
            directory.add(KEY, node)
        lacking -= set(taking)
        rounds += 1
    assert given_by["store"] == 1
    assert sum(given_by.values()) == num_nodes
    assert (1 + FAN_OUT) ** (rounds - 2) < num_nodes  # each round there are FAN_OUT more for each that has it
    assert max(given_by.values()) <= FAN_OUT * rounds


def test_a_node_that_does_not_have_a_file_any_more_is_not_named_for_it() -> None:
    directory = Directory()
    for node in (0, 1):
        directory.add(KEY, node)
    assert directory.where(KEY, 2, without=[0], now=0) == 1
    assert directory.where(KEY, 2, without=[1], now=0) == "store"
    directory.add(KEY, 2)
    assert directory.where(KEY, 2, now=0) == "store"  # who asks lacks it


def test_a_node_that_one_leaves_alone_is_still_named_to_others() -> None:
    directory = Directory()
    directory.add(KEY, 0)
    assert directory.where(KEY, 1, avoid=[0], now=0) == "store"
    assert directory.where(KEY, 2, now=0) == 0
    directory.add(KEY, 1)
    assert directory.where(KEY, 3, avoid=[0], now=0) == 1


def test_who_asks_the_store_and_dies_is_found_out() -> None:
    directory = Directory()
    assert directory.where(KEY, 0, now=0) == "store"
    assert directory.suspect(KEY, now=CHECK_S / 2) is None
    assert directory.suspect(KEY, now=CHECK_S) == 0
    assert directory.suspect(KEY, now=CHECK_S) is None  # one looks, for all that wait
    directory.note(KEY, 0, 100, now=CHECK_S)
    assert directory.where(KEY, 1, now=CHECK_S) == "wait"
    directory.note(KEY, 0, None, now=2 * CHECK_S)
    assert directory.where(KEY, 1, now=2 * CHECK_S) == "store"
    directory.note(KEY, 0, 200, now=2 * CHECK_S)  # who was given up may yet tell
    assert directory.where(KEY, 2, now=2 * CHECK_S) == "wait"


def test_who_stands_still_while_others_wait_is_given_up() -> None:
    directory = Directory()
    assert directory.where(KEY, 0, now=0) == "store"
    for now, num_bytes in ((1, 100), (STALL_S, 200), (2 * STALL_S - 1, 200)):
        directory.note(KEY, 0, num_bytes, now=now)
        assert directory.where(KEY, 1, now=now) == "wait"
    directory.note(KEY, 0, 200, now=2 * STALL_S)
    assert directory.where(KEY, 1, now=2 * STALL_S) == "store"
