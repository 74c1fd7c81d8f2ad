"""Jobs on the CPU with matrices cut over ranks: killed, resumed with fewer ranks, exported, against one rank's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import write_tokens
from tests.rounds import LONG, in_long_rounds
from tests.train.runs import write_run

from .launcher import start_job
from .runs import MODULE, differences, last_step, steps_of, train, wait_until

pytestmark = pytest.mark.timeout(400)
LAST = 6
TOLERANCE = 1e-5  # of losses and weights; sums are of other parts
IN_BFLOAT16 = 2e-4  # of weights that muon has moved, whose iterations round to bfloat16


def write(folder: Path, **settings: object) -> Path:
    """A run that begins as one rank's and two tensor parallel ones' do; its average of the weights is kept, too."""
    write_tokens(folder / "data", num_samples=300)
    own = {
        "max_steps": LAST,
        "save_steps": 2,
        "ema_decay": 0.8,
        "export": True,
        "adam_epsilon": 1e-4,
        "lr_scheduler_type": "constant",
    }
    return write_run(folder / "run.yaml", folder / "data", **{**own, **settings})


def exports(output: Path) -> dict[str, torch.Tensor]:
    """The weights that a run ended with, and their average."""
    found = {}
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


@pytest.mark.parametrize("optim", ["adamw", pytest.param("muon", marks=in_long_rounds)])
def test_a_run_with_matrices_cut_over_ranks_is_one_ranks_and_goes_on_without(tmp_path: Path, optim: str) -> None:
    """Two by two ranks, killed at a step: one, two and two cut ones go on from its checkpoint."""
    config = write(tmp_path, optim=optim)
    whole, output = tmp_path / "whole", tmp_path / "cut"
    train(config, whole, nproc=1)
    cut = [
        f"train.output_dir={output}",
        "train.tensor_parallel=2",
        "train.max_steps=1000",
        "train.save_total_limit=null",
    ]
    with start_job(4, MODULE, str(config), *cut) as job:
        wait_until(lambda: bool(checkpoints(output / "checkpoints")) and last_step(output) >= 3, job)
    assert differences(whole, output, last_step=3, tolerance=TOLERANCE) == []
    for path in checkpoints(output / "checkpoints")[1:]:
        shutil.rmtree(path)
    for nproc, degree in ((2, 1), (1, 1), *(((2, 2), (4, 2)) if LONG else ())):
        resumed = tmp_path / f"resumed-{nproc}-{degree}"
        shutil.copytree(output / "checkpoints", resumed / "checkpoints")
        train(config, resumed, f"train.tensor_parallel={degree}", nproc=nproc)
        assert steps_of(resumed) == [3, 4, 5, 6]
        assert differences(whole, resumed, first_step=3, tolerance=TOLERANCE) == []
        assert difference(whole, resumed) < (TOLERANCE if optim == "adamw" else IN_BFLOAT16)


@in_long_rounds
def test_a_run_goes_on_with_matrices_cut_from_a_checkpoint_of_whole_ones(tmp_path: Path) -> None:
    """What two by two ranks export is what one exports."""
    config = write(tmp_path)
    whole, output = tmp_path / "whole", tmp_path / "cut"
    train(config, whole, nproc=1)
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    for path in checkpoints(output / "checkpoints")[1:]:
        shutil.rmtree(path)
    train(config, output, "train.tensor_parallel=2", nproc=4)
    assert steps_of(output) == [3, 4, 5, 6]
    assert differences(whole, output, first_step=3, tolerance=TOLERANCE) == []
    assert difference(whole, output) < TOLERANCE
