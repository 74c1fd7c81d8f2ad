"""A conversion that is told to end ends its processes, and says which command resumes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ..processes import running_after
from ..rounds import rounds

LIMIT_S = 60
SLOW = """
import time

def slow(row):  # after the first rows, by which the command finds the kind of rows
    time.sleep(0.2 if int(row["text"].split()[1]) >= 100 else 0)
    return row
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT][: rounds(2, 3)])
def test_a_conversion_that_is_told_to_end_ends_its_processes_in_the_middle_of_their_work(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "own.py").write_text(SLOW)
    for name in "ab":  # a unit each, which takes longer than LIMIT_S
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {row}"}}\n' for row in range(1000)))
    words = "convert a.jsonl b.jsonl out --workers 2 --map own.py:slow"
    command = [sys.executable, "-m", "lmms_stream", *words.split(), "--work", str(tmp_path / "work")]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        below = _processes(process.pid)
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT_S)
        alive = running_after(below, LIMIT_S)
        for each in alive:
            each.kill()
    assert not alive
    status, first = {signal.SIGTERM: (143, "terminated"), signal.SIGINT: (130, "interrupted")}.get(number, (-9, ""))
    assert process.returncode == status
    if first:
        assert said.splitlines()[-1].startswith(f"{first}: lmms-stream {words} --work ")
        assert said.endswith(" resumes\n")


def _processes(pid: int) -> list[psutil.Process]:
    """All processes that a command has started, once two workers have been at work for a while."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        below = psutil.Process(pid).children(recursive=True)
        if sum(each.ppid() != pid for each in below) >= 2:
            time.sleep(2)
            return psutil.Process(pid).children(recursive=True)
        time.sleep(0.05)
    raise AssertionError("no workers were started in time")
