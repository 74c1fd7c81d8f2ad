"""Runs of jobs on forked ranks: their configs, and how one is compared with another that was never interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from lmms_stream.tools.demo.corpus import VOCABULARY
from lmms_stream.tools.demo.jobs import RunRecords, compare_runs, read_run
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words

from ..processes import Job
from .launcher import run_job

MODULE = "lmms_stream.train"
JOB_S = 200.0


def write_chat_run(path: Path, dataset: Path | str, tokenizer: Path, **train: Any) -> Path:
    """The config of a run on chats that loader workers tokenize. Of runs that take less time: tests/train/runs.py."""
    settings = {
        "dataset": {
            "remote": str(dataset),
            "processor": {"tokenizer": str(tokenizer)},
            "packing_length": 1024,
            "overlong": "drop",
            "num_canonical_nodes": 2,
        },
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            }
        },
        "train": {
            "output_dir": str(path.parent / "default"),
            "global_batch": 4,
            "learning_rate": 1e-3,
            "num_workers": 1,
            "log_sample_ids": True,
        }
        | train,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def train(config: Path, output: Path, *overrides: str, nproc: int = 2, num_nodes: int = 1) -> str:
    """Run to the end, which is a good one; what it says on standard error."""
    arguments = [str(config), f"train.output_dir={output}", *overrides]
    done = run_job(nproc, MODULE, *arguments, timeout_s=JOB_S, num_nodes=num_nodes)
    assert done.returncode == 0, last_words(done.stderr)
    return done.stderr


def with_one_layer(config: Path) -> Path:
    """The config of a run, whose model has one layer, not two: for tests of steps and checkpoints."""
    config.write_text(config.read_text().replace("num_hidden_layers: 2", "num_hidden_layers: 1"))
    return config


def last_step(output: Path) -> int:
    return max((record["step"] for record in read_log(output)), default=0)


def wait_until(condition: Callable[[], bool], job: Job, *, limit_s: float = JOB_S, poll_s: float = 0.02) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert job.poll() is None, last_words(job.stderr.read_text())
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(poll_s)


def differences(
    whole: Path, output: Path, *, first_step: int = 1, last_step: int | None = None, tolerance: float = 0.0
) -> list[str]:
    """What is not the same from first_step to last_step (of `whole`); of a step that was done twice, in the later.

    Sample ids must be equal, and losses within the tolerance (0: to the last bit).
    """
    reference = read_run(whole, name="whole", tolerance=0)
    resumed = RunRecords(name="resumed", records=read_run(output, name="", tolerance=0).records, tolerance=tolerance)
    last = max(reference.records) if last_step is None else last_step
    return compare_runs(reference, [resumed], first_step=first_step, last_step=last)[1]


def steps_of(output: Path) -> list[int]:
    """The steps that a run has logged, each once."""
    return sorted({record["step"] for record in read_log(output)})
