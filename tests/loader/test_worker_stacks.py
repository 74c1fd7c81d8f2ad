"""A loader worker that is asked for its stacks writes them, and goes on."""

from __future__ import annotations

import sys

from lmms_stream.processes.family import catches, descendants
from lmms_stream.signals import STACKS_SIGNAL

from ..conftest import run_command

PROGRAM = """
import os, signal, sys
from pathlib import Path
from lmms_stream.processes.family import catches, descendants
from lmms_stream.signals import STACKS_SIGNAL, outlive_stop_signal

def waits_for_data():
    os.kill(os.getpid(), STACKS_SIGNAL)
    return "it goes on"

assert not catches(os.getpid(), STACKS_SIGNAL)
outlive_stop_signal(0)
assert catches(os.getpid(), STACKS_SIGNAL)
child = os.fork()
if not child:
    signal.pause()
assert [*descendants(os.getpid())] == [child]
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(waits_for_data())
"""


def test_a_worker_that_is_asked_for_its_stacks_writes_them_and_goes_on() -> None:
    done = run_command(sys.executable, "-c", PROGRAM, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert "in waits_for_data\n" in done.stderr
    assert done.stdout == "it goes on\n"


def test_a_process_that_is_no_worker_is_not_asked() -> None:
    """The first process of the machine, whose signals are its own, and one that is not there."""
    assert not catches(1 << 30, STACKS_SIGNAL)
    assert [*descendants(1 << 30)] == []
