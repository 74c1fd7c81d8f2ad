"""Jobs on the CPU: packs whose tokens lie on several ranks, against plain transformers and against runs without it.

Against them: each sample run alone, by a model without FSDP and by its own logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.train.report.train_log import history, read_log

from tests.conftest import last_words, write_samples, write_tokens
from tests.rounds import LONG, in_long_rounds

from ..train.runs import write_run
from .launcher import run_job
from .runs import train
from .test_experts import QWEN as EXPERTS
from .test_sharding import HYBRID, LORA, SIZES, TIED, alone, difference, plain, tokens_and_learnt

pytestmark = pytest.mark.timeout(400)  # for the jobs, of which each has a limit of its own
LLAMA = {"config": {"model_type": "llama", **SIZES}, "seed": 1}  # of 4 heads, and 2 of keys
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}  # in the second layer
QWEN3 = {"config": {"model_type": "qwen3", "head_dim": 16, **WINDOW, **SIZES}, "seed": 2}
HEADS = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}  # 4 divides the one, and not the other
SIX = {"config": {"model_type": "llama", **SIZES, **HEADS}}
HALVES, QUARTERS = {"sequence_parallel": 2}, {"sequence_parallel": 4}
CASES: dict[str, dict[str, Any]] = {
    "tied": {"model": TIED, "train": {**HALVES, "per_device_batch": 2, "pad_to": 301}, "on": [2, 4]},
    "repeated": {"model": LLAMA, "train": QUARTERS, "on": [4]},
    "masked": {"model": {**LLAMA, "attention": "sdpa"}, "train": HALVES, "on": [2]},
    "state": {"model": HYBRID, "train": HALVES, "on": [2]},
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"model": LLAMA, "train": HALVES, "on": [2, 4]},
    "window": {"model": QWEN3, "train": HALVES, "on": [2, 4]},
    "window-of-quarters": {"model": QWEN3, "train": QUARTERS, "on": [4]},
    "six": {"model": SIX, "train": QUARTERS, "on": [4]},
    "copies": {"model": TIED, "train": {**HALVES, "shard_ranks": 2}, "on": [4]},
    "again": {"model": TIED, "train": {**HALVES, "gradient_checkpointing": True}, "on": [2]},
    "compiled": {"model": TIED, "train": {**HALVES, "torch_compile": True}, "on": [2] if which("g++") else []},
    "matrices": {"model": LLAMA, "train": {**HALVES, "tensor_parallel": 2}, "on": [4]},
    "lora": {"model": LORA, "train": HALVES, "on": [2]},
}
PAIRS: dict[str, dict[str, Any]] = {  # their penalties are none of plain transformers' loss
    "experts": {"model": EXPERTS, "train": QUARTERS, "on": [4]},
    "experts-alone": {"model": EXPERTS, "on": [2]},
    "z": {"model": LLAMA, "train": {**HALVES, "z_loss": 0.1}, "on": [2]},
    "z-alone": {"model": LLAMA, "train": {"z_loss": 0.1}, "on": [2]},
}
EVERY = CASES | MORE


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case and world size, what the job of that world size did."""
    folder = tmp_path_factory.mktemp("sequence")
    write_samples(folder / "data", tokens_and_learnt(), shard_bytes=1 << 12)
    cases = EVERY | PAIRS if LONG else CASES
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": cases}))
    for nproc in (2, 4):
        done = run_job(nproc, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=300)
        assert done.returncode == 0, last_words(done.stderr)
    return {path.stem[:-2]: torch.load(path) for path in folder.glob("*-0.pt")}


def test_gradients_of_packs_that_lie_on_several_ranks_are_those_of_their_samples_one_by_one(
    results: dict[str, Any],
) -> None:
    """Ranks have halves and quarters of the tokens; samples lie across them; some heads of keys lie on two ranks."""
    runs = {run: made for run, made in results.items() if run.rpartition("-")[0] not in ("masked", "state", *PAIRS)}
    assert len(runs) == sum(len(case["on"]) for case in (EVERY if LONG else CASES).values()) - 2
    off = {}
    for run, made in runs.items():
        case = EVERY[run.rpartition("-")[0]]
        assert len(made["packs"]) == 4
        assert made["attention"] == "sdpa_varlen"
        off[run] = difference(made["gradients"], alone(plain(case["model"]), made["packs"]))
    assert {run: value for run, value in off.items() if not value <= 1e-5} == {}


@in_long_rounds
@pytest.mark.parametrize(("shared", "whole"), [("experts-4", "experts-alone-2"), ("z-2", "z-alone-2")])
def test_penalties_of_packs_that_lie_on_several_ranks_are_those_of_whole_packs(
    results: dict[str, Any], shared: str, whole: str
) -> None:
    found, expected = results[shared], results[whole]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert difference(found["gradients"], expected["gradients"]) <= 1e-5


def test_an_attention_that_makes_a_mask_of_a_part_is_refused(results: dict[str, Any]) -> None:
    assert results["masked-2"]["error"].startswith(
        "train.sequence_parallel 2 with attention sdpa, whose mask would cover only a single rank's tokens: set "
        "model.attention to flash_attention_2 or sdpa_varlen, or to auto"
    )


def test_layers_that_carry_state_from_token_to_token_are_refused(results: dict[str, Any]) -> None:
    assert results["state-2"]["error"] == (
        "Lfm2ForCausalLM with attention sdpa_varlen does not keep the samples of a pack apart: what one holds changes "
        "what is predicted in another: set train.sequence_parallel to 1"
    )


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
