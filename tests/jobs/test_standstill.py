"""Runs of two ranks of which one stands still, in a step, before the first or after the last.

The error names it, and its stacks name the function that it is in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import write_tokens
from tests.proxy import FaultProxy, Rule
from tests.rounds import in_long_rounds
from tests.train.runs import write_run

from .launcher import run_job
from .runs import with_one_layer

JOB = "tests.jobs.standing_job"
TIMEOUT_S = 20  # of collectives: ranks stand still after 15 s
LIMIT_S = 120


def stand_still(tmp_path: Path, how: str, *overrides: str) -> tuple[str, dict[str, str]]:
    """What is said: a line of rank 0 with the error, others behind it; and the files of stacks by their names."""
    write_tokens(tmp_path / "data", num_samples=300)
    settings: dict[str, Any] = {"max_steps": 10, "save_steps": "no", "timeout_s": TIMEOUT_S, "global_batch": 2}
    config = with_one_layer(write_run(tmp_path / "run.yaml", tmp_path / "data", **settings))
    output = f"train.output_dir={tmp_path / 'out'}"
    done = run_job(2, JOB, how, str(config), output, *overrides, timeout_s=LIMIT_S)
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("rank 0: ")]
    return f"{error}\n{done.stderr}", {path.name: path.read_text() for path in (tmp_path / "out" / "stacks").glob("*")}


def test_a_rank_that_sleeps_in_its_data_is_named_with_the_function(tmp_path: Path) -> None:
    said, stacks = stand_still(tmp_path, "sleep")
    assert "TrainingError: rank 0 waited for another rank, which ended or was silent for 20 s (" in said
    assert ": look for the first error of the other ranks, or raise train.timeout_s. rank 0 has not moved" in said
    assert (
        " s, adding up the counts of all ranks in step 3: rank 1 did not come: it has been waiting for data in" in said
    )
    assert " s, in sleep_on_rank_1 (" in said
    assert f"The stacks of each rank are in {tmp_path / 'out' / 'stacks'}" in said
    assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
    assert stacks["rank-1.txt"].startswith("rank 1, waiting for data in step 3, for 1")
    assert "in sleep_on_rank_1\n" in stacks["rank-1.txt"]
    assert "in collate_until_step_2\n" in stacks["rank-1.txt"]
    assert "in agree\n" in stacks["rank-0.txt"]


@in_long_rounds
def test_a_rank_that_is_stopped_is_named_and_the_others_leave_their_stacks(tmp_path: Path) -> None:
    said, stacks = stand_still(tmp_path, "stop")
    assert (
        "in step 3: rank 1 does not answer (it was stopped, is dead, or C code keeps Python's lock); when it was"
        in said
    )
    assert "last heard of, it was " in said
    assert "in agree\n" in stacks["rank-0.txt"]
    assert stacks["rank-1.txt"] == ""


def test_a_rank_that_fails_is_named_with_its_error_by_those_that_waited_for_it(tmp_path: Path) -> None:
    """At once, and no stacks are left."""
    said, stacks = stand_still(tmp_path, "fail")
    assert "or raise train.timeout_s. rank 1 ended with ZeroDivisionError: rank 1 fails here\n" in said
    assert stacks == {}


@in_long_rounds
def test_a_rank_that_stands_still_as_the_model_is_built_is_named(tmp_path: Path) -> None:
    said, stacks = stand_still(tmp_path, "build")
    assert "rank 0 has not moved for 1" in said
    assert " s, building the model: rank 1 did not come: it has been building the model for 1" in said
    assert " s, in sleep_on_rank_1 (" in said
    assert stacks["rank-1.txt"].startswith("rank 1, building the model, for 1")
    assert "in create_optimizer\n" in stacks["rank-1.txt"]


@in_long_rounds
def test_a_rank_that_stands_still_as_it_resumes_is_named(tmp_path: Path) -> None:
    said, stacks = stand_still(tmp_path, "resume")
    assert ": rank 1 did not come: it has been resuming for 1" in said
    assert stacks["rank-1.txt"].startswith("rank 1, resuming, for 1")


@in_long_rounds
def test_a_last_save_that_does_not_end_leaves_the_stacks_of_what_writes_it(
    tmp_path: Path, s3_folder: str, proxy: FaultProxy
) -> None:
    proxy.set_rules(Rule(path=r"__1_\d+\.distcp", method="PUT", hang=True))
    last_save = ("train.max_steps=1", f"train.checkpoint_dir={s3_folder}", "train.save_steps=0")
    said, stacks = stand_still(tmp_path, "disk", *last_save)
    assert "rank 0 has not moved for 1" in said
    assert " s, waiting for the last checkpoint: all ranks wait alike" in said
    assert stacks["rank-1.txt"].startswith("rank 1, waiting for the last checkpoint, for 1")
    assert "in upload\n" in stacks["rank-1.txt"]
    assert "in upload\n" not in stacks["rank-0.txt"]


@in_long_rounds
def test_a_loader_worker_that_sleeps_writes_its_stacks_to_standard_error(tmp_path: Path) -> None:
    said, stacks = stand_still(tmp_path, "sleep", "train.num_workers=1")
    assert "rank 1 did not come: it has been waiting for data in step 3 for " in said
    assert "in sleep_on_rank_1\n" in said
    assert "\nits loader workers write their stacks to standard error: " in stacks["rank-1.txt"]
