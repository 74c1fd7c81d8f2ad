"""Packs of an epoch are counted once on a node, before workers need them, and little of it is kept."""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds import core
from lmms_stream.mds.core import KEPT_FILES, PackCountsFolder
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan, own_seeds
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig

from ..conftest import write_tokens
from ..processes import Job, start_module
from .logged_counts import LoggedCounts, log_of, small_plan


def open_logged(folder: Path) -> PackedStreamingDataset:
    """A dataset whose plan logs each epoch that is counted."""
    dataset = PackedStreamingDataset(
        folder,
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=256),
        order=OrderConfig(num_canonical_nodes=2, shuffle_block_size=100),
        fetch=FetchConfig(timeout_s=60),
    )
    counts = LoggedCounts(folder / "counts")
    dataset.core.plan = PackPlan(
        dataset.length_index(),
        dataset.samples_per_shard,
        order=dataset.order,
        packing=dataset.core.needed_packing,
        counts_cache=counts,
        counting=counts.counting,
    )
    return dataset


@pytest.fixture
def counted_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of few samples are counted as epochs of many samples are, also in forked workers."""
    monkeypatch.setattr(PackPlan, "is_short", False)


@pytest.mark.usefixtures("counted_as_many")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_each_epoch_of_each_source_is_counted_once_for_the_loader_and_all_its_workers(tmp_path: Path) -> None:
    for name, num_samples in (("a", 600), ("b", 900)):
        write_tokens(tmp_path / name, num_samples=num_samples)
    datasets = {name: open_logged(tmp_path / name) for name in ("a", "b")}
    loader = PackedLoader(
        datasets,
        global_batch=4,
        weights={"a": 1, "b": 1},
        max_epochs={"a": 5, "b": 3},
        num_workers=3,
        start_method="fork",
        timeout_s=60,
    )
    assert sum(len(batch.sample_ids) for batch in loader) == 5 * 600 + 3 * 900
    plans = own_seeds({name: dataset.plan for name, dataset in datasets.items()})
    for name, num_epochs in (("a", 5), ("b", 3)):
        counted = Counter(log_of(tmp_path / name / "counts"))
        keys = [f"{plans[name].fingerprint}-{epoch}" for epoch in range(num_epochs)]
        assert counted == dict.fromkeys([*keys, *(f"{key}-tokens" for key in keys)], 1)


@pytest.mark.usefixtures("counted_as_many")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_loader_has_counted_an_epoch_before_its_workers_begin_it(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", num_samples=600)
    dataset = open_logged(tmp_path / "a")
    loader = PackedLoader(
        dataset, global_batch=4, num_workers=2, timeout_s=60, persistent_workers=True, start_method="fork"
    )
    for epoch in range(3):
        batches = iter(loader)
        next(batches)
        assert log_of(tmp_path / "a" / "counts")[epoch:] == [f"{dataset.plan.fingerprint}-{epoch}"]
        assert len(list(batches)) == len(loader) - 1 or epoch == 2


def test_80_epochs_leave_a_bounded_number_of_files_and_the_last_ones_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "KEPT_FILES", 32)
    plan = small_plan(tmp_path / "counts")
    expected = [plan.num_packs(epoch) for epoch in range(80)]
    assert len(list((tmp_path / "counts").iterdir())) == 32 + 1  # and the log
    assert len(log_of(tmp_path / "counts")) == 80
    resumed = small_plan(tmp_path / "counts")
    assert [resumed.num_packs(epoch) for epoch in (78, 79)] == expected[78:]
    assert len(log_of(tmp_path / "counts")) == 80
    assert resumed.num_packs(3) == expected[3]  # removed, and counted again


def test_counts_that_are_in_use_stay_when_others_are_removed(tmp_path: Path) -> None:
    counts = PackCountsFolder(tmp_path)
    for number in range(KEPT_FILES):
        counts[f"plan-{number}"] = np.array([[number, 0, 0]])
    assert counts["plan-0"].tolist() == [[0, 0, 0]]
    for number in range(5):
        counts[f"other-{number}"] = np.array([[number, 0, 0]])
    assert "plan-0" in counts
    assert "plan-1" not in counts
    assert len(counts) == KEPT_FILES


COUNTS = """
import sys
from pathlib import Path
from tests.loader.logged_counts import small_plan
print(small_plan(Path(sys.argv[1]), pause_s=float(sys.argv[2])).num_packs(0))
"""


def test_of_many_processes_one_counts_and_when_it_is_killed_another_one_does(tmp_path: Path) -> None:
    folder, program = tmp_path / "counts", tmp_path / "program.py"
    program.write_text(COUNTS)

    def count(pause_s: float, num_processes: int) -> AbstractContextManager[Job]:
        return start_module(str(program), [str(folder), str(pause_s)], [{}] * num_processes)

    with count(60, 1) as killed:
        while not list(folder.glob(".*.lock")):
            assert killed.poll() is None
            time.sleep(0.01)
        with count(0.1, 3) as others:
            killed.send_signal(signal.SIGKILL)
            assert killed.wait(20) == -signal.SIGKILL
            result = others.complete(60)
    expected = small_plan(tmp_path / "own").num_packs(0)
    assert [int(line) for line in result.stdout.splitlines()] == [expected] * 3, result.stderr
    assert len(log_of(folder)) == 1
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
