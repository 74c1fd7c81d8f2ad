"""Data that changes at its source or in the cache: exact samples, or an error that names the shard."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.errors import StorageError
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus

from ..rounds import rounds
from .reading import (
    IN_PROCESS_AND_WORKERS,
    MARKS,
    SHARD,
    Delivered,
    Reading,
    read_by,
    read_until_error,
    temporary_files,
    upload,
)

pytestmark = MARKS


def lengths_file(folder: Path) -> Path:
    (path,) = (folder / "_lmms" / "lengths").glob("[!.]*.npy")
    return path


def shortened(data: bytes) -> bytes:
    return data[:-1]


def lengthened(data: bytes) -> bytes:
    return data + bytes(1 << 20)


def flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def emptied(data: bytes) -> bytes:
    return b""


def reversed_samples(data: bytes) -> bytes:
    """A valid shard of the same size, whose samples are in reverse."""
    (count,) = struct.unpack_from("<I", data)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    samples = [data[start:stop] for start, stop in pairwise(offsets)][::-1]
    ends = [offsets[0]]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    changed = struct.pack(f"<{count + 2}I", count, *ends) + data[4 * (count + 2) : offsets[0]] + b"".join(samples)
    assert len(changed) == len(data)
    assert changed != data
    return changed


CHANGES = {change.__name__: change for change in (shortened, lengthened, flipped, emptied, reversed_samples)}


@pytest.mark.parametrize(("change", "num_workers"), read_by(CHANGES, in_workers=["reversed_samples"]))
def test_a_shard_that_changes_after_the_index_was_read_is_named(
    change: Callable[[bytes], bytes],
    num_workers: int,
    reading: Reading,
    dataset_folder: Path,
    s3_folder: str,
    expected: Delivered,
) -> None:
    upload(dataset_folder, s3_folder)
    loader = replace(
        reading, remote=s3_folder, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=10)
    ).loader()
    open_storage(s3_folder).write(SHARD, change((dataset_folder / SHARD).read_bytes()))
    delivered, message = read_until_error(loader, StorageError)
    assert delivered == expected[: len(delivered)]
    assert f"{s3_folder}/{SHARD}: what was downloaded does not match the size or checksum in its index" in message
    assert not (reading.cache / SHARD).exists()
    assert [path for path in temporary_files(reading.cache) if SHARD in path.name] == []


@IN_PROCESS_AND_WORKERS
def test_a_shard_that_is_missing_is_named(
    num_workers: int, reading: Reading, dataset_folder: Path, s3_folder: str, expected: Delivered
) -> None:
    upload(dataset_folder, s3_folder)
    open_storage(s3_folder).delete(SHARD)
    delivered, message = read_until_error(
        replace(reading, remote=s3_folder, num_workers=num_workers).loader(), StorageError
    )
    assert delivered == expected[: len(delivered)]
    assert message.startswith(f"{s3_folder}/{SHARD} does not exist")


def test_a_dataset_that_is_replaced_ends_the_old_run_and_is_read_by_a_new_one(
    reading: Reading, dataset_folder: Path, corpus: Corpus, s3_folder: str, tmp_path: Path
) -> None:
    """Both runs use one cache folder, as a run that is started again does."""
    upload(dataset_folder, s3_folder)
    reading = replace(reading, remote=s3_folder, fetch=FetchConfig(attempts=2, timeout_s=10))
    old = reading.loader()
    assert old.steps_left > 5
    for target, overwrite in ((s3_folder, True), (str(tmp_path / "new"), False)):
        convert(
            [corpus.classes, corpus.functions],
            target,
            processor=reading.processor,
            shard_bytes=1 << 16,
            overwrite=overwrite,
        )
    new_data = replace(reading, remote=str(tmp_path / "new"), local=None).deliver()
    for _ in range(2):  # with an empty cache, and with the new run's
        delivered, message = read_until_error(old, StorageError)
        assert delivered == []
        assert re.search(rf"{s3_folder}/shard\.\d+\.mds", message)
        assert reading.deliver() == new_data


@pytest.mark.parametrize(
    "change", rounds([shortened, reversed_samples], [shortened, flipped, emptied, reversed_samples])
)
def test_a_corrupt_copy_is_fetched_again(
    change: Callable[[bytes], bytes], reading: Reading, dataset_folder: Path, expected: Delivered
) -> None:
    assert reading.deliver() == expected
    copy = reading.cache / SHARD
    original = copy.read_bytes()
    copy.write_bytes(change(original))
    assert reading.deliver() == expected
    assert copy.read_bytes() == original


@pytest.mark.parametrize("change", [shortened, flipped, emptied])
def test_a_corrupt_copy_of_the_lengths_is_fetched_again(
    change: Callable[[bytes], bytes], reading: Reading, expected: Delivered
) -> None:
    assert reading.deliver() == expected
    copy = lengths_file(reading.cache)
    original = copy.read_bytes()
    copy.write_bytes(change(original))
    assert reading.deliver() == expected
    assert copy.read_bytes() == original
