"""`lmms-stream train` with one process: no torchrun, the run's own exit status, and signals that reach it."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lmms_stream.train.__main__ import main
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import STOPPED_STATUS
from lmms_stream.train.torchrun import starts_again

from ..conftest import run_cli, run_command, write_tokens
from ..rounds import in_long_rounds, rounds
from .runs import write_run

LIMIT_S = 120


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    write_tokens(folder / "data", num_samples=300)
    return write_run(folder / "run.yaml", folder / "data", max_steps=2)


def test_one_process_trains_alone_whatever_rank_it_is_started_from(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    done = run_cli("train", str(config), f"train.output_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_log(tmp_path / "out")] == [1, 2]
    assert "torchrun" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("attention: ")]
    assert said.endswith("not flex_attention, which has no backward pass on the CPU") or torch.cuda.is_available()


def test_the_command_that_becomes_a_run_loads_no_torch() -> None:
    script = "import sys, lmms_stream.cli.main, lmms_stream.train.launch; print(*sys.modules)"
    done = run_command(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "lmms_stream.train.launch" in done.stdout.split()
    assert not {*done.stdout.split()} & {"torch", "transformers", "streaming", "numba"}


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
from lmms_stream.processes.ending import end_process

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


def test_an_error_of_one_process_is_one_line(config: Path) -> None:
    done = run_cli("train", str(config), "train.smell=1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "unknown key 'train.smell'" in line


@in_long_rounds
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1][: rounds(1, 2)])
def test_one_process_that_is_told_to_stop_saves_and_says_so_by_its_status(
    number: signal.Signals, config: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = ["train", str(config), f"train.output_dir={output}", "train.max_steps=4000"]
    command = [sys.executable, "-m", "lmms_stream", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + LIMIT_S
            while len(read_log(output)) < 2:
                assert time.monotonic() < deadline
                assert job.poll() is None, job.stderr and job.stderr.read()
                time.sleep(0.05)
            job.send_signal(number)
            _, told = job.communicate(timeout=60)
        finally:
            job.kill()
    step = read_log(output)[-1]["step"]
    assert f"told to stop by a signal: step {step} is saved, the same command goes on" in told
    assert job.returncode == STOPPED_STATUS
    assert checkpoints(output / "checkpoints")[-1].name == f"step-{step:08d}"
