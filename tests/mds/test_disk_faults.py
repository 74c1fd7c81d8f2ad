"""A disk that is full or holds what does not belong there: exact data, or an error that names the file."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from lmms_stream.errors import StorageError

from ..proxy import FaultProxy
from .reading import (
    IN_PROCESS_AND_WORKERS,
    MARKS,
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


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


@contextmanager
def small_disk(folder: Path, *, num_bytes: int) -> Iterator[Callable[[], None] | None]:
    """Make `folder` a file system of this size; where that is not allowed, what limits a process's files instead."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    is_mounted = (
        shutil.which("mount") is not None and subprocess.run(mount, capture_output=True, timeout=10).returncode == 0
    )
    try:
        yield None if is_mounted else partial(limit_files, 40_000)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True, timeout=10)


@IN_PROCESS_AND_WORKERS
def test_a_full_disk_is_an_error_that_names_the_file(num_workers: int, reading: Reading, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, num_bytes=160_000) as limit:
        full = replace(reading, local=disk / "cache", num_workers=num_workers)
        with child(full, tmp_path / "child", prepare=limit) as process:
            outcome = process.outcome()
        assert isinstance(outcome, StorageError)
        reason = "No space left on device" if limit is None else "File too large"
        found = re.search(rf"(shard\.\d+\.mds).*{reason}", str(outcome))
        assert found
        assert [path for path in temporary_files(disk) if found[1] in path.name] == []


def test_a_file_that_may_not_grow_is_an_error_that_names_it(
    reading: Reading, tmp_path: Path, expected: Delivered
) -> None:
    with child(reading, tmp_path / "child", prepare=partial(limit_files, 40_000)) as process:
        outcome = process.outcome()
    assert isinstance(outcome, StorageError)
    assert re.search(r"shard\.\d+\.mds.*File too large", str(outcome))
    assert reading.deliver() == expected
    assert temporary_files(reading.cache) == []


@IN_PROCESS_AND_WORKERS
def test_a_cache_folder_that_cannot_be_made_is_an_error_that_names_it(
    num_workers: int, reading: Reading, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "file"))):
        replace(reading, local=tmp_path / "file" / "cache", num_workers=num_workers).deliver()


@IN_PROCESS_AND_WORKERS
def test_a_folder_in_the_place_of_a_shard_is_an_error_that_names_it(
    num_workers: int, reading: Reading, expected: Delivered
) -> None:
    folder = reading.cache / SHARD
    (folder / "something").mkdir(parents=True)
    delivered, message = read_until_error(replace(reading, num_workers=num_workers).loader(), StorageError)
    assert delivered == expected[: len(delivered)]
    assert str(folder) in message
    assert (folder / "something").is_dir()


def is_deleted(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_a_cache_that_is_deleted_under_a_run_is_filled_again(
    reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    loader = reading.loader()
    batches = deliver(loader)
    delivered = [next(batches)]
    wait_until(lambda: len(list(reading.cache.glob("*.mds"))) == proxy.traffic().num_requests("GET", SHARDS))
    wait_until(lambda: is_deleted(reading.cache))  # a download may write into it meanwhile
    delivered.extend(batches)
    assert delivered == expected
    assert list(deliver(replace(reading).loader())) == expected
