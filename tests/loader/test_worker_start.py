"""Loader workers that their fork leaves stuck, each case in a process of its own: pytest has threads that it needs."""

from __future__ import annotations

from pathlib import Path

from ..conftest import write_tokens
from ..processes import run_module

SCRIPT = """
import mmap, os, sys, time
from lmms_stream.loader import workers
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.errors import WorkerError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor

folder, num_stuck = sys.argv[1], int(sys.argv[2])
left = mmap.mmap(-1, 1)  # forks that get stuck, of all processes
left[0] = num_stuck

def stick():
    if left[0]:
        left[0] -= 1
        time.sleep(10_000)

os.register_at_fork(after_in_child=stick)
workers.WAITS_S = (1.0, 2.0, 20.0)

def ids(num_workers, **options):
    packing = PackingConfig(packing_length=256)
    dataset = PackedDataset([StreamConfig(remote=folder)], processor=TokensProcessor(), packing=packing)
    loader = PackedLoader(dataset, global_batch=4, num_workers=num_workers, timeout_s=60, **options)
    return [[batch.sample_ids.tolist() for batch in loader] for _ in range(2)]
"""


def run(script: str, folder: Path, *, num_stuck: int) -> str:
    program = folder.with_suffix(".py")
    program.write_text(SCRIPT + script)
    result = run_module(str(program), str(folder), str(num_stuck), timeout_s=120)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_a_worker_that_its_fork_leaves_stuck_is_started_again(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=300)
    script = """
found, kept = ids(2), None
assert left[0] == 0
left[0] = 1
kept = ids(2, persistent_workers=True)
assert left[0] == 0
assert found == kept == ids(0)
assert len(found[0]) > 8 and found[0] != found[1]
"""
    told = run(script, tmp_path / "data", num_stuck=3)
    assert "2 loader workers did not begin within 1 s of their fork, they are killed" in told


def test_workers_that_are_stuck_again_and_again_are_an_error(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=30)
    script = """
workers.WAITS_S = (0.5, 0.5, 0.5)
try:
    ids(1)
except WorkerError as error:
    assert "1 loader workers did not begin within 0.5 s of their fork, 3 times: is the machine" in str(error), error
else:
    raise AssertionError("it began")
assert left[0] == 97
"""
    run(script, tmp_path / "data", num_stuck=100)
