"""Claim: texts and images are learnt in one sequence: on drawings that it has not seen, both losses fall.

The small model of examples/bagel is trained to say what is on a drawing, and to draw what it is told. Cross entropy
must fall below that of guessing colour and shape, the squared error of velocities to a share of the first records'.

    python benchmarks/bagel.py
    python benchmarks/bagel.py --steps 1000
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import print_table, verdict

ROOT = Path(__file__).parent.parent
STEPS = 250
ANSWER_TOKENS = 5  # A, the colour, the shape, the point, the end
GUESSING = 2 * math.log(4) / ANSWER_TOKENS  # nats a token: four colours and four shapes, all else known
MOST_CE = 0.5 * GUESSING
MOST_MSE = 1 / 3  # of that of the first record
MAX_S = 3600.0  # of the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        command = [sys.executable, str(ROOT / "examples/bagel/train.py"), name, "--steps", str(options.steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--rows", "3000"], check=True, timeout=MAX_S, env=environment)
        seconds = time.monotonic() - started
        from lmms_stream.train.report.train_log import read_log

        records = read_log(Path(name) / "run")
    first, last = records[0], records[-1]
    ce, mse = last["eval_loss/ce"], last["eval_loss/mse"]
    bound = MOST_MSE * first["loss/mse"]
    print_table(
        f"losses on held-out drawings after {options.steps} steps, {seconds:.0f} s",
        ["loss", "first record", "held-out", "bound"],
        [
            ["cross entropy of what is said, nats a token", f"{first['loss/ce']:.3f}", f"{ce:.3f}", f"{MOST_CE:.3f}"],
            ["squared error of velocities", f"{first['loss/mse']:.3f}", f"{mse:.3f}", f"{bound:.3f}"],
        ],
    )
    print(f"cross entropy below {MOST_CE:.3f}, of guessing colour and shape {GUESSING:.3f}: {verdict(ce <= MOST_CE)}")
    print(f"squared error below {MOST_MSE:.0%} of the first record's: {verdict(mse <= bound)}")


if __name__ == "__main__":
    main()
