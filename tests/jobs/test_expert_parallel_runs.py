"""Jobs on the CPU with experts on different ranks: killed, resumed on other ranks, exported, against one rank's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.train.report.train_log import read_log

from tests.rounds import in_long_rounds
from tests.train.runs import VOCABULARY
from tests.versions import IS_5

from .divided_cases import MIXTRAL, QWEN3_MOE, ROUTED, llama4
from .divided_runs import IN_BFLOAT16, TOLERANCE, check_killed, difference, exports, keep_first, saved_tensors, write
from .runs import differences, train

pytestmark = pytest.mark.timeout(600)


def write_of(folder: Path, model: dict[str, Any], **settings: Any) -> Path:
    """A run of a model with experts."""
    path = write(folder, **settings)
    run = yaml.safe_load(path.read_text())
    run["model"] = {**model, "config": {**model["config"], "vocab_size": VOCABULARY}}
    if settings.get("eval_on_start"):
        run["eval_dataset"] = {**run["dataset"], "packing_length": 100}
    path.write_text(yaml.safe_dump(run))
    return path


@in_long_rounds
@pytest.mark.parametrize(
    ("model", "optim"),
    [
        (ROUTED, "adamw"),
        (llama4(), "adamw"),
        (ROUTED, "muon"),
        pytest.param(MIXTRAL, "adamw", marks=pytest.mark.skipif(not IS_5, reason="it has no plan before")),
    ],
    ids=["gpt_oss", "llama4", "muon", "mixtral"],
)
def test_a_run_with_experts_on_different_ranks_is_one_ranks_and_goes_on_anyhow(
    tmp_path: Path, model: dict[str, Any], optim: str
) -> None:
    """Two by two ranks, killed at a step: other numbers of ranks and degrees go on from its checkpoint."""
    config = write_of(tmp_path, model, optim=optim)
    others = ((1, 1), (2, 1), (2, 2), (4, 4), (4, 2))
    bound = TOLERANCE if optim == "adamw" else IN_BFLOAT16
    check_killed(config, "expert_parallel", others=others, bound=bound)


@in_long_rounds
def test_a_run_goes_on_with_experts_on_different_ranks_from_a_checkpoint_of_whole_ones(tmp_path: Path) -> None:
    """And evaluates to the same, of packs that ranks do not have equally many of."""
    config = write_of(tmp_path, ROUTED, eval_on_start=True)
    whole, output = tmp_path / "whole", tmp_path / "split"
    train(config, whole, nproc=1)
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    keep_first(output)
    train(config, output, "train.expert_parallel=2", "train.shard_ranks=2", nproc=4)
    assert differences(whole, output, first_step=3, last_step=5, tolerance=TOLERANCE) == []
    assert difference(whole, output) < TOLERANCE
    found, expected = (read_log(folder)[-1]["eval_loss"] for folder in (output, whole))
    assert found == pytest.approx(expected, rel=TOLERANCE)


@in_long_rounds
@pytest.mark.skipif(not IS_5, reason="each expert has parameters of its own before")
def test_muon_resumes_with_all_experts_of_a_block_in_one_parameter(tmp_path: Path) -> None:
    """To the last bit on as many ranks. On another number the gradients of queries and keys, of which some directions
    are rounding, differ: Muon makes all directions equally long. The experts' do not.
    """
    config, whole = write_of(tmp_path, QWEN3_MOE, optim="muon", save_total_limit=None), tmp_path / "whole"
    train(config, whole, nproc=2)
    of_experts = [name for name in saved_tensors(whole) if name.startswith("optimizer.") and ".experts." in name]
    assert len(of_experts) == 4
    assert all(name.endswith("_proj.momentum_buffer") for name in of_experts)
    keep_first(whole)
    for nproc, tolerance in ((2, 0.0), (1, IN_BFLOAT16)):
        resumed = tmp_path / f"resumed-{nproc}"
        shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
        train(config, resumed, nproc=nproc)
        assert differences(whole, resumed, first_step=3, tolerance=tolerance) == []
        first, second = exports(whole), exports(resumed)
        compared = [name for name in first if nproc == 2 or ".experts." in name]
        assert max(float((first[name] - second[name]).abs().max()) for name in compared) <= tolerance
