"""What a loader and its workers read of a dataset that lies in a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig

from ..conftest import TokensAndSpans, write_samples

SHARD_BYTES = 1 << 21
NUM_SAMPLES = 5200


def bytes_read() -> int:
    """What this process, and those of its children that have ended, read by system calls so far."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of ten shards with checksums; what is known of them begins with this test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_samples(tmp_path / "small", samples(10))
    iterate(tmp_path / "small", num_workers=0, epochs=1)  # loads the compiled loops
    write_samples(tmp_path / "data", samples(NUM_SAMPLES), shard_bytes=SHARD_BYTES)
    return tmp_path / "data"


def samples(count: int) -> Iterator[TokensAndSpans]:
    for number in range(count):
        yield np.full(1000, number, np.int32), np.array([[0, 1000]], np.int32)


def iterate(folder: Path, *, num_workers: int, epochs: int) -> int:
    """Bytes that a run over some epochs reads."""
    before = bytes_read()
    dataset = PackedStreamingDataset(
        folder,
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=4000),
        fetch=FetchConfig(timeout_s=60),
    )
    loader = PackedLoader(dataset, global_batch=10, num_workers=num_workers, timeout_s=60)
    for _ in range(epochs):
        assert sum(len(batch.sample_ids) for batch in loader) == len(dataset)
    return bytes_read() - before


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_shards_of_a_local_dataset_are_read_through_once_for_all_workers_epochs_and_runs(folder: Path) -> None:
    shards = sorted(folder.glob("shard.*.mds"))
    total = sum(path.stat().st_size for path in shards)
    assert len(shards) == 10
    slack = total // 3  # of what else is read: indexes, records, what workers hand over
    assert total <= iterate(folder, num_workers=4, epochs=2) < total + slack
    assert iterate(folder, num_workers=0, epochs=1) < slack
    data = shards[3].read_bytes()
    shards[3].write_bytes(data)  # as a new version of the file: it is read through again, and it alone
    assert len(data) <= iterate(folder, num_workers=2, epochs=1) < len(data) + slack


def test_a_local_shard_that_is_damaged_after_it_was_read_through_is_an_error_of_the_next_run(folder: Path) -> None:
    iterate(folder, num_workers=0, epochs=1)
    path = folder / "shard.00003.mds"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"shard\.00003\.mds: what was downloaded does not match the size or checksum"):
        iterate(folder, num_workers=0, epochs=1)
