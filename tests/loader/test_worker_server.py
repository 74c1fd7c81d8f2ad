"""Workers that are forked from a server: what they have imported, how they end; programs that must not run again."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ..conftest import run_command, write_tokens
from ..processes import Job, run_module, start_module
from ..rounds import LONG, in_long_rounds, rounds

ROOT = Path(__file__).parent.parent.parent

FORK = "from lmms_stream.loader.worker_server import fork_worker_server; fork_worker_server()\n"
PROGRAM = """
import os, sys, time
from pathlib import Path
from lmms_stream import PackedDataset, PackedLoader, PackingConfig
from lmms_stream.mds.streams import StreamConfig
from tests.loader.reporting import Reporting

print("main runs", flush=True)
folder, method = sys.argv[1:3]

def loader(processor, packing_length=64):
    packing = PackingConfig(packing_length=packing_length)
    dataset = PackedDataset([StreamConfig(remote=folder)], processor=processor, packing=packing)
    return PackedLoader(dataset, global_batch=2, num_workers=2, start_method=method, timeout_s=600)
"""


@contextmanager
def started(program: str, folder: Path, method: str, report: Path) -> Iterator[Job]:
    """A program without a guard, as a file of its own, that reads a dataset and reports into a folder."""
    report.mkdir(exist_ok=True)
    path = report / "program.py"
    path.write_text(program)
    environment = {"REPORT_FOLDER": str(report), "PYTHONPATH": str(ROOT)}
    with start_module(str(path), [str(folder), method], [environment]) as job:
        yield job


def run(program: str, folder: Path, method: str, report: Path, *, num_samples: int = 60) -> list[str]:
    """What a program prints after PROGRAM, line by line."""
    write_tokens(folder, num_samples=num_samples)
    with started(program, folder, method, report) as job:
        result = job.complete(120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("method", ["server", *(["forked", "spawn"] if LONG else [])])
def test_a_worker_imports_neither_streaming_nor_models_of_transformers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    (tmp_path / "report").mkdir()
    monkeypatch.setenv("REPORT_FOLDER", str(tmp_path / "report"))
    if method == "forked":  # before anything else, as ranks do, so by an interpreter that starts anew
        script = f"{FORK}from tests.loader import reading_program; reading_program.main()"
        told = run_command(sys.executable, "-c", script, str(tmp_path / "data"), "server")
    else:
        told = run_module("tests.loader.reading_program", str(tmp_path / "data"), method, timeout_s=120)
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) > 20
    reports = [json.loads(path.read_text()) for path in (tmp_path / "report").glob("*.json")]
    assert len(reports) == 2
    for report in reports:
        imported = {name.split(".")[0] for name in report["modules"]}
        assert "torch" in imported
        assert "streaming" not in imported
        assert not [name for name in report["modules"] if name.startswith("transformers.models.")]


def test_workers_of_a_program_without_a_guard_do_not_run_it_again_and_have_its_environment(tmp_path: Path) -> None:
    program = """
first = [batch.sample_ids.tolist() for batch in loader(Reporting())]
os.environ["ADDED"] = "since the server began"
for path in Path(os.environ["REPORT_FOLDER"]).glob("*.json"):
    path.unlink()
assert first == [batch.sample_ids.tolist() for batch in loader(Reporting())]
"""
    assert run(PROGRAM + program, tmp_path / "data", "server", tmp_path / "report") == ["main runs"]
    reports = [json.loads(path.read_text()) for path in (tmp_path / "report").glob("*.json")]
    assert [report["added"] for report in reports] == ["since the server began"] * 2


def test_workers_that_are_given_what_the_main_module_defines_are_forked_as_ever(tmp_path: Path) -> None:
    program = """
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)

class Mine(Reporting):
    pass

assert len(list(loader(Mine()))) > 20
"""
    told = run(PROGRAM + program, tmp_path / "data", "server", tmp_path / "report")
    assert told.count("main runs") == 1
    assert any("Mine is defined in the program's main module" in line for line in told)
    assert len(list((tmp_path / "report").glob("*.json"))) == 2


@pytest.mark.parametrize("method", rounds(["server"], ["server", "spawn"]))
def test_where_the_name_of_the_temporary_folder_is_too_long_for_a_socket_workers_are_forked_or_it_is_said(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    program = """
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
if __name__ == "__main__":
    try:
        print(len(list(loader(Reporting()))), "batches")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
    told = run(PROGRAM + program, tmp_path / "data", method, tmp_path / "report")
    reason = f"the path of a socket, {folder}/pymp-"
    if method == "server":
        assert told[1].startswith(f"loader workers are forked from this process: {reason}")
        assert int(told[2].removesuffix(" batches")) > 20
    else:
        assert told[1].startswith(f"ConfigError: loader workers cannot be started by 'spawn': {reason}")
        assert told[1].endswith(" would be longer than 107 bytes: set TMPDIR to another folder")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM][: rounds(1, 2)])
def test_nothing_is_left_of_a_program_that_is_killed_with_workers_at_work(number: int, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    program = (
        PROGRAM + "batches = iter(loader(Reporting()))\nnext(batches)\nprint('at work', flush=True)\ntime.sleep(60)\n"
    )
    with started(program, tmp_path / "data", "server", tmp_path / "report") as job:
        deadline = time.monotonic() + 60
        while job.stdout.read_text() != "main runs\nat work\n":
            assert job.poll() is None, job.stderr.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(job.processes[0].pid).children(recursive=True)
        assert len(family) >= 3  # the server and two workers
        job.send_signal(number)
        job.wait(20)
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            process.kill()
        assert alive == []


@in_long_rounds
def test_the_server_and_its_workers_outlive_a_stop_signal_to_the_whole_job(tmp_path: Path) -> None:
    program = (
        PROGRAM
        + """
import signal, psutil
signal.signal(signal.SIGTERM, signal.SIG_IGN)
batches = iter(loader(Reporting()))
next(batches)
for each in psutil.Process().children(recursive=True):
    each.send_signal(signal.SIGTERM)
time.sleep(0.5)
print(1 + sum(1 for _ in batches))
"""
    )
    told = run(program, tmp_path / "data", "server", tmp_path / "report")
    assert int(told[-1]) > 20


@pytest.mark.parametrize(  # of the second length a batch is more than a pipe holds
    ("packing_length", "fork"), [(64, ""), (20_000, FORK), (64, FORK), (20_000, "")][: rounds(1, 4)]
)
def test_a_worker_from_the_server_that_dies_is_an_error_at_once(packing_length: int, fork: str, tmp_path: Path) -> None:
    num_samples = 60 if packing_length == 64 else 6000
    program = (
        fork
        + PROGRAM
        + f"""
import psutil
from lmms_stream.errors import LmmsStreamError

batches = iter(loader(Reporting(), {packing_length}))
next(batches)
time.sleep(2)  # now the workers wait to write more
worker = next(each for each in psutil.Process().children(recursive=True) if each.ppid() != os.getpid())
worker.kill()
try:
    list(batches)
except LmmsStreamError as error:
    print(error)
"""
    )
    *_, error = run(program, tmp_path / "data", "server", tmp_path / "report", num_samples=num_samples)
    assert error.startswith("a loader worker died or gave nothing within 600 s")
