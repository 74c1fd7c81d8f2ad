"""What loaders and their workers fetched is counted once, in whatever process it was."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest
from lmms_stream.loader.counts import WorkerCounts
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchCounts, FetchTally, sum_counts

from tests.conftest import write_tokens
from tests.rounds import in_long_rounds


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """A dataset that is copied to be read, since it is compressed."""
    write_tokens(tmp_path / "data", num_samples=1000, compression="zstd")
    return str(tmp_path / "data")


def open_loader(
    remote: str, local: Path | None, *, num_workers: int, start_method: Literal["fork", "spawn"] | None = None
) -> PackedLoader:
    dataset = PackedStreamingDataset(
        remote, local, processor=TokensProcessor(), packing=PackingConfig(packing_length=512)
    )
    return PackedLoader(dataset, global_batch=4, num_workers=num_workers, start_method=start_method, timeout_s=60)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_shard_is_downloaded_once_and_found_in_the_epochs_after_that(
    remote: str, tmp_path: Path, num_workers: int
) -> None:
    loader = open_loader(remote, tmp_path / "cache", num_workers=num_workers)
    shards = loader.mixture.plans["data"].samples_per_shard
    shard_bytes = sum(path.stat().st_size for path in (tmp_path / "data").glob("*.mds.zstd"))
    assert loader.fetched == FetchCounts()
    batches = sum(1 for _ in loader)
    first = loader.fetched
    assert first.misses == len(shards) > 4
    assert first.num_bytes == shard_bytes
    assert first.hits <= len(shards) * max(0, num_workers - 1)  # what the other worker had downloaded
    assert sum(1 for _ in loader) == batches
    second = loader.fetched
    assert (second.misses, second.num_bytes) == (first.misses, first.num_bytes)
    if num_workers:  # workers are new in each epoch, and look for all that they need
        assert len(shards) <= second.hits - first.hits <= len(shards) * num_workers
    else:
        assert second.hits == first.hits  # the shards are open


@in_long_rounds
@pytest.mark.parametrize(("size", "words"), [("128k", r"has 1?\d\d of 128 KiB left, .* need 280: "), ("1m", r"^\d+$")])
def test_workers_run_in_little_shared_memory_or_the_error_names_the_remedy(
    remote: str, size: str, words: str, tmp_path: Path
) -> None:
    """In a mount namespace with a /dev/shm of this size, as of a container."""
    program = (
        "import sys; from tests.loader.test_worker_counts import open_loader; "
        "print(sum(1 for _ in open_loader(sys.argv[1], None, num_workers=2)))"
    )
    mounted = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        mounted,
        "sh",
        sys.executable,
        "-c",
        program,
        remote,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"namespaces are not allowed here: {done.stderr}")
    assert re.search(words, done.stdout + done.stderr, re.MULTILINE), done.stdout + done.stderr


@in_long_rounds
def test_workers_that_are_spawned_are_counted_too(remote: str, tmp_path: Path) -> None:
    loader = open_loader(remote, tmp_path / "cache", num_workers=1, start_method="spawn")
    assert sum(1 for _ in loader) > 0
    assert loader.fetched.misses == len(loader.mixture.plans["data"].samples_per_shard)


def test_what_is_read_where_it_lies_is_not_counted(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=500)
    loader = open_loader(str(tmp_path / "data"), None, num_workers=1)
    assert sum(1 for _ in loader) > 0
    assert loader.fetched == FetchCounts()


def test_threads_that_add_at_once_lose_nothing() -> None:
    tally = FetchTally()

    def add() -> None:
        for _ in range(2000):
            tally.add(hits=1, num_bytes=3)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.total == FetchCounts(hits=8000, misses=0, num_bytes=24000)


def test_a_worker_that_is_started_again_goes_on_in_its_row() -> None:
    counts = WorkerCounts(2)
    tally = FetchTally()
    tally.add(hits=7)  # before the fork
    for worker in (0, 1, 1):
        tell = counts.teller(worker, [tally])
        tally.add(misses=1, num_bytes=10)
        tell()
        tell()
    assert sum_counts(counts.fetched_by_stream()) == FetchCounts(hits=0, misses=3, num_bytes=30)


def test_epochs_are_told_by_source(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=500)
    loader = open_loader(str(tmp_path / "data"), tmp_path / "cache", num_workers=0)
    num_packs = loader.mixture.plans["data"].num_packs(0)
    assert loader.epochs == {"data": 0}
    loader.skip_steps(2)
    assert loader.epochs == {"data": 8 / num_packs}
    assert sum(1 for _ in loader) > 0
    assert loader.epochs == {"data": 1}
