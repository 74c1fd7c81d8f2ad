"""Jobs on the CPU: mixtures of experts, of which no rank uses all, on 1, 2 and 4 ranks, against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import TokensAndSpans, last_words, write_samples

from .launcher import run_job
from .test_sharding import SIZES, Tensors, difference, plain

pytestmark = pytest.mark.timeout(400)  # for the jobs, of which each has a limit of its own
ROUTER_WEIGHT = 0.3
EXPERTS = {
    "config": {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": ROUTER_WEIGHT,
        **SIZES,
    }
}
QWEN = {
    "config": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "head_dim": 8,
        "router_aux_loss_coef": ROUTER_WEIGHT,
        **SIZES,
    }
}
LORA = {**QWEN, "adapter": {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}}
SHORT: dict[str, Any] = {"model": EXPERTS, "packing_length": 8}
CASES: dict[str, dict[str, Any]] = {
    "experts": {**SHORT, "on": [1, 2, 4]},
    "qwen": {**SHORT, "model": QWEN, "on": [1, 2, 4]},
    "lora": {**SHORT, "model": LORA, "on": [1, 2]},
    "copies": {**SHORT, "model": QWEN, "train": {"shard_ranks": 2}, "on": [4]},
    "padded": {**SHORT, "train": {"pad_to": 24, "per_device_batch": 2}, "on": [1, 2]},
    "again": {**SHORT, "train": {"gradient_checkpointing": True}, "on": [2]},
    "older": {**SHORT, "older_torch": True, "on": [1, 2]},  # whose FSDP2 makes no zeros
}


def samples() -> list[TokensAndSpans]:
    rng = np.random.default_rng(3)
    return [(rng.integers(5, 131, n).astype(np.int32), np.array([[1, n]], np.int32)) for n in rng.integers(3, 7, 20)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("experts")
    write_samples(folder / "data", samples(), shard_bytes=1 << 12)
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": CASES}))
    for nproc in (1, 2, 4):
        done = run_job(nproc, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=150)
        assert done.returncode == 0, last_words(done.stderr)
    return {path.stem[:-2]: torch.load(path) for path in folder.glob("*-0.pt")}


def expected(kind: Any, packs: list[list[int]], *, router_weight: float) -> tuple[Tensors, list[set[tuple[str, int]]]]:
    """Gradients by transformers' own losses of each pack; and for each pack which rows of experts it uses."""
    model, found = plain(kind), samples()
    num_tokens = sum(len(found[i][0]) for pack in packs for i in pack)
    num_targets = num_tokens - sum(len(pack) for pack in packs)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    total, used = {name: torch.zeros_like(value) for name, value in trained.items()}, []
    for pack in packs:
        ids = [torch.from_numpy(found[i][0].astype(np.int64)) for i in pack]
        positions = torch.cat([torch.arange(len(each)) for each in ids])
        labels = torch.cat([torch.cat([torch.tensor([-100]), each[1:]]) for each in ids])
        out = model(
            input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False, output_router_logits=True
        )
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], labels[1:], reduction="sum") / num_targets
        model.zero_grad()
        (loss + router_weight * out.aux_loss * len(positions) / num_tokens).backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        of_experts = {name: gradient for name, gradient in gradients.items() if ".experts." in name}
        rows = {name: gradient.flatten(1).any(dim=1).nonzero()[:, 0] for name, gradient in of_experts.items()}
        used.append({(name, int(row)) for name, numbers in rows.items() for row in numbers})
        for name, gradient in gradients.items():
            total[name] += gradient
    return {f"model.{name}": value for name, value in total.items()}, used


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # of peft, for lora
@pytest.mark.parametrize(
    ("kind", "names", "num_runs"),
    [(EXPERTS, ("experts", "padded", "again", "older"), 8), (QWEN, ("qwen", "copies"), 4), (LORA, ("lora",), 2)],
    ids=["mixtral", "qwen3_moe", "lora"],
)
def test_experts_that_no_token_of_a_rank_goes_to_have_the_gradients_of_the_global_batch(
    kind: Any, names: tuple[str, ...], num_runs: int, results: dict[str, Any]
) -> None:
    """With the auxiliary loss of the router, a mean over the tokens of the global batch that are no padding."""
    runs = {run: made for run, made in results.items() if run.rpartition("-")[0] in names}
    assert len(runs) == num_runs
    packs = runs[f"{names[0]}-1"]["packs"]
    assert all(sorted(run["packs"]) == sorted(packs) for run in runs.values())
    gradients, used = expected(kind, packs, router_weight=ROUTER_WEIGHT)
    assert len({frozenset(each) for each in used}) > 1
    assert {run: made for run, made in runs.items() if difference(made["gradients"], gradients) > 1e-5} == {}
    without = expected(kind, packs, router_weight=0.0)[0]
    assert difference(runs[f"{names[0]}-1"]["gradients"], without) > 1e-3
