"""Jobs on the CPU: runs that learn to make images, killed and resumed, against runs that never were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.train.report.train_log import read_log
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.conftest import last_words
from tests.rounds import LONG
from tests.train.images import write_typed_run

from .launcher import run_job, start_job
from .runs import MODULE, differences, last_step, steps_of, wait_until

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
JOB_S = 200.0
OTHER_WORLD = 1e-5  # sums of gradients are of other parts
MODULES = {"sit": MODULE, "rae": "tests.jobs.images_job"}


def train(kind: str, config: Path, output: Path, *overrides: str, nproc: int = 2) -> None:
    done = run_job(nproc, MODULES[kind], str(config), f"train.output_dir={output}", *overrides, timeout_s=JOB_S)
    assert done.returncode == 0, last_words(done.stderr)


def tensors(output: Path, folder: Path) -> dict[str, Any]:
    """All tensors of the last checkpoint: weights, what the optimizer keeps, and the average."""
    dcp_to_torch_save(str(output / "checkpoints" / "step-00000006"), str(folder / "tensors.pt"))
    saved: dict[str, Any] = torch.load(folder / "tensors.pt", weights_only=True)
    return saved


def flat(values: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(values, dict):
        return {key: each for inner, value in values.items() for key, each in flat(value, f"{name}.{inner}").items()}
    return {name: values} if isinstance(values, torch.Tensor) else {}


@pytest.mark.parametrize("kind", ["sit", *(["rae"] if LONG else [])])
def test_a_run_that_learns_to_make_images_is_killed_and_goes_on_bit_by_bit_and_on_one_rank_with_the_same_images(
    kind: str, tmp_path: Path
) -> None:
    config, whole, killed = write_typed_run(tmp_path, kind), tmp_path / "whole", tmp_path / "killed"
    train(kind, config, whole)
    with start_job(2, MODULES[kind], str(config), f"train.output_dir={killed}") as job:
        wait_until(lambda: last_step(killed) >= 3, job)
        for process in job.family():
            process.kill()
    alone = tmp_path / "alone"
    shutil.copytree(killed, alone)
    train(kind, config, killed)
    train(kind, config, alone, nproc=1)
    assert steps_of(killed) == steps_of(alone) == [1, 2, 3, 4, 5, 6]
    assert differences(whole, killed) == []
    assert differences(whole, alone, tolerance=OTHER_WORLD) == []
    of_whole, of_killed = (flat(tensors(output, tmp_path)) for output in (whole, killed))
    assert {name.split(".")[1] for name in of_whole} == {"model", "optimizer", "average"}
    assert of_whole.keys() == of_killed.keys()
    assert [name for name, each in of_whole.items() if not torch.equal(each, of_killed[name])] == []
    if kind == "rae":
        assert any("discriminator" in name for name in of_whole)
        first, *_, last = read_log(whole)
        assert first["loss/discriminator"] == first["loss/generator"] == 0  # their steps come later
        assert last["loss/discriminator"] > 0
