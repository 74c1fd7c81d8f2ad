"""What `make demo` runs, to its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from lmms_stream.tools.demo.endpoint import _settings
from lmms_stream.tools.demo.run import run_demo

from tests.conftest import last_words, run_cli, run_command
from tests.jobs.launcher import start_job
from tests.jobs.runs import MODULE
from tests.processes import run_module
from tests.rounds import in_long_rounds

ONE_LAYER = "model.config.num_hidden_layers=1"
PACKAGES = ("asyncio", "email", "http", "logging", "unittest", "xml")


class ForkedRanks:
    """A job of the demo whose ranks are forked from a process that has their imports, and whose model has one layer."""

    def __init__(self, config: Path, overrides: Sequence[str], *, nproc: int, text: Path):
        self._text = text
        self._ends = ExitStack()
        self._job = self._ends.enter_context(start_job(nproc, MODULE, str(config), *overrides, ONE_LAYER))

    def poll(self) -> int | None:
        status = self._job.poll()
        if status is not None:
            self._text.write_bytes(self._text.read_bytes() + self._job.stderr.read_bytes())
        return status

    def kill(self) -> None:
        self._ends.close()


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the standard library, instead of all of it: enough for the steps of the demo."""
    of_scheme, paths = sysconfig.get_paths, sysconfig.get_paths()
    for package in PACKAGES:
        shutil.copytree(Path(paths["stdlib"], package), tmp_path / "library" / package)
    small = paths | {"stdlib": str(tmp_path / "library")}
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda *scheme, **named: of_scheme(*scheme, **named) if scheme or named else small
    )


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("s3", "small_library")
def test_the_demo_ends_with_equal_runs_by_forked_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the S3 server that tests share, which is one of a demo's."""
    assert run_demo(tmp_path / "demo", start=ForkedRanks)
    shown = capsys.readouterr().out
    assert "EQUAL: sample ids and losses of steps" in shown
    assert "DIFFERENT" not in shown
    assert (tmp_path / "demo" / "plan.png").read_bytes().startswith(b"\x89PNG")


@in_long_rounds
@pytest.mark.timeout(900)
def test_the_demo_ends_with_equal_runs(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "lmms_stream", "demo", "--output", str(tmp_path / "demo"))
    result = run_command(*command, timeout_s=840)
    assert result.returncode == 0, last_words(result.stdout) + last_words(result.stderr)
    assert "EQUAL: sample ids and losses of steps" in result.stdout
    assert "DIFFERENT" not in result.stdout
    assert (tmp_path / "demo" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    result = run_cli("demo", "--output", str(tmp_path))
    assert result.returncode == 1
    assert f"error: {tmp_path} holds files not written by a demo: pass another folder as --output" in result.stderr
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_the_environment_is_as_before_once_the_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own")
    with _settings("http://127.0.0.1:9"):
        assert (os.environ["S3_ENDPOINT_URL"], os.environ["AWS_ACCESS_KEY_ID"]) == ("http://127.0.0.1:9", "demo")
    assert "S3_ENDPOINT_URL" not in os.environ
    assert os.environ["AWS_ACCESS_KEY_ID"] == "own"


def test_a_demo_without_moto_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moto.py").write_text("raise ModuleNotFoundError(\"No module named 'moto'\")")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
    result = run_cli("demo", "--output", str(tmp_path / "demo"))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "No module named 'moto'",
        "error: the S3 server of the demo does not start: pip install 'lmms-stream[demo]'",
    ]


def test_the_server_of_a_demo_that_is_killed_ends(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text("""
import os, signal, sys
from lmms_stream.tools.demo.endpoint import moto_server
with moto_server() as url:
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    result = run_module(str(script), timeout_s=120)
    assert result.returncode == -signal.SIGKILL
    port = int(result.stdout.rpartition(":")[2])
    deadline = time.monotonic() + 30
    while is_open(port):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
