"""Jobs on the CPU whose model or packs ranks divide: killed, resumed on other ranks, exported, against one rank's.

Ranks cut matrices (tensor_parallel), have experts of their own (expert_parallel) or parts of packs (sequence_parallel).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.train.report.train_log import history, read_log

from tests.conftest import last_words, write_tokens
from tests.rounds import LONG, in_long_rounds
from tests.train.runs import VOCABULARY, write_run
from tests.versions import IS_5

from .divided_cases import MIXTRAL, QWEN3_MOE, ROUTED, llama4
from .divided_runs import IN_BFLOAT16, TOLERANCE, check_killed, difference, exports, keep_first, saved_tensors, write
from .launcher import run_job
from .runs import differences, steps_of, train

pytestmark = pytest.mark.timeout(600)
ONLY_5 = pytest.mark.skipif(not IS_5, reason="each expert has parameters of its own, and no plan, before")
MATRICES, EXPERTS = "tensor_parallel", "expert_parallel"
OTHERS_OF_EXPERTS = ((1, 1), (2, 1), (2, 2), (4, 4), (4, 2))


def write_of(folder: Path, model: dict[str, Any] | None, **settings: Any) -> Path:
    """A run of a model with experts, or of a dense one (None)."""
    path = write(folder, **settings)
    run = yaml.safe_load(path.read_text())
    if model is not None:
        run["model"] = {**model, "config": {**model["config"], "vocab_size": VOCABULARY}}
    if settings.get("eval_on_start"):
        run["eval_dataset"] = {**run["dataset"], "packing_length": 100}
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.mark.parametrize(
    ("setting", "model", "optim", "others"),
    [
        (MATRICES, None, "adamw", ((2, 1), (1, 1), *(((2, 2), (4, 2)) if LONG else ()))),
        pytest.param(MATRICES, None, "muon", ((2, 1), (1, 1), (2, 2), (4, 2)), marks=in_long_rounds),
        *(
            pytest.param(EXPERTS, model, optim, OTHERS_OF_EXPERTS, marks=[in_long_rounds, *marks])
            for model, optim, marks in (
                (ROUTED, "adamw", []), (llama4(), "adamw", []), (ROUTED, "muon", []), (MIXTRAL, "adamw", [ONLY_5]),
            )
        ),
    ],
    ids=["matrices", "matrices-muon", "gpt_oss", "llama4", "gpt_oss-muon", "mixtral"],
)  # fmt: skip
def test_a_run_of_a_divided_model_is_one_ranks_and_goes_on_anyhow(
    tmp_path: Path, setting: str, model: dict[str, Any] | None, optim: str, others: tuple[tuple[int, int], ...]
) -> None:
    """Two by two ranks, killed at a step: other numbers of ranks and degrees go on from its checkpoint."""
    config = write_of(tmp_path, model, optim=optim)
    check_killed(config, setting, others=others, bound=TOLERANCE if optim == "adamw" else IN_BFLOAT16)


@in_long_rounds
@pytest.mark.parametrize(("setting", "model"), [(MATRICES, None), (EXPERTS, ROUTED)], ids=["matrices", "experts"])
def test_a_run_goes_on_divided_from_a_checkpoint_of_one_rank(
    tmp_path: Path, setting: str, model: dict[str, Any] | None
) -> None:
    """What two by two ranks export is what one exports; and they evaluate to the same, of packs that ranks do not have
    equally many of.
    """
    config = write_of(tmp_path, model, eval_on_start=True)
    whole, output = tmp_path / "whole", tmp_path / "divided"
    train(config, whole, nproc=1)
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    keep_first(output)
    train(config, output, f"train.{setting}=2", "train.shard_ranks=2", nproc=4)
    assert steps_of(output) == [3, 4, 5, 6]
    assert differences(whole, output, first_step=3, last_step=5, tolerance=TOLERANCE) == []
    assert difference(whole, output) < TOLERANCE
    evaluated, expected = (history(read_log(folder)).evaluations[-1]["eval_loss"] for folder in (output, whole))
    assert evaluated == pytest.approx(expected, rel=TOLERANCE)


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
@ONLY_5
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


@in_long_rounds
def test_a_run_on_parts_of_packs_goes_on_without_them_at_the_same_ids_and_losses(tmp_path: Path) -> None:
    """Two groups of two ranks that share packs, then two ranks with packs of their own; evaluated in both."""
    write_tokens(tmp_path / "data", num_samples=200)
    config = write_run(
        tmp_path / "run.yaml", tmp_path / "data", eval_dataset={"packing_length": 128}, global_batch=4,
        lr_scheduler_type="constant", eval_steps=3,
    )  # fmt: skip
    train(config, tmp_path / "whole", "train.max_steps=6", nproc=2)
    train(config, tmp_path / "shared", "train.max_steps=3", "train.sequence_parallel=2", nproc=4)
    train(config, tmp_path / "shared", "train.max_steps=6", nproc=2)
    found, expected = (history(read_log(tmp_path / name)) for name in ("shared", "whole"))
    assert [each["sample_ids"] for each in found.steps] == [each["sample_ids"] for each in expected.steps]
    assert len(found.steps) == 6
    for name in ("loss", "grad_norm", "tokens_seen"):
        assert [each[name] for each in found.steps] == pytest.approx([each[name] for each in expected.steps], rel=1e-5)
    evaluated = [[each["eval_loss"] for each in run.evaluations] for run in (found, expected)]
    assert len(evaluated[0]) == 2
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@in_long_rounds
def test_a_users_loss_and_metrics_are_given_whole_packs(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=40)
    config = write_run(
        tmp_path / "run.yaml", tmp_path / "data", eval_dataset={"packing_length": 127}, global_batch=2, max_steps=2
    )
    done = run_job(2, "tests.jobs.sequence_job", str(config), timeout_s=300)
    assert done.returncode == 0, last_words(done.stderr)
    expected = np.load(tmp_path / "1-0.npz")
    for rank in range(2):
        found = np.load(tmp_path / f"2-{rank}.npz")
        assert set(found) == {"predictions", "labels", "losses", "norms", "figures"}
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
