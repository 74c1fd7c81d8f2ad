"""Workers and ranks that are killed or stand still: the others go on exactly, or say so in bounded time."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lmms_stream.errors import StorageError, WorkerError
from lmms_stream.storage.fetch_config import FetchConfig

from ..proxy import FaultProxy, Rule
from .reading import (
    MARKS,
    ONLY_SHARD,
    SHARD,
    SHARDS,
    Delivered,
    Reading,
    child,
    deliver,
    read_until_error,
    temporary_files,
    wait_until,
)

pytestmark = MARKS


def test_a_run_whose_worker_is_killed_goes_on_exactly_in_a_new_loader(reading: Reading, expected: Delivered) -> None:
    loader = replace(reading, num_workers=2).loader()
    delivered = []
    batches = deliver(loader)
    for _ in range(11):
        delivered.append(next(batches))
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    with pytest.raises(WorkerError, match="a loader worker died or gave nothing"):
        delivered.extend(batches)
    assert delivered == expected[: len(delivered)]
    state = json.loads(json.dumps(loader.state_dict()))
    done = state["sources"]["data"]["packs"]
    assert 8 <= done <= len(delivered)
    resumed = replace(reading, num_workers=2).loader()
    resumed.load_state_dict(state)
    assert list(deliver(resumed)) == expected[done:]


def is_under_way(folder: Path) -> bool:
    """Whether SHARD is being downloaded."""
    return any(SHARD in path.name for path in temporary_files(folder))


def test_a_rank_that_is_killed_in_mid_download_holds_up_nobody_and_leaves_nothing(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    folder = reading.cache
    proxy.set_rules(Rule(path=ONLY_SHARD, times=1, trickle_s=0.1))
    with child(replace(reading, num_workers=2), tmp_path / "killed") as killed:
        wait_until(lambda: is_under_way(folder))
        with child(reading, tmp_path / "other") as other:
            time.sleep(0.5)  # it reads what there is, and comes to wait for the shard
            assert proxy.traffic().num_requests("GET", ONLY_SHARD) == 1
            killed.signal(signal.SIGKILL)
            assert other.outcome() == expected
    assert proxy.traffic().num_requests("GET", ONLY_SHARD) == 2
    assert replace(reading, num_workers=2).deliver() == expected
    assert proxy.traffic().num_requests("GET", ONLY_SHARD) == 2
    assert temporary_files(folder) == []


def test_what_a_killed_rank_left_is_gone_after_the_next_run(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    folder = reading.cache
    proxy.set_rules(Rule(path=SHARDS, times=1, trickle_s=0.1))
    with child(replace(reading, num_workers=2), tmp_path / "killed") as killed:
        wait_until(lambda: temporary_files(folder) != [])
        killed.signal(signal.SIGKILL)
    assert temporary_files(folder) != []
    proxy.set_rules()
    assert reading.deliver() == expected
    assert temporary_files(folder) == []


def test_a_rank_that_stands_still_in_mid_download_is_an_error_of_others_in_bounded_time(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    proxy.set_rules(Rule(path=ONLY_SHARD, times=1, trickle_s=0.1))
    with child(reading, tmp_path / "stopped") as stopped:
        wait_until(lambda: is_under_way(reading.cache))
        stopped.signal(signal.SIGSTOP)
        loader = replace(reading, fetch=FetchConfig(timeout_s=4)).loader()
        delivered, message = read_until_error(loader, StorageError)
        assert delivered == expected[: len(delivered)]
        assert re.search(rf"{reading.remote}/shard\.\d+\.mds .* 4 s: another process holds its download", message)
    assert reading.deliver() == expected
