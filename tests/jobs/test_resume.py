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
from typing import Any

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
from .runs import MODULE, differences, last_step, steps_of, train, wait_until, with_one_layer

JOB_S = 120.0  # for a job to end once it was told to
NUM_KILLS = rounds(2, 10)
OTHER_WORLD = 1e-3  # sums of gradients are of other parts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_tokens(folder / "data", num_samples=240)
    schedule = {"lr_scheduler_type": "inverse_sqrt", "warmup": 2}  # of a step alone, wherever a run ends
    settings: dict[str, Any] = {"num_train_epochs": 2, "save_steps": 1, "balance": 5, "global_batch": 4, **schedule}
    return with_one_layer(write_run(folder / "run.yaml", folder / "data", **settings))


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
        wait_until(lambda: last_step(output) > known and last_step(output) >= step, job)
        processes = job.family()  # found now, so that the kill is quick
        wait_until(unfinished, job, poll_s=0.001)
        kill(processes)
    return unfinished()


def test_a_run_killed_again_and_again_while_it_saves_goes_on_bit_by_bit(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    """Random steps and a save in flight each time; every resume follows another, and the last runs to the end."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    last = last_step(whole)
    steps = sorted(rng.choice(np.arange(1, last - 8), size=NUM_KILLS, replace=False).tolist())
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
    """Two to one at an epoch's end; one to two, inside of one, and two to four as two copies of the model, over one."""
    saved = checkpoints(whole / "checkpoints")
    places = [json.loads((path / "trainer.json").read_text())["cursor"]["sources"]["data"] for path in saved]
    epoch_end = 1 + next(i for i, place in enumerate(places) if (place["epoch"], place["packs"]) == (1, 0))
    assert 8 < epoch_end < len(saved) - 8

    def resume(name: str, checkpoint: Path, *settings: str, last: int, nproc: int) -> Path:
        """The output of a run from a checkpoint to step `last`, whose steps are those of the whole run."""
        first = int(checkpoint.name.removeprefix("step-")) + 1
        end = ("train.num_train_epochs=null", f"train.max_steps={last}")
        train(config, tmp_path / name, f"train.resume={checkpoint}", *end, *settings, nproc=nproc)
        assert steps_of(tmp_path / name) == list(range(first, last + 1))
        compared = {"first_step": first, "last_step": last, "tolerance": OTHER_WORLD}
        assert differences(whole, tmp_path / name, **compared) == []  # type: ignore[arg-type]
        return tmp_path / name / "checkpoints" / f"step-{last:08d}"

    by_one = resume("one", saved[epoch_end - 1], last=epoch_end + 3, nproc=1)
    resume("two", by_one, last=epoch_end + 5, nproc=2)
    by_four = resume("four", saved[epoch_end - 3], "train.shard_ranks=2", last=epoch_end + 2, nproc=4)
    resume("again", by_four, last=epoch_end + 4, nproc=1)  # what the copies of the model wrote is whole


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
    endless = ("train.num_train_epochs=null", "train.max_steps=4000")  # so that the signal comes before its end
    settings = [f"train.output_dir={output}", to_store, "train.save_steps=4", "train.save_total_limit=1", *endless]
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
    last = ("train.num_train_epochs=null", f"train.max_steps={stopped_at + 3}")
    train(config, output, to_store, "train.save_steps=0", *last, nproc=1)
    assert steps_of(output) == [*range(1, stopped_at + 4)]
    compared = min(stopped_at + 3, last_step(whole))
    assert differences(whole, output, last_step=compared, tolerance=OTHER_WORLD) == []
    assert not list(output.rglob("*.distcp"))


def test_a_rank_that_dies_while_it_saves_ends_the_others(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "died"
    with start_job(2, MODULE, str(config), f"train.output_dir={output}") as job:
        wait_until(lambda: last_step(output) >= 2 and checkpoints(output / "checkpoints") != [], job)
        job.processes[1].kill()
        assert job.wait(90) != 0
        assert job.processes[0].exitcode != 0
    assert checkpoints(output / "checkpoints")
