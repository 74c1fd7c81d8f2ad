"""packing_mode "auto": a dataset without a lengths index is measured once."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, LengthsError, WorkerError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds import auto
from lmms_stream.mds.auto import Limits, ensure_lengths
from lmms_stream.mds.measuring import lock_folder
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processes.interpreter import call_in_interpreter
from lmms_stream.processes.pool import obstacle
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.locks import locked
from lmms_stream.types import World

from ..conftest import write_tokens
from ..processes import ENVIRONMENT, ROOT
from ..rounds import in_long_rounds, rounds
from .auto_job import Logged, breaks, dies, fails, stored_dataset, tells_of_it
from .test_plain_datasets import read_only

NUM_SAMPLES = 200
LIMIT_S = 120.0
SOON = Limits(begin_s=0.2, end_s=0.4)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default cache folders of this process and of those that it starts lie in a folder of the test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        said, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, said, errors


def start_ranks(*arguments: str, world_size: int = 2) -> list[subprocess.Popen[str]]:
    shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [start("-m", "tests.mds.auto_job", *arguments, RANK=str(rank), **shared) for rank in range(world_size)]


def test_a_loop_over_a_dataset_without_an_index_ends_after_an_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmms_stream")
    lengths = write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    for _ in range(2):
        dataset = PackedStreamingDataset(
            tmp_path / "data", processor=TokensProcessor(), packing=PackingConfig(packing_length=256)
        )
        loader = PackedLoader(dataset, global_batch=2)
        found = [number for batch in loader for number in batch.sample_ids.tolist()]
        assert sorted(found) == list(range(NUM_SAMPLES))
    assert dataset.length_index().lengths.tolist() == lengths.tolist()
    first, second = [record.getMessage() for record in caplog.records]
    assert first.endswith(f"data has no lengths index for this processor: measuring its {NUM_SAMPLES} samples, once")
    assert second.startswith(f"measured {NUM_SAMPLES} samples, {lengths.sum()} tokens in ")
    assert second.endswith(f"s: the lengths index is kept in {tmp_path / 'data'}")


def test_ranks_that_start_at_once_measure_once(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    ranks = start_ranks(str(tmp_path / "data"), str(tmp_path / "log"), world_size=3)
    for status, said, errors in map(end, ranks):
        assert (status, said) == (0, f"{lengths.sum()}\n"), errors
    assert Logged(tmp_path / "log").num_measured == NUM_SAMPLES


def test_runs_of_their_own_that_start_at_once_measure_once(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    job = ("-m", "tests.mds.auto_job", str(tmp_path / "data"), str(tmp_path / "log"))
    for status, said, errors in map(end, [start(*job) for _ in range(2)]):
        assert (status, said) == (0, f"{lengths.sum()}\n"), errors
    assert Logged(tmp_path / "log").num_measured == NUM_SAMPLES


def test_a_run_waits_for_the_command_that_measures_and_measures_what_it_leaves(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    stored, processor = stored_dataset(tmp_path / "data"), Logged(tmp_path / "log")
    locks = lock_folder(stored.url)
    locks.mkdir(parents=True)
    with ThreadPoolExecutor(1) as thread:
        lock = locks / f"{locks.parent.name}-{processor_fingerprint(processor)}.lock"
        with locked(lock, timeout_s=0):  # as lmms-stream index holds it
            waiting = thread.submit(ensure_lengths, stored, processor, world=World())
            time.sleep(0.5)
            assert not processor.num_measured
        waiting.result(timeout=LIMIT_S)
    assert processor.num_measured == NUM_SAMPLES


def test_a_terminal_is_shown_how_far_measuring_is(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    ours, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.mds.auto_job", str(tmp_path / "data"), str(tmp_path / "log")]
    subprocess.run(command, env=environment, stderr=terminal, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S)
    os.close(terminal)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "measuring" in shown
    assert f"{NUM_SAMPLES}/{NUM_SAMPLES}" in shown


def test_what_a_read_only_dataset_was_measured_to_is_kept_on_the_node_until_it_changes(tmp_path: Path) -> None:
    data, processor = tmp_path / "data", Logged(tmp_path / "log")
    lengths = write_tokens(data, num_samples=NUM_SAMPLES, with_index=False)
    before = sorted(data.rglob("*"))
    with read_only(data):
        for _ in range(2):
            stored = stored_dataset(data)
            ensure_lengths(stored, processor, world=World())
            assert stored.length_index(processor).lengths.tolist() == lengths.tolist()
            assert processor.num_measured == NUM_SAMPLES
    assert sorted(data.rglob("*")) == before
    for path in before:
        path.unlink()
    changed = write_tokens(data, num_samples=NUM_SAMPLES + 1, with_index=False)
    with read_only(data):
        stored = stored_dataset(data)
        ensure_lengths(stored, processor, world=World())
        assert stored.length_index(processor).lengths.tolist() == changed.tolist()
    assert processor.num_measured == 2 * NUM_SAMPLES + 1


def test_a_kept_index_that_was_damaged_is_measured_again(tmp_path: Path) -> None:
    data, processor = tmp_path / "data", Logged(tmp_path / "log")
    write_tokens(data, num_samples=NUM_SAMPLES, with_index=False)
    with read_only(data):
        stored = stored_dataset(data)
        ensure_lengths(stored, processor, world=World())
        (kept,) = stored.node_folder.rglob("*.npy")
        kept.write_bytes(kept.read_bytes()[:-4])
        ensure_lengths(stored_dataset(data), processor, world=World())
    assert processor.num_measured == 2 * NUM_SAMPLES


def test_each_node_measures_a_read_only_dataset_for_itself(tmp_path: Path) -> None:
    data, processor = tmp_path / "data", Logged(tmp_path / "log")
    write_tokens(data, num_samples=NUM_SAMPLES, with_index=False)
    first_of_second_node = World(rank=2, world_size=4, num_nodes=2)
    with pytest.raises(
        LengthsError, match=r"no other process wrote one within 0\.4 s: before the run .*write one with lmms-stream"
    ):
        ensure_lengths(stored_dataset(data), processor, world=first_of_second_node, limits=SOON)
    assert not processor.num_measured
    with read_only(data):
        ensure_lengths(stored_dataset(data), processor, world=first_of_second_node, limits=SOON)
        ensure_lengths(stored_dataset(data), processor, world=World(rank=3, world_size=4, num_nodes=2), limits=SOON)
    assert processor.num_measured == NUM_SAMPLES


def test_a_dataset_that_is_too_large_to_measure_is_refused_with_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    write_tokens(data, num_samples=NUM_SAMPLES, with_index=False)
    assert auto.LIMITS.max_samples == 2_000_000
    monkeypatch.setattr(auto, "LIMITS", Limits(max_samples=NUM_SAMPLES - 1))
    dataset = PackedStreamingDataset(data, processor=TokensProcessor(), packing=PackingConfig(packing_length=256))
    message = (
        rf"{data} has 200 samples and no lengths index for this processor, and packing_mode auto measures at most 199: "
        rf'write one with lmms-stream index {data}, or set packing_mode="lanes"'
    )
    with pytest.raises(ConfigError, match=message):
        PackedLoader(dataset, global_batch=2)


def test_ranks_whose_first_one_never_measures_are_told_so(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    with pytest.raises(
        LengthsError, match=r"no other process wrote one within 0\.2 s: before the run .*write one with lmms-stream"
    ):
        ensure_lengths(
            stored_dataset(tmp_path / "data"), TokensProcessor(), world=World(rank=1, world_size=2), limits=SOON
        )


def test_ranks_whose_first_one_dies_while_it_measures_are_told_so(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES, with_index=False)
    ranks = start_ranks(str(tmp_path / "data"), str(tmp_path / "log"), str(NUM_SAMPLES // 2))
    (first, _, _), (second, _, errors) = map(end, ranks)
    assert (first, second) == (3, 1)
    assert "LengthsError: the rank that measured " in errors
    assert (
        "ended before its lengths index was written: see its error, or before the run write one with lmms-str" in errors
    )


SCRIPT = """
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.measuring import lock_folder
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.text import TokensProcessor

{processor}
print("begin")
packing = PackingConfig(packing_length=4096)
dataset = PackedDataset([StreamConfig(remote={folder!r})], processor={name}(), packing=packing)
print(sum(len(batch.sample_ids) for batch in PackedLoader(dataset, global_batch=8)))
"""


@in_long_rounds
@pytest.mark.parametrize("name", ["TokensProcessor", "Own"][: rounds(1, 2)])
def test_a_script_that_does_not_guard_its_main_part_measures_all_the_same(name: str, tmp_path: Path) -> None:
    num_samples = auto._FEW_SAMPLES + 500  # enough for processes, where the processor is not of the script
    lengths = write_tokens(tmp_path / "data", num_samples=num_samples, with_index=False)
    own = "class Own(TokensProcessor):\n    def measure(self, sample):\n        return len(sample['input_ids'])\n"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(processor=own, name=name, folder=str(tmp_path / "data")))
    status, said, errors = end(start(str(script)))
    assert (status, said) == (0, f"begin\n{num_samples}\n"), errors
    (array,) = (tmp_path / "data").rglob("*.npy")
    assert np.array_equal(np.load(array), lengths)


def test_a_call_in_a_process_of_its_own_gives_its_result_progress_and_errors() -> None:
    told: list[int] = []
    assert call_in_interpreter(tells_of_it, on_progress=told.append) != os.getpid()
    assert told == [1, 2]
    with pytest.raises(ConfigError, match="not so"):
        call_in_interpreter(fails, on_progress=told.append)
    with pytest.raises(WorkerError, match=r"KeyError\('a'\)"):
        call_in_interpreter(breaks, on_progress=told.append)
    with pytest.raises(WorkerError, match=r"process \d+ ended \(status 3\) before it was done"):
        call_in_interpreter(dies, on_progress=told.append)


def test_what_is_of_the_running_script_or_cannot_be_pickled_stays_in_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert obstacle(TokensProcessor()) is None
    assert obstacle({"a": "of __main__"}) is None
    assert "cannot be pickled" in str(obstacle(lambda: None))
    own = type("Own", (TokensProcessor,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    assert obstacle(own) == "Own is defined in the program's main module"
