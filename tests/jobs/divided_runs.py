"""Runs whose model is divided over ranks, by tensor or expert parallelism, against one rank's."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.checkpoint.tensors import read_metadata, stored_tensors
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from tests.conftest import write_tokens
from tests.train.runs import write_run

from .launcher import start_job
from .runs import MODULE, differences, last_step, steps_of, train, wait_until

LAST = 6
TOLERANCE = 1e-5  # of losses and weights; sums are of other parts
IN_BFLOAT16 = 2e-4  # of weights that muon has moved, whose iterations round to bfloat16


def write(folder: Path, **settings: Any) -> Path:
    """A run that begins as one rank's and two tensor parallel ones' do; its average of the weights is kept, too."""
    write_tokens(folder / "data", num_samples=300)
    own: dict[str, Any] = {
        "max_steps": LAST,
        "global_batch": 4,
        "save_steps": 2,
        "ema_decay": 0.8,
        "export": True,
        "optim_args": {"eps": 1e-4},
        "lr_scheduler_type": "constant",
    }
    return write_run(folder / "run.yaml", folder / "data", **{**own, **settings})


def exports(output: Path) -> dict[str, torch.Tensor]:
    """The weights that a run ended with, and their average."""
    found: dict[str, torch.Tensor] = {}
    for folder in ("export", "export-ema"):
        assert AutoModelForCausalLM.from_pretrained(output / folder) is not None
        found |= {f"{folder} {name}": each for name, each in load_file(output / folder / "model.safetensors").items()}
    return found


def difference(one: Path, two: Path) -> float:
    """The largest of the weights that two runs ended with."""
    first, second = exports(one), exports(two)
    assert first.keys() == second.keys()
    assert len(first) > 20
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def saved_tensors(output: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint: the weights and the optimizer's state."""
    folder = checkpoints(output / "checkpoints")[-1]
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in stored_tensors(read_metadata(folder), "").items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this process is no rank
        load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return found


def check_killed(config: Path, setting: str, *, others: Iterable[tuple[int, int]], bound: float) -> None:
    """A run on two by two ranks is one rank's, and goes on when it is killed.

    setting: the field of `train` that divides the model. others: numbers of ranks and degrees that go on from its
    checkpoint. bound: of their losses, and of the weights that they end with.
    """
    whole, output = config.parent / "whole", config.parent / "divided"
    train(config, whole, nproc=1)
    divided = [
        f"train.output_dir={output}",
        f"train.{setting}=2",
        "train.max_steps=1000",
        "train.save_total_limit=null",
    ]
    with start_job(4, MODULE, str(config), *divided) as job:
        wait_until(lambda: bool(checkpoints(output / "checkpoints")) and last_step(output) >= 3, job)
    assert differences(whole, output, last_step=3, tolerance=TOLERANCE) == []
    keep_first(output)
    for nproc, degree in others:
        resumed = config.parent / f"resumed-{nproc}-{degree}"
        shutil.copytree(output / "checkpoints", resumed / "checkpoints")
        train(config, resumed, f"train.{setting}={degree}", nproc=nproc)
        assert steps_of(resumed) == [3, 4, 5, 6]
        assert differences(whole, resumed, first_step=3, tolerance=bound) == []
        assert difference(whole, resumed) < bound


def keep_first(output: Path) -> None:
    """Remove all checkpoints of a run but its first."""
    for path in checkpoints(output / "checkpoints")[1:]:
        shutil.rmtree(path)
