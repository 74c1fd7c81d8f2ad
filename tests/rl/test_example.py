"""examples/rollout.py, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..conftest import last_words
from ..processes import run_module
from ..rounds import LONG, in_long_rounds

ROOT = Path(__file__).parents[2]
NUM_ROLLOUTS = 8
LIMIT_S = 200.0


def command(folder: Path) -> list[str]:
    program = str(ROOT / "examples" / "rollout.py")
    return [sys.executable, program, str(folder), "--num-rollout", str(NUM_ROLLOUTS), "--use-streaming-dataset"]


def run(folder: Path) -> None:
    """To the end; in `make test` from a process that has its imports."""
    if LONG:
        result = subprocess.run(command(folder), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    else:
        result = run_module(*command(folder)[1:], timeout_s=LIMIT_S)
    assert result.returncode == 0, last_words(result.stderr)


def groups_of(folder: Path) -> dict[int, Any]:
    """The groups of each rollout; one that was done again is the same."""
    found: dict[int, Any] = {}
    for line in (folder / "groups.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert found.setdefault(record["rollout"], record["groups"]) == record["groups"]
    return found


@in_long_rounds
def test_the_example_is_killed_and_goes_on_with_the_same_groups(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    expected = groups_of(tmp_path / "whole")
    assert list(expected) == list(range(NUM_ROLLOUTS))
    samples = [sample for groups in expected.values() for group in groups for sample in group]
    assert {sample["status"] for sample in samples} >= {"completed", "truncated"}
    assert max(sample["abort_count"] for sample in samples) > 0  # some went back and were gone on with
    assert len({sample["index"] for sample in samples}) == len(samples)
    with subprocess.Popen(command(tmp_path / "killed"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        for line in process.stdout:
            assert time.monotonic() < deadline
            if line.startswith("rollout 3"):
                os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(groups_of(tmp_path / "killed")) < NUM_ROLLOUTS
    run(tmp_path / "killed")
    assert groups_of(tmp_path / "killed") == expected
