"""Jobs on the CPU with matrices cut over ranks: killed, resumed with fewer ranks, exported, against one rank's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.rounds import LONG, in_long_rounds

from .divided_runs import IN_BFLOAT16, TOLERANCE, check_killed, difference, keep_first, saved_tensors, write
from .runs import differences, steps_of, train

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("optim", ["adamw", pytest.param("muon", marks=in_long_rounds)])
def test_a_run_with_matrices_cut_over_ranks_is_one_ranks_and_goes_on_without(tmp_path: Path, optim: str) -> None:
    """Two by two ranks, killed at a step: one, two and two cut ones go on from its checkpoint."""
    config = write(tmp_path, optim=optim)
    others = ((2, 1), (1, 1), *(((2, 2), (4, 2)) if LONG else ()))
    bound = TOLERANCE if optim == "adamw" else IN_BFLOAT16
    check_killed(config, "tensor_parallel", others=others, bound=bound)


@in_long_rounds
def test_muon_resumes_on_the_same_ranks_to_the_last_bit(tmp_path: Path) -> None:
    """The losses, the weights, and the state of the optimizer in the last checkpoint."""
    config = write(tmp_path, optim="muon")
    whole, output = tmp_path / "whole", tmp_path / "resumed"
    train(config, whole, "train.tensor_parallel=2", nproc=4)
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    keep_first(output)
    train(config, output, "train.tensor_parallel=2", nproc=4)
    assert steps_of(output) == [3, 4, 5, 6]
    assert differences(whole, output, first_step=3) == []
    assert difference(whole, output) == 0
    first, second = (saved_tensors(each) for each in (whole, output))
    assert first.keys() == second.keys()
    assert any("momentum_buffer" in name for name in first)
    assert [name for name in first if not first[name].equal(second[name])] == []


@in_long_rounds
def test_a_run_goes_on_with_matrices_cut_from_a_checkpoint_of_whole_ones(tmp_path: Path) -> None:
    """What two by two ranks export is what one exports."""
    config = write(tmp_path)
    whole, output = tmp_path / "whole", tmp_path / "cut"
    train(config, whole, nproc=1)
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    keep_first(output)
    train(config, output, "train.tensor_parallel=2", nproc=4)
    assert steps_of(output) == [3, 4, 5, 6]
    assert differences(whole, output, first_step=3, tolerance=TOLERANCE) == []
    assert difference(whole, output) < TOLERANCE
