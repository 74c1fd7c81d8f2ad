"""Real torchrun on the CPU, through `lmms-stream train`: killed with all its processes, and started again.

In short rounds the demo's test does that.
"""

from __future__ import annotations

import time
from pathlib import Path

from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.storage import open_storage
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words

from ..rounds import in_long_rounds
from .runs import JOB_S, differences, last_step, train, write_chat_run
from .torchrun import family, kill, start, train_command

STEPS, KILL_AT = 6, 3


@in_long_rounds
def test_a_killed_run_goes_on_bit_by_bit(
    dataset_folder: Path, tokenizer: Path, store_folder: str, tmp_path: Path
) -> None:
    """From a store, each run with a cache of its own; against it, one on forked ranks that was never killed."""
    remote = store_folder
    for path in dataset_folder.rglob("*"):
        if path.is_file():
            open_storage(remote).upload(path, str(path.relative_to(dataset_folder)))
    assert len(PackedStreamingDataset(remote, tmp_path / "look")) > 0
    settings = {"max_steps": STEPS, "save_steps": 2, "save_total_limit": 2}
    config = write_chat_run(tmp_path / "run.yaml", remote, tokenizer, **settings)
    train(config, tmp_path / "whole", f"dataset.local={tmp_path / 'whole' / 'cache'}")
    output = tmp_path / "killed"
    command = train_command(config, output, f"dataset.local={output / 'cache'}", nproc=2)
    with start(command) as job:
        deadline = time.monotonic() + JOB_S
        while last_step(output) < KILL_AT:
            assert job.poll() is None, job.stdout and last_words(job.stdout.read())
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = family(job)
        assert len([each for each in processes if "lmms_stream.train" in each.cmdline()]) >= 3  # torchrun and ranks
        kill(processes)
    killed_at = last_step(output)
    assert KILL_AT <= killed_at < STEPS
    with start(command) as job:
        said, _ = job.communicate(timeout=JOB_S)
        assert job.returncode == 0, last_words(said)
    assert differences(tmp_path / "whole", output) == []
    assert len(read_log(output)) > STEPS or killed_at % 2 == 0
    assert [path.name for path in checkpoints(output / "checkpoints")] == ["step-00000004", "step-00000006"]
