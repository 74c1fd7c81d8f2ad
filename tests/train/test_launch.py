"""`lmms-stream train` with one process: no torchrun, the run's own exit status, and signals that reach it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lmms_stream.train.__main__ import main
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import STOPPED_STATUS
from lmms_stream.train.torchrun import start, starts_again

from ..conftest import run_cli, run_command, write_tokens
from ..processes import running_after
from ..rounds import in_long_rounds, rounds
from .runs import write_small_run

LIMIT_S = 120
ENDS_S = 4.0  # after it has saved; on a machine without other work within 1


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    write_tokens(folder / "data", num_samples=300)
    return write_small_run(folder / "run.yaml", folder / "data", max_steps=2)


@in_long_rounds
def test_one_process_trains_alone_whatever_rank_it_is_started_from(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without the verdict of an earlier start
    done = run_cli("train", str(config), f"train.output_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_log(tmp_path / "out")] == [1, 2]
    assert "torchrun" not in done.stderr
    assert done.stderr.startswith("WORLD_SIZE=4 is not used: this command trains alone")
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("attention: ")]
    assert said.endswith("not flex_attention, which has no backward pass on the CPU") or torch.cuda.is_available()


@in_long_rounds
def test_torchrun_starts_the_commands_run_as_its_ranks(config: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "lmms_stream", "train", str(config), f"train.output_dir={tmp_path / 'out'}"]
    done = run_command(*command, "train.max_steps=1")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_log(tmp_path / "out")] == [1]  # two runs would write it twice
    assert "two runs in one output_dir" not in done.stderr


def test_the_command_becomes_a_rank_of_torchrun_or_a_run_alone(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command of the ranks that tests of jobs start; the kernel's call that replaces a process is noted."""
    calls: list[tuple[Any, ...]] = []

    def note(*call: Any) -> None:
        calls.append(call)
        raise SystemExit

    monkeypatch.setattr(os, "execve", note)
    of_rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "HOME": "here"}
    command = [sys.executable, "-m", "lmms_stream.train", str(config), "train.max_steps=1"]
    for environment, expected in (
        (of_rank | {"TORCHELASTIC_RUN_ID": "job"}, of_rank | {"TORCHELASTIC_RUN_ID": "job"}),
        (of_rank, {"HOME": "here"}),
        ({"HOME": "here"}, {"HOME": "here"}),
    ):
        with pytest.raises(SystemExit):
            start(config, ["train.max_steps=1"], nproc=None, environment=environment)
        assert calls.pop() == (sys.executable, command, expected)
        is_told = "WORLD_SIZE=2 is not used: this command trains alone" in capsys.readouterr().err
        assert is_told == (environment is of_rank)


@pytest.mark.parametrize("command", [["train", "--nproc", "2"], ["profile"]])
def test_commands_that_start_ranks_of_their_own_are_refused_in_torchrun(
    command: list[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    done = run_cli(*command, str(config))
    assert done.returncode != 0
    assert done.stderr.startswith("error: torchrun started this command as rank 3 of 4: ")


def test_the_command_that_becomes_a_run_loads_no_torch() -> None:
    script = "import sys, lmms_stream.cli.main, lmms_stream.train.torchrun; print(*sys.modules)"
    done = run_command(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "lmms_stream.train.torchrun" in done.stdout.split()
    assert not {*done.stdout.split()} & {"torch", "transformers", "streaming"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--standalone --nproc-per-node=2 -m lmms_stream.train run.yaml", False),
        ("--nnodes 2 --max-restarts=0 -m lmms_stream.train run.yaml", False),
        ("--nnodes 2 -m lmms_stream.train run.yaml --max-restarts=3", False),
        ("--nnodes 2 --max-restarts 3 -m lmms_stream.train run.yaml", True),
        ("--nnodes=2 --max_restarts=3 -m lmms_stream.train run.yaml", True),
        ("--nnodes 1:2 -m lmms_stream.train run.yaml", True),
    ],
)
def test_ranks_that_may_be_started_again_are_known_by_the_arguments_of_torchrun(arguments: str, expected: bool) -> None:
    assert starts_again(arguments.split()) is expected


def test_a_process_that_ends_without_freeing_its_memory_does_all_else_as_others_do() -> None:
    script = """
import atexit, sys, threading, time
from lmms_stream.processes.family import end_process

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.3), print("the thread has ended"))).start()
sys.stdout.write("said\\n")
sys.stderr.write("warned")
end_process(7)
"""
    done = run_command(sys.executable, "-c", script)
    assert (done.returncode, done.stderr) == (7, "warned")
    assert done.stdout.splitlines() == ["said", "the thread has ended", "at exit"]


def test_a_run_leaves_the_garbage_collector_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.yaml")]) == 1
    assert "no such config file" in capsys.readouterr().err
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_of_one_process_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config), "train.smell=1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "unknown key 'train.smell'" in line


TOLD = [
    (signal.SIGINT, True, 1),  # Ctrl-C in a terminal, which sends it to all processes of the command
    (signal.SIGTERM, False, 1),
    (signal.SIGINT, False, 1),
    (signal.SIGINT, True, 2),
    (signal.SIGINT, False, 2),
    (signal.SIGTERM, False, 2),
    (signal.SIGUSR1, False, 1),
]


@pytest.mark.parametrize(("number", "is_to_all", "nproc"), TOLD[: rounds(1, len(TOLD))])
def test_a_run_that_is_told_to_stop_saves_ends_its_workers_and_says_what_resumes_it(
    number: signal.Signals,
    is_to_all: bool,
    nproc: int,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains alone, whatever rank it is started from."""
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without the verdict of an earlier start
    output = tmp_path / "out"
    with training(config, output, "train.num_workers=2", nproc=nproc) as job:
        started = psutil.Process(job.pid).children(recursive=True)
        (os.killpg if is_to_all else os.kill)(job.pid, number)
        _, said = job.communicate(timeout=LIMIT_S)
        assert running_after(started, 2) == []
    ended_at = time.time()
    step = read_log(output)[-1]["step"]
    assert said.count(f"told to stop by a signal: step {step} is saved, the same command resumes from it\n") == 1
    assert said.count("interrupted: a checkpoint is saved after this step") == (number == signal.SIGINT)
    assert "Traceback" not in said
    assert said.startswith("WORLD_SIZE=4 is not used: this command trains alone")
    (line,) = [line for line in said.splitlines() if line.startswith("attention: ")]
    assert line.endswith("not flex_attention, which has no backward pass on the CPU") or torch.cuda.is_available()
    assert ("torchrun" in said) == (nproc > 1)
    assert job.returncode == (STOPPED_STATUS if nproc == 1 else 1)
    latest = checkpoints(output / "checkpoints")[-1]
    assert latest.name == f"step-{step:08d}"
    assert ended_at - latest.stat().st_mtime < ENDS_S


@in_long_rounds
def test_a_second_interrupt_ends_a_run_that_waits_for_data(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=500, longest=250)
    config, output = write_small_run(tmp_path / "run.yaml", tmp_path / "data"), tmp_path / "out"
    with training(config, output, "train.num_workers=1") as job:
        started = psutil.Process(job.pid).children(recursive=True)
        (worker,) = [each for each in started if each.ppid() != job.pid]
        worker.suspend()
        num_steps = -1
        while num_steps < (num_steps := len(read_log(output))):
            time.sleep(2)
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(3)
        os.killpg(job.pid, signal.SIGINT)
        _, said = job.communicate(timeout=10)
        assert running_after(started, 2) == []
    assert job.returncode == 130
    assert said.endswith(
        "interrupted, nothing was saved: the same command resumes from the latest checkpoint, if any\n"
    )
    assert "Traceback" not in said


@in_long_rounds
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_interrupt_while_a_run_imports_is_one_line(nproc: int, config: Path, tmp_path: Path) -> None:
    with training(config, tmp_path / "out", nproc=nproc, num_steps=0) as job:
        while not any("libtorch" in each.path for each in psutil.Process(job.pid).memory_maps()):
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGINT)
        _, said = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130
    (line,) = said.splitlines()
    assert line.startswith("interrupted")


@contextmanager
def training(
    config: Path, output: Path, *overrides: str, nproc: int = 1, num_steps: int = 2
) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, once it has logged some steps; nothing of it is left at the end."""
    settings = [f"train.output_dir={output}", "train.max_steps=4000", *overrides]
    command = [sys.executable, "-m", "lmms_stream", "train", str(config), *settings, "--nproc", str(nproc)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            deadline = time.monotonic() + LIMIT_S
            while len(read_log(output)) < num_steps:
                assert time.monotonic() < deadline
                assert job.poll() is None, job.stderr and job.stderr.read()
                time.sleep(0.05)
            yield job
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
