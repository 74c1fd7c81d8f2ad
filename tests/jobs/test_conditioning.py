"""Timesteps and sines of positions keep their number format where blocks are computed in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.conftest import last_words

from .conditioning_job import MODELS
from .launcher import run_job

FLOAT32 = {
    "dit": 1,
    "qwen2": 2,
    "qwen2_5": 2,
    "llama": 0,
    "deepseek": 0,
    "wan": 2,
}  # float32 tensors that a block is given


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of each model, what each of two ranks saw."""
    folder: Path = tmp_path_factory.mktemp("conditioning")
    done = run_job(2, "tests.jobs.conditioning_job", str(folder), timeout_s=200)
    assert done.returncode == 0, last_words(done.stderr)
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)] for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_sharded_blocks_are_given_what_blocks_of_the_whole_model_are(
    found: dict[str, list[dict[str, Any]]], name: str
) -> None:
    if name in ("deepseek", "wan") and not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
        pytest.skip("FSDP before torch 2.15 has one number format for a block")
    for rank in found[name]:
        plain, sharded = rank["plain"], rank["sharded"]
        assert len(plain["inputs"]) == len(sharded["inputs"]) >= 2
        for (number, *expected), (same, *given) in zip(plain["inputs"], sharded["inputs"], strict=True):
            assert number == same
            assert [each.dtype for each in given] == [each.dtype for each in expected]
            assert [each.dtype for each in given].count(torch.float32) == FLOAT32[name]
            assert all(map(torch.equal, given, expected))
        assert torch.equal(plain["output"], sharded["output"])


def test_timesteps_that_bfloat16_does_not_have_reach_every_block(found: dict[str, list[dict[str, Any]]]) -> None:
    times = torch.tensor([123.4, 777.7])
    for rank in found["dit"]:
        of_blocks = [
            [each for each in given if each.shape == (2,) and each.is_floating_point()]
            for _, *given in rank["sharded"]["inputs"]
        ]
        assert len(of_blocks) >= 2
        assert all(torch.equal(given, times) for (given,) in of_blocks)
