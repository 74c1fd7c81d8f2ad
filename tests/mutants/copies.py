"""Copies of the project, with a fault or with traces, and runs of pytest in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from .table import ROOT

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "demo-output", ".*_cache", ".hypothesis", "*.egg-info")


def copy_project(folder: Path) -> Path:
    """Copy the files of the project with their times, so that compiled loops stay newer than their sources."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT)
    return folder


def run_tests(
    copy: Path, tests: Sequence[str], *, timeout_s: float, options: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Run pytest in a copy, in a session of its own; return the exit status, None if it took longer, and the output."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    listed = copy / "tests.txt"
    listed.write_text("\n".join(tests) + "\n")
    output = copy / "output.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.tracing", *options, f"@{listed}"]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile the project's source again
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_session(process.pid)
            process.wait()
    return status, output.read_text(errors="replace")


def end_session(leader: int) -> None:
    """Kill all processes of a session and those that they started."""
    family = [process for process in psutil.process_iter() if _in_session(process, leader)]
    for process in family + [child for parent in family for child in _children(parent)]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def _in_session(process: psutil.Process, leader: int) -> bool:
    try:
        return os.getsid(process.pid) == leader
    except ProcessLookupError:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
