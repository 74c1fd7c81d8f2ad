"""The command that tries the trainer on a GPU works: without one, at toy size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rounds import in_long_rounds

COMMAND = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@in_long_rounds
def test_all_sections_run_at_toy_size_and_the_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(COMMAND), "--folder", str(tmp_path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    said = made.stdout
    for words in ("FAILED", "exit status", "cut after", "no time left"):
        assert words not in said, said
    for section in ("text", "vision"):
        assert f"[{section}] attention sdpa: losses at most 0.00% from the CPU's in float32" in said
    assert "[settings] plain: losses" in said
    assert said.count("resumed: equal to the bit") == said.count("resumed: ") - 1  # the last is of checkpoints
    assert "[syncs] 0.0 waits a step: none" in said
    assert "[speed-32k] bare loop, padded:" in said
