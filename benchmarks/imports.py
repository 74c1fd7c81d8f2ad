"""Claim: the imports of a loader, and of a dataset without MosaicML's package, take 1 s of CPU beyond torch at most;
those of the trainer 1 s beyond the model's class and TrainingArguments.

Each is the least of three processes, whose files are in the page cache.

    python benchmarks/imports.py
"""

from __future__ import annotations

import subprocess
import sys

from measure import print_table, verdict

MOST_S, RUNS = 1.0, 3
TORCH = "import torch"
MODEL = "from transformers import LlamaForCausalLM, TrainingArguments"
WITHOUT = "import sys; sys.modules['streaming'] = None"
IMPORTS = {  # what: what is imported before the clock starts, and what after it
    "PackedLoader": (TORCH, "from lmms_stream import PackedLoader"),
    "PackedStreamingDataset": (f"{TORCH}; {WITHOUT}", "from lmms_stream import PackedStreamingDataset"),
    "FSDP2SFTTrainer": (f"{TORCH}; {MODEL}", "from lmms_stream import FSDP2SFTTrainer"),
    "lmms_stream": ("", "import lmms_stream"),
}
SCRIPT = """
import resource, time
{before}
start = time.process_time()
{after}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(time.process_time() - start, peak)
"""


def measured(before: str, after: str) -> tuple[float, float]:
    """Seconds of CPU, and the process's peak in MiB."""
    runs = []
    for _ in range(RUNS):
        script = SCRIPT.format(before=before, after=after)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
        seconds, peak = map(float, done.stdout.split())
        runs.append((seconds, peak))
    return min(runs)


def main() -> None:
    found = {what: measured(*imports) for what, imports in IMPORTS.items()}
    rows = [
        [what, f"{seconds:.2f}", f"{peak:.0f}", verdict(seconds <= MOST_S)] for what, (seconds, peak) in found.items()
    ]
    print_table("Imports, beyond torch, or the model's class", ["name", "CPU s", "peak MiB in all", "1 s"], rows)


if __name__ == "__main__":
    main()
