"""Claims: the imports of a loader, and of a dataset without MosaicML's package, take 1 s of CPU beyond torch at most;
those of the trainer 1 s beyond the model's class and TrainingArguments. `lmms-stream train` of one step of a tiny model
takes at most 1.3 times the CPU of a program that imports both and builds the model; 2 times without files of earlier
starts in the user's cache folder.

1. Each import is the least of three processes, whose files are in the page cache.
2. Programs take turns; each figure is the median of five, from the start of a process to its end, with its workers and
   their server. The first start of all also compiles loops, which are kept next to the code, and is not counted.

    python benchmarks/imports.py
    python benchmarks/imports.py --only-imports
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml
from data import sample_lengths, write_tokens
from measure import keep_to_one_core, print_table, verdict

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

MOST_WARM, MOST_COLD, STARTS = 1.3, 2.0, 5
MOST_LEFT_S = 60.0  # that workers and their server may live longer than their rank
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
PLAIN = f"import torch; from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments; Qwen3ForCausalLM(Qwen3Config(**{SIZES}))"  # noqa: E501
_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl


def measured(before: str, after: str) -> tuple[float, float]:
    """Seconds of CPU, and the process's peak in MiB."""
    runs = []
    for _ in range(RUNS):
        script = SCRIPT.format(before=before, after=after)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
        seconds, peak = map(float, done.stdout.split())
        runs.append((seconds, peak))
    return min(runs)


def show_imports() -> None:
    found = {what: measured(*imports) for what, imports in IMPORTS.items()}
    rows = [
        [what, f"{seconds:.2f}", f"{peak:.0f}", verdict(seconds <= MOST_S)] for what, (seconds, peak) in found.items()
    ]
    print_table("Imports, beyond torch, or the model's class", ["name", "CPU s", "peak MiB in all", "1 s"], rows)


def cpu_seconds(*arguments: str, environment: Mapping[str, str]) -> float:
    """CPU of a Python process and of all processes that it leaves behind, to their ends."""
    command, before = [sys.executable, *arguments], os.times()
    subprocess.run(command, capture_output=True, check=True, timeout=300, env={**os.environ, **environment})
    until = time.monotonic() + MOST_LEFT_S
    with suppress(ChildProcessError):  # no orphan is left
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
        raise TimeoutError(f"a process of {' '.join(command)} ran {MOST_LEFT_S:g} s longer: end it")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def show_first_steps(folder: Path) -> None:
    ctypes.CDLL(None).prctl(_ADOPTS_ORPHANS, 1)
    write_tokens(folder / "data", sample_lengths("chat", 300, limit=256), shard_bytes=1 << 16, vocabulary=512)
    data = {"remote": str(folder / "data"), "processor": {"type": "tokens"}, "packing_length": 256}
    train = {"output_dir": str(folder / "out"), "global_batch": 8, "max_steps": 1, "save_steps": "no"}
    settings = {"dataset": data, "model": {"config": {"model_type": "qwen3", **SIZES}}, "train": train}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    step = ("-m", "lmms_stream", "train", str(folder / "run.yaml"))
    programs = {"imports and model": ("-c", PLAIN), "one step": step, "one step, empty cache folder": step}
    found: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(STARTS + 1):
        for name, arguments in programs.items():
            cache = folder / (f"cache-{turn}" if "empty" in name else "cache")
            seconds = cpu_seconds(*arguments, environment={"XDG_CACHE_HOME": str(cache)})
            found[name] += [seconds] * (turn > 0)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    plain, *limits = medians["imports and model"], None, MOST_WARM, MOST_COLD
    rows = [
        [name, f"{seconds:.2f}", f"{seconds / plain:.2f}", (limit and verdict(seconds <= limit * plain)) or ""]
        for (name, seconds), limit in zip(medians.items(), limits, strict=True)
    ]
    print_table("From start to end", ["program", "CPU s", "times", f"{MOST_WARM}, {MOST_COLD:g}"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-imports", action="store_true", help="measure the imports, and start no run")
    only_imports = parser.parse_args().only_imports
    keep_to_one_core()
    show_imports()
    if only_imports:
        return
    with tempfile.TemporaryDirectory() as folder:
        show_first_steps(Path(folder))


if __name__ == "__main__":
    main()
