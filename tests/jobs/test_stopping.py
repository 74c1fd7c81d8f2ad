"""Runs that are told to stop, that fail on one rank, or that meet gradients that are not finite."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import history, read_log
from lmms_stream.train.run.distributed import STOPPED_STATUS

from tests.conftest import last_words, run_command, write_tokens
from tests.rounds import LONG, in_long_rounds
from tests.train.answers import pairs, write_answers
from tests.train.runs import write_run

from ..processes import ROOT, Job
from .launcher import run_job, start_job
from .runs import MODULE, differences, train, wait_until, with_one_layer
from .torchrun import start, train_command

LIMIT_S = 120


def write_tiny_run(folder: Path, **train: Any) -> Path:
    """The config of a run whose two ranks have a pack each in a step."""
    write_tokens(folder / "data", num_samples=300)
    return with_one_layer(write_run(folder / "run.yaml", folder / "data", **{"global_batch": 2, **train}))


@contextmanager
def running(config: Path, output: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Real torchrun with two ranks, which has logged two steps by now."""
    before = len(read_log(output))
    with start(train_command(config, output, *overrides, nproc=2)) as job:
        deadline = time.monotonic() + LIMIT_S
        while len(read_log(output)) < before + 2:
            assert time.monotonic() < deadline
            assert job.poll() is None, job.stdout and job.stdout.read()
            time.sleep(0.05)
        yield job


@contextmanager
def forked(config: Path, output: Path, *overrides: str) -> Iterator[Job]:
    """Two forked ranks, which have logged two steps by now."""
    before = len(read_log(output))
    with start_job(2, MODULE, str(config), f"train.output_dir={output}", *overrides) as ranks:
        wait_until(lambda: len(read_log(output)) >= before + 2, ranks)
        yield ranks


def stop_torchrun(config: Path, output: Path) -> str:
    """What a run says that is told to stop after some steps."""
    with running(config, output) as job:
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    return said


def stop_ranks(config: Path, output: Path) -> str:
    with forked(config, output) as ranks:
        ranks.send_signal(signal.SIGTERM)
        assert ranks.wait(LIMIT_S) == STOPPED_STATUS
        assert [rank.exitcode for rank in ranks.processes] == [STOPPED_STATUS] * 2
        return ranks.stderr.read_text()


def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(tmp_path: Path) -> None:
    """In long rounds torchrun is stopped first, and the resumed run again; loader workers read for both."""
    config = write_tiny_run(tmp_path, max_steps=4000, num_workers=1)
    saved = []
    for stop in (stop_torchrun, stop_ranks) if LONG else (stop_ranks,):
        output = stop(config, tmp_path / "out")
        assert "told to stop by a signal: step " in output
        step = max(record["step"] for record in read_log(tmp_path / "out"))
        saved.append(step)
        assert checkpoints(tmp_path / "out" / "checkpoints")[-1].name == f"step-{step:08d}"
    train(config, tmp_path / "out", f"train.max_steps={saved[-1] + 2}", "train.lr_scheduler_type=constant")
    others = (f"train.max_steps={saved[-1] + 2}", "train.num_workers=0")
    train(config, tmp_path / "whole", *others, "train.lr_scheduler_type=constant", nproc=1)
    assert saved[0] >= 2
    assert saved == sorted(set(saved))
    last = saved[-1] + 2
    assert differences(tmp_path / "whole", tmp_path / "out", last_step=last, tolerance=float("inf")) == []


def test_all_ranks_leave_an_evaluation_in_which_one_of_them_is_told_to_stop(tmp_path: Path) -> None:
    """After the same pack, with a checkpoint, and a resume by another number of ranks begins with the evaluation."""
    held_out = {"remote": str(tmp_path / "data")}
    config = write_tiny_run(tmp_path, max_steps=4, eval_steps=2, save_steps=2, eval_dataset=held_out)
    output = tmp_path / "out"
    done = run_job(2, "tests.jobs.told_job", str(config), f"train.output_dir={output}", timeout_s=LIMIT_S)
    assert done.returncode == STOPPED_STATUS, last_words(done.stderr)
    for rank in range(2):
        assert f"rank {rank}, 3 packs: told to stop by a signal: step 2 is saved, the same command" in done.stderr
    train(config, output, nproc=1)
    evaluated = [record["step"] for record in read_log(output) if "eval_loss" in record]
    assert evaluated == [2, 4]


@in_long_rounds
def test_a_run_that_is_stopped_in_any_long_phase_resumes_by_the_same_command(tmp_path: Path) -> None:
    """Real torchrun, whose ranks begin anew: in turn while a run measures, proves, evaluates and exports."""
    stops = {"measure": "before the first step", "prove": "before the first step", "evaluate": "step 2 is saved",
             "export": "step-00000004 is saved, and the same command exports it"}  # fmt: skip

    def run(name: str, phase: str = "none") -> tuple[int, str]:
        if not (tmp_path / name).exists():
            write_answers(tmp_path / name / "data", pairs(12))
        torchrun = [sys.executable, "-m", "lmms_stream.train.torchrun", "--standalone", "--nproc-per-node", "2", "-m"]
        job = [*torchrun, "tests.jobs.phases_job", str(tmp_path / name), str(tmp_path / name / "out"), phase]
        with start(job) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def losses(name: str) -> list[list[tuple[int, float]]]:
        """Of steps and of evaluations; the start that exports evaluates the last step again."""
        names = zip(("loss", "eval_loss"), history(read_log(tmp_path / name / "out")), strict=True)
        return [[(each["step"], each[loss]) for each in records] for loss, records in names]

    for phase, says in stops.items():
        status, said = run("stopped", phase)
        assert (status, says in said) == (STOPPED_STATUS, True), said
        assert not (tmp_path / "stopped" / "out" / "export").exists()
    for name in ("stopped", "whole"):
        status, said = run(name)
        assert status == 0, said
        assert (tmp_path / name / "out" / "export" / "model.safetensors").exists()
    assert [[step for step, _ in each] for each in losses("whole")] == [[1, 2, 3, 4], [2, 4]]
    assert losses("stopped") == losses("whole")


@in_long_rounds
def test_a_run_of_several_ranks_saves_when_its_command_gets_the_signal_of_a_scheduler(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, max_steps=4000)
    with running(config, tmp_path / "out") as job:
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == STOPPED_STATUS
    step = max(record["step"] for record in read_log(tmp_path / "out"))
    assert f"told to stop by a signal: step {step} is saved" in output
    assert "torchrun: the ranks were told to stop, and have saved" in output
    assert [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")] == [f"step-{step:08d}"]


def worker_of(rank: psutil.Process) -> psutil.Process:
    """A loader worker of a rank, which its server forked; between two epochs there is none for a moment."""
    while True:
        for child in rank.children(recursive=True):
            if child.ppid() != rank.pid and child.status() != psutil.STATUS_ZOMBIE:
                return child
        time.sleep(0.01)


def test_an_error_of_one_rank_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, max_steps=4000, num_workers=1)
    with forked(config, tmp_path / "out", "train.timeout_s=60") as ranks:
        worker_of(psutil.Process(ranks.processes[0].pid)).kill()
        assert ranks.wait(LIMIT_S) == 1
        assert "a loader worker died" in ranks.stderr.read_text()


@in_long_rounds
def test_a_rank_that_stands_still_ends_the_job_when_the_others_have_waited_long_enough(
    tmp_path: Path,
) -> None:
    config = write_tiny_run(tmp_path, max_steps=4000)
    with forked(config, tmp_path / "out", "train.timeout_s=20") as ranks:
        psutil.Process(ranks.processes[1].pid).suspend()
        assert ranks.wait(LIMIT_S) == 1
        (line,) = [line for line in ranks.stderr.read_text().splitlines() if line.startswith("error: ")]
    waited = r"error: rank [01] waited for another rank, which ended or was silent for 20 s \(.*Timed out.*\): look for"
    assert re.match(waited, line)


FAILING = "tests.jobs.failing_job"


def test_an_unforeseen_error_of_one_rank_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    """Long before the time limit of collectives. The record of the step before waits for the next step, and is lost."""
    config = write_tiny_run(tmp_path, max_steps=400, timeout_s=600)
    with start_job(2, FAILING, str(config), f"train.output_dir={tmp_path / 'out'}") as ranks:
        assert ranks.wait(LIMIT_S) != 0
        assert ranks.processes[1].exitcode == 1
        said = ranks.stderr.read_text()
    assert [record["step"] for record in read_log(tmp_path / "out")] == [1]
    assert "in fail_on_rank_1\n" in said
    assert "ZeroDivisionError: rank 1 fails here" in said


@in_long_rounds
def test_a_proof_in_which_the_memory_of_one_rank_runs_out_ends_all_ranks_with_its_error(tmp_path: Path) -> None:
    """Within the limit, although the other ranks wait in the collectives of a sharded model."""
    config = write_tiny_run(tmp_path, max_steps=1, timeout_s=20)
    with start_job(2, FAILING, str(config), f"train.output_dir={tmp_path / 'out'}", "proof") as ranks:
        assert ranks.wait(LIMIT_S) != 0
        said = ranks.stderr.read_text()
    assert "the model does not run on packs (out of memory) on rank 1, and other ranks do not answer" in said
    assert "rank 1 ended with ConfigError: the model does not run on packs (out of memory)" in said


@in_long_rounds
def test_torchrun_reports_the_traceback_of_an_unforeseen_error_of_one_rank(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, max_steps=400, timeout_s=600)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", FAILING]
    done = run_command(*torchrun, str(config), f"train.output_dir={tmp_path / 'out'}", timeout_s=LIMIT_S, cwd=ROOT)
    assert done.returncode == 1, last_words(done.stderr)
    assert [record["step"] for record in read_log(tmp_path / "out")] == [1, 2]
    assert "in fail_on_rank_1\n" in done.stderr
    assert "ZeroDivisionError: rank 1 fails here" in done.stderr.partition("ChildFailedError")[0]
    assert re.search(r"exitcode +: 1 .*\n.*\n +traceback : Traceback .*(\n.*)*rank 1 fails here", done.stderr)


@pytest.mark.parametrize("allowed", [10, 1])
def test_gradients_that_are_not_finite_are_passed_over_up_to_a_limit(tmp_path: Path, allowed: int) -> None:
    config = write_tiny_run(tmp_path, max_steps=3)
    settings = ["train.learning_rate=1e38", "train.lr_scheduler_type=constant", f"train.max_skipped_steps={allowed}"]
    output = f"train.output_dir={tmp_path / 'out'}"
    done = run_job(2, MODULE, str(config), output, *settings, timeout_s=LIMIT_S)
    log = read_log(tmp_path / "out")
    if allowed == 10:
        assert done.returncode == 0, done.stderr
        assert [record["num_skipped_steps"] for record in log] == [0, 1, 2]
    else:
        assert done.returncode == 1
        assert "error: the gradient norm is nan at step 3, the 2th time: lower learning_rate, or raise" in done.stderr
        assert len(log) == 2
