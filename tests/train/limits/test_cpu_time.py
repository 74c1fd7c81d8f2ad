"""CPU time of workers, those that have ended among them."""

from __future__ import annotations

import subprocess
import sys

from lmms_stream.tools.profile.measure import loader_cpu_s

WORKS = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
TIMEOUT_S = 60
DIGITS = 6
"""Far below the hundredth of a second that the system counts in: differences of floats end in noise."""


def test_the_time_of_a_worker_counts_while_it_lives_and_after_it_has_ended() -> None:
    before = loader_cpu_s(1)
    worker = subprocess.Popen([sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    worker.stdout.readline()
    living = round(loader_cpu_s(1) - before, DIGITS)
    worker.communicate("\n", timeout=TIMEOUT_S)
    ended = round(loader_cpu_s(1) - before, DIGITS)
    assert 0.25 < living <= ended


def test_the_time_of_a_workers_own_children_counts_too() -> None:
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORKS!r}], input='', text=True)\n{WORKS}"
    before = loader_cpu_s(1)
    worker = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker.communicate("\n", timeout=TIMEOUT_S)
    assert loader_cpu_s(1) - before > 0.5
