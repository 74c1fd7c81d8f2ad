"""Forked ranks are what torchrun's ranks are: their environment, their exit statuses, how they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import last_words, run_command

from ..processes import ROOT, run_module
from .launcher import run_job, start_job
from .runs import wait_until

JOB = "tests.jobs.environment_job"
OF_THE_JOB = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
OF_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "_"}  # of its own process; "_" is the shell's


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What each rank told of itself, by rank."""
    assert done.returncode == 0, last_words(done.stderr)
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(ranks, key=lambda rank: int(rank["environment"]["RANK"]))


def test_forked_ranks_are_given_what_torchrun_gives() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", JOB]
    expected, ours = told(run_command(*torchrun, cwd=ROOT)), told(run_job(2, JOB, timeout_s=60))
    assert len(expected) == len(ours) == 2
    for theirs, rank in zip(expected, ours, strict=True):
        environments = [theirs.pop("environment"), rank.pop("environment")]
        assert set(environments[0]) - OF_TORCHRUN == set(environments[1]) - OF_TORCHRUN
        assert rank == theirs
        for name in OF_THE_JOB | OF_TORCHRUN:
            for environment in environments:
                environment.pop(name, None)
        assert environments[0] == environments[1]


def test_the_server_that_forks_ranks_has_one_thread() -> None:
    run_module(JOB, timeout_s=60)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1


def test_the_exit_status_of_a_job_is_that_of_the_rank_that_ended() -> None:
    assert run_job(2, JOB, str(int(signal.SIGKILL)), timeout_s=60).returncode == -signal.SIGKILL
    done = run_module("tests.jobs.no_such_module", timeout_s=60)
    assert done.returncode == 1
    assert "No module named tests.jobs.no_such_module" in done.stderr
    usage = run_module("lmms_stream.train", timeout_s=60)
    assert (usage.returncode, usage.stdout[:6]) == (2, "usage:")
    assert "RANK" not in os.environ


def test_a_rank_that_fails_ends_the_others_and_a_job_that_is_not_over_in_time_is_ended() -> None:
    with start_job(2, "tests.jobs.waiting_job", "600") as job:
        wait_until(lambda: job.stdout.read_text().count("waiting\n") == 2, job)
        with pytest.raises(subprocess.TimeoutExpired, match="most recent call first"):
            job.wait(0.1)
        one, other = job.processes
        one.kill()
        assert job.wait(60) == -signal.SIGKILL
        assert other.exitcode == -signal.SIGTERM
    with start_job(1, "tests.jobs.waiting_job", "600") as job:
        (process,) = job.family()
    assert not process.is_running()
