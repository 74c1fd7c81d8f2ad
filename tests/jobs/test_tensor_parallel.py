"""Jobs on the CPU: one step with matrices cut over ranks, against plain transformers, each sample by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.conftest import last_words, write_samples
from tests.rounds import LONG

from .launcher import run_job
from .test_sharding import SIZES, alone, difference, plain, tokens_and_learnt

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
LLAMA = {"config": {"model_type": "llama", **SIZES, "vocab_size": 132}, "seed": 3}
TIED = {"config": {"model_type": "qwen2", "tie_word_embeddings": True, **SIZES}, "seed": 3}
TP: dict[str, Any] = {"tensor_parallel": 2}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model": LLAMA, "train": TP, "on": [4]},
    "tied": {"model": TIED, "train": TP, "on": [4]},
    "heads": {"model": LLAMA, "train": {"tensor_parallel": 4}, "on": [4]},
}
SEVERAL: dict[str, dict[str, Any]] = {
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank did."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    write_samples(folder / "data", tokens_and_learnt(), shard_bytes=1 << 12)
    cases = {**CASES, **(SEVERAL if LONG else {})}
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": cases}))
    done = run_job(4, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=300)
    assert done.returncode == 0, last_words(done.stderr)
    return {name: [torch.load(folder / f"{name}-4-{rank}.pt") for rank in range(4)] for name in cases}


def test_gradients_of_a_model_whose_matrices_are_cut_are_those_of_its_samples_one_by_one(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    """On every rank; the norm that they are clipped by too."""
    for name, ranks in results.items():
        if "error" in ranks[0]:
            print(name, [each["error"] for each in ranks])
            continue
        expected = alone(plain(({**CASES, **SEVERAL})[name]["model"]), ranks[0]["packs"])
        norm = float(torch.stack([each.norm() for each in expected.values()]).norm())
        for made in ranks:
            print(name, difference(made["gradients"], expected), abs(made["grad_norm"] / norm - 1))
    assert False
