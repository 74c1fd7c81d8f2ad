"""Jobs on the CPU that are killed, stopped and resumed, against one that never was.

Steps are of packs with similar work: resumes are inside and between windows (balance), also at the end of an epoch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.jobs import read_run
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log

from tests.conftest import write_tokens
from tests.rounds import rounds
from tests.train.runs import write_run

from .launcher import start_job
from .runs import MODULE, differences, last_step, train, wait_until

JOB_S = 120.0  # for a job to end once it was told to
NUM_KILLS = rounds(2, 10)
OTHER_WORLD = 1e-3  # sums of gradients are of other parts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_tokens(folder / "data", num_samples=480)
    return write_run(folder / "run.yaml", folder / "data", num_train_epochs=2, save_steps=1, balance=5)


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """The output of a run of two processes that was never interrupted, with a checkpoint of each step."""
    output = config.parent / "whole"
    train(config, output, nproc=2)
    return output


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def kill_while_saving(config: Path, output: Path, step: int) -> bool:
    """SIGKILL to all processes once `step` is done and a save is being written; whether it still was."""

    def unfinished() -> bool:
        return any((output / "checkpoints").glob(".step-*.tmp"))

    with start_job(2, MODULE, str(config), f"train.output_dir={output}") as job:
        known = last_step(output)
        wait_until(lambda: last_step(output) > known or last_step(output) >= step, job)
        processes = job.family()  # found now, so that the kill is quick
        wait_until(lambda: last_step(output) >= step and unfinished(), job)
        kill(processes)
    return unfinished()


def test_a_run_killed_again_and_again_while_it_saves_goes_on_bit_by_bit(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    """Random steps and a save in flight each time; every resume follows another, and the last runs to the end."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    last = last_step(whole)
    steps = sorted(rng.choice(np.arange(1, last - 2), size=NUM_KILLS, replace=False).tolist())
    sys.stdout.write(f"seed {seed}: killed after steps {steps} of {last}\n")
    output = tmp_path / "killed"
    in_flight = [kill_while_saving(config, output, step) for step in steps]
    sys.stdout.write(f"a save was unfinished at {in_flight}\n")
    assert any(in_flight)
    train(config, output, nproc=2)
    assert differences(whole, output) == []
    assert len(read_log(output)) >= last
    assert not list((output / "checkpoints").glob(".step-*"))


def test_a_run_goes_on_with_other_numbers_of_ranks(config: Path, whole: Path, tmp_path: Path) -> None:
    """Two to one at an epoch's end; one to two, and two to four as two copies of the model, inside of one."""
    saved = checkpoints(whole / "checkpoints")
    places = [json.loads((path / "trainer.json").read_text())["cursor"]["sources"]["data"] for path in saved]
    epoch_end = 1 + next(i for i, place in enumerate(places) if (place["epoch"], place["packs"]) == (1, 0))
    last = len(saved)
    assert 8 < epoch_end < last - 8
    train(config, tmp_path / "one", f"train.resume={saved[epoch_end - 1]}", nproc=1)
    assert sorted(read_run(tmp_path / "one", name="", tolerance=0).records) == list(range(epoch_end + 1, last + 1))
    assert differences(whole, tmp_path / "one", first_step=epoch_end + 1, tolerance=OTHER_WORLD) == []
    by_one = tmp_path / "one" / "checkpoints" / f"step-{epoch_end + 3:08d}"
    train(config, tmp_path / "two", f"train.resume={by_one}", nproc=2)
    assert differences(whole, tmp_path / "two", first_step=epoch_end + 4, tolerance=OTHER_WORLD) == []
    train(config, tmp_path / "four", f"train.resume={saved[2]}", "train.shard_ranks=2", nproc=4)
    assert differences(whole, tmp_path / "four", first_step=4, tolerance=OTHER_WORLD) == []
    # What the copies of the model wrote is whole for one rank, too.
    by_four = tmp_path / "four" / "checkpoints" / f"step-{last - 2:08d}"
    train(config, tmp_path / "again", f"train.resume={by_four}", nproc=1)
    assert differences(whole, tmp_path / "again", first_step=last - 1, tolerance=OTHER_WORLD) == []


def test_a_truncated_checkpoint_is_passed_over_by_all_ranks(config: Path, whole: Path, tmp_path: Path) -> None:
    output, last = tmp_path / "damaged", last_step(whole)
    for path in checkpoints(whole / "checkpoints")[last - 5 : last - 3]:
        shutil.copytree(path, output / "checkpoints" / path.name)
    newest = checkpoints(output / "checkpoints")[-1] / "__1_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-100])
    said = train(config, output, nproc=2)
    assert said.count(f"{newest} has ") == 1
    assert f"bytes: the checkpoint of step {last - 3} is passed over" in said
    assert min(read_run(output, name="", tolerance=0).records) == last - 3
    assert differences(whole, output, first_step=last - 3) == []


def test_a_run_stopped_by_a_signal_goes_on_from_a_store(
    config: Path, whole: Path, store_folder: str, tmp_path: Path
) -> None:
    """Each rank uploads its own files; the step at which the run was told to stop is saved."""
    output, to_store = tmp_path / "stopped", f"train.checkpoint_dir={store_folder}"
    settings = [f"train.output_dir={output}", to_store, "train.save_steps=4", "train.save_total_limit=1"]
    with start_job(2, MODULE, str(config), *settings) as job:
        wait_until(lambda: last_step(output) >= 5, job)
        job.send_signal(signal.SIGTERM)
        job.wait(JOB_S)
        said = job.stderr.read_text()
    stopped_at = last_step(output)
    storage = open_storage(store_folder)
    names = [found.key for found in storage.list_objects("step-")]
    assert {name.split("/")[0] for name in names} == {f"step-{stopped_at:08d}"}
    assert {"__0_0.distcp", "__1_0.distcp", "complete.json"} <= {name.split("/")[1] for name in names}
    assert "is saved, the same command resumes from it" in said
    train(config, output, to_store, "train.save_steps=0", nproc=1)
    assert differences(whole, output, first_step=1, tolerance=OTHER_WORLD) == []
    assert not list(output.rglob("*.distcp"))


def test_a_rank_that_dies_while_it_saves_ends_the_others(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "died"
    with start_job(2, MODULE, str(config), f"train.output_dir={output}") as job:
        wait_until(lambda: last_step(output) >= 2 and checkpoints(output / "checkpoints") != [], job)
        job.processes[1].kill()
        assert job.wait(90) != 0
        assert job.processes[0].exitcode != 0
    assert checkpoints(output / "checkpoints")
