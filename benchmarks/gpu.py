"""The trainer on a GPU: attentions, losses beside the CPU's, speed, waits for the device, checkpoints, images.

Each section runs in a process of its own with a limit of 60 s. Sections of checks run side by side, with a limit of
90 s; sections that measure time run alone. The order is that of their worth. Each prints its results line by line: a
run that is cut still tells. Without a GPU all sections run at toy size, which shows only that they work.

    python benchmarks/gpu.py
    python benchmarks/gpu.py text speed-8k --folder /scratch

It needs no network, and Python 3.11, torch 2.11 and transformers 5 or later. Packages of this project that are missing
on the machine can come as wheels, made elsewhere by `make gpu-wheels`:

    python -m pip install --no-index --no-deps --target site build/gpu-wheels/*.whl
    PYTHONPATH=.:site python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_runs import LIMIT_S
from gpu_sections import CHECKS, MEASURED

FEWEST_S = 10.0  # for a section to begin


class Section:
    """A section in a process of its own; its lines are printed as they come."""

    def __init__(self, name: str, folder: Path, logs: Path):
        (folder / name).mkdir()
        self.name, self.began = name, time.monotonic()
        self._log = (logs / f"{name}.log").open("w")
        command = [sys.executable, str(Path(__file__).with_name("gpu_sections.py")), name, str(folder / name)]
        threads = {"OMP_NUM_THREADS": "4"} if name in CHECKS else {}  # which share the cores
        self._process = subprocess.Popen(
            command,
            env={**threads, **os.environ},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._printing = threading.Thread(target=self._print, daemon=True)
        self._printing.start()

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"[{self.name}] {line}", end="", flush=True)

    def wait(self, limit_s: float) -> None:
        """Wait for the end; end the process and all that it started at the limit."""
        try:
            code = self._process.wait(max(0.1, limit_s - (time.monotonic() - self.began)))
            said = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)  # writes where it is to its log
            time.sleep(0.5)
            os.killpg(self._process.pid, 9)
            self._process.wait()
            said = f"cut after {limit_s:.0f} s"
        self._printing.join(5)
        self._log.close()
        if said:
            tail = Path(self._log.name).read_text().splitlines()[-12:]
            print(f"[{self.name}] {said}", *tail, sep="\n    ", flush=True)


def run_sections(names: Sequence[str], folder: Path, *, logs: Path, minutes: float) -> None:
    ends = time.monotonic() + 60 * minutes
    for name, group in itertools.groupby(["machine", *names], lambda name: name not in CHECKS and name):
        if (left := ends - time.monotonic()) < FEWEST_S:
            print(f"no time left for {', '.join(group)} and those after it")
            return
        sections = [Section(each, folder, logs) for each in group]
        for section in sections:
            section.wait(min(LIMIT_S if name else 1.5 * LIMIT_S, left))  # checks share the cores
        print(f"{', '.join(each.name for each in sections)}: {time.monotonic() - sections[0].began:.0f} s", flush=True)


def main() -> None:
    every = [*CHECKS, *MEASURED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(every)} (default: all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of all sections together")
    parser.add_argument("--folder", type=Path, help="for some GB of files (default: the system's temporary folder)")
    parser.add_argument("--logs", type=Path, help="folder to keep what each section logs (default: not kept)")
    args = parser.parse_args()
    if unknown := {*args.sections} - {*every}:
        parser.error(f"unknown sections {', '.join(unknown)}: choose from {', '.join(every)}")
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        os.environ.update(LMMS_GPU_TOY="1", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        logs = args.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        run_sections(args.sections or every, Path(name), logs=logs, minutes=args.minutes)


if __name__ == "__main__":
    main()
