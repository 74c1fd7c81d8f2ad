"""Jobs on the CPU: one step with matrices cut over ranks, against plain transformers, each sample by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import last_words, write_samples
from tests.rounds import LONG, in_long_rounds
from tests.versions import IS_5

from .launcher import run_job
from .test_sharding import SIZES, VISION, alone, difference, plain, tokens_and_learnt

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
LLAMA: dict[str, Any] = {"config": {"model_type": "llama", **SIZES}, "seed": 3}
LORA = {**LLAMA, "adapter": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}
DORA = {**LLAMA, "adapter": {"r": 4, "target_modules": "all-linear", "use_dora": True}}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
NO_LOSS: dict[str, Any] = {"router_aux_loss_coef": 0.0}  # which plain transformers adds by batch
TP: dict[str, Any] = {"tensor_parallel": 2}


def of_type(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"config": {"model_type": model_type, **SIZES, **fields}, "seed": 3}


QWEN2_MOE = of_type("qwen2_moe", **MOE, **NO_LOSS, shared_expert_intermediate_size=16)
CASES: dict[str, dict[str, Any]] = {
    # An odd vocabulary, whose head stays whole, and tied to the embedding; biases of what is cut.
    "qwen2": {"model": of_type("qwen2", tie_word_embeddings=True), "train": TP},
    "llama": {"model": of_type("llama", vocab_size=132), "train": {**TP, "shard_ranks": 1}},
}
SEVERAL: dict[str, dict[str, Any]] = {
    # Norms of each head.
    "qwen3": {"model": of_type("qwen3", head_dim=8), "train": {**TP, "gradient_checkpointing": True}},
    "phi3": {"model": of_type("phi3"), "train": TP},  # joined outputs
    "gemma2": {"model": of_type("gemma2", head_dim=8, vocab_size=132), "train": TP},
    "gemma3": {"model": of_type("gemma3_text", head_dim=8, vocab_size=132), "train": TP},
    "olmo2": {"model": of_type("olmo2"), "train": TP},
    "smollm3": {"model": of_type("smollm3"), "train": TP},
    "starcoder2": {"model": of_type("starcoder2"), "train": TP},
    "glm4": {"model": of_type("glm4", head_dim=8), "train": TP},
    "mixtral": {"model": of_type("mixtral", num_local_experts=4, **NO_LOSS), "train": TP},
    "qwen3_moe": {"model": of_type("qwen3_moe", **MOE, **NO_LOSS), "train": TP},
    "qwen2_vl": {"model": VISION, "train": TP},
    "frozen": {"model": LLAMA, "train": {**TP, "frozen": ["lm_head.*", "*.layers.0.*"]}},
    "small": {"model": {**of_type("llama", vocab_size=132), "dtype": "bfloat16"}, "train": TP},
    "mixed": {"model": of_type("llama", vocab_size=132), "train": {**TP, "bf16": True}},
    "lora": {"model": LORA, "train": TP},
    "lora-small": {"model": {**LORA, "dtype": "bfloat16"}, "train": {**TP, "gradient_checkpointing": True}},
    "four": {"model": of_type("llama", num_key_value_heads=4), "train": {"tensor_parallel": 4}},
    "eager": {"model": {**LLAMA, "attention": "eager"}, "train": TP},
    "padded": {"model": LLAMA, "train": {**TP, "per_device_batch": 2, "pad_to": 160}},
}
TOLERANCES = {"lora-small": 0.1, "small": 0.05, "mixed": 0.05}  # in bfloat16
if IS_5:  # whose experts are in one parameter for all of a block
    CASES["mixtral"] = SEVERAL.pop("mixtral")
    SEVERAL["qwen2_moe"] = {"model": QWEN2_MOE, "train": TP}
    SEVERAL["deepseek_v3"] = {"model": of_type("deepseek_v3", **DEEPSEEK, **NO_LOSS), "train": TP}
DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.3, "embedding_dropout": 0.2}
REFUSED: dict[str, dict[str, Any]] = {
    "heads": {"model": LLAMA, "train": {"tensor_parallel": 4}},
    "dora": {"model": DORA, "train": TP},
    "opt": {"model": of_type("opt", ffn_dim=64, word_embed_proj_dim=32), "train": TP},
    "compiled": {"model": LLAMA, "train": {**TP, "torch_compile": True}},
    "channels": {"model": of_type("llama", intermediate_size=63), "train": TP},
    "ranks": {"model": LLAMA, "train": {"tensor_parallel": 3}},
}
if IS_5:
    REFUSED["experts"] = {"model": of_type("mixtral", num_local_experts=3), "train": TP}
    REFUSED["llama4"] = {"model": of_type("llama4_text", num_local_experts=2, interleave_moe_layer_step=1), "train": TP}
else:
    REFUSED["qwen2_moe"] = {"model": QWEN2_MOE, "train": TP}
    REFUSED["deepseek_v3"] = {"model": of_type("deepseek_v3"), "train": TP}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank did."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    write_samples(folder / "data", tokens_and_learnt(), shard_bytes=1 << 12)
    cases = {name: {**case, "on": [4]} for name, case in {**CASES, **(SEVERAL if LONG else {}), **REFUSED}.items()}
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": cases}))
    done = run_job(4, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=300)
    assert done.returncode == 0, last_words(done.stderr)
    return {name: [torch.load(folder / f"{name}-4-{rank}.pt") for rank in range(4)] for name in cases}


def test_gradients_of_a_model_whose_matrices_are_cut_are_those_of_its_samples_one_by_one(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    """On every rank, and so is the norm that they are clipped by."""
    for name, ranks in results.items():
        if name in REFUSED:
            continue
        packs, tolerance = ranks[0]["packs"], TOLERANCES.get(name, 1e-5)
        assert len(packs) == 4  # those of a group count once
        everything = alone(plain((CASES | SEVERAL)[name]["model"]), packs)
        expected = {key: value for key, value in everything.items() if key in ranks[0]["gradients"]}
        assert len(expected) >= 10
        norm = float(torch.stack([each.float().norm() for each in expected.values()]).norm())
        for made in ranks:
            assert sorted(map(sorted, made["packs"])) == sorted(map(sorted, packs))
            assert difference(made["gradients"], expected) < tolerance, name
            assert abs(made["grad_norm"] / norm - 1) < tolerance, name


def test_each_rank_holds_its_part_of_what_is_cut_and_of_that_what_fsdp_leaves_it(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    """Of [64, 32]: 2 tensor parallel ranks have 32 rows each, of which 2 that share a copy have 16."""
    cut, whole = "model.model.layers.0.mlp.gate_proj.weight", "model.model.norm.weight"
    for rank in range(4):
        assert results["qwen2"][rank]["held"][cut] == (16, 32)
        assert results["qwen2"][rank]["held"][cut.replace("gate", "down")] == (16, 32)
        assert results["qwen2"][rank]["held"][whole] == (16,)
        assert results["qwen2"][rank]["held"]["model.model.embed_tokens.weight"] in ((66, 32), (65, 32))  # tied
        assert results["llama"][rank]["held"][cut] == (32, 32)  # two copies
        assert results["llama"][rank]["held"]["model.lm_head.weight"] == (66, 32)


def test_what_cannot_be_cut_is_refused_by_name_on_every_rank(results: dict[str, list[dict[str, Any]]]) -> None:
    remedy = "set train.tensor_parallel to 1"
    messages = {
        "heads": "train.tensor_parallel 4 does not divide num_key_value_heads 2 of LlamaForCausalLM: choose a divisor "
        "of 2",
        "dora": "train.tensor_parallel cuts adapters of peft_type LORA without use_dora alone, and this one is LORA: "
        "set it to 1",
        "opt": f"transformers has no plan for tensor parallelism of OPTForCausalLM: {remedy}",
        "compiled": "train.tensor_parallel 2 and torch_compile cannot be combined yet",
        "channels": "train.tensor_parallel 2 does not divide the 63 outputs of model.layers.0.mlp.gate_proj: choose a "
        "divisor of 63",
        "ranks": "train.tensor_parallel 3 does not divide the world size 4: choose a divisor",
    }
    not_here = "transformers' plan for {} cuts {} by '{}', which is not here: " + remedy
    if IS_5:
        messages["experts"] = "train.tensor_parallel 2 does not divide the 3 experts of model.layers.0.mlp.experts: "
        words = ("model.layers.0.feed_forward.experts (Llama4TextExperts)", "moe_tp_experts")
        messages["llama4"] = not_here.format("Llama4ForCausalLM", *words)
    else:
        messages["qwen2_moe"] = "Qwen2MoeForCausalLM with attention "
        words = ("model.layers.0.mlp (DeepseekV3MLP)", "gather")
        messages["deepseek_v3"] = not_here.format("DeepseekV3ForCausalLM", *words)
    assert messages.keys() == REFUSED.keys()
    for name, message in messages.items():
        assert [made["error"].startswith(message) for made in results[name]] == [True] * 4, results[name]
    if not IS_5:
        told = "train.tensor_parallel 2 cuts its heads, which some models' code does not support:"
        assert told in results["qwen2_moe"][0]["error"]


@in_long_rounds
def test_ranks_of_a_group_draw_the_same_dropout(tmp_path: Path) -> None:
    """So gradients are those of one rank, which draws it for the whole."""
    write_samples(tmp_path / "data", tokens_and_learnt(), shard_bytes=1 << 12)
    made: dict[tuple[int, int], dict[str, Any]] = {}
    for nproc in (1, 2):
        case = {"model": of_type("starcoder2", **DROPOUT), "train": {"tensor_parallel": nproc}, "on": [nproc]}
        path = tmp_path / f"job-{nproc}.json"
        path.write_text(json.dumps({"dataset": str(tmp_path / "data"), "cases": {"drawn": case}}))
        done = run_job(nproc, "tests.jobs.sharding_job", str(path), timeout_s=100)
        assert done.returncode == 0, last_words(done.stderr)
        made |= {(nproc, rank): torch.load(tmp_path / f"drawn-{nproc}-{rank}.pt") for rank in range(nproc)}
    one = made[1, 0]
    for rank in range(2):
        assert made[2, rank]["packs"] == one["packs"]
        assert difference(made[2, rank]["gradients"], one["gradients"]) < 1e-5
    assert difference(one["gradients"], alone(plain(of_type("starcoder2")), one["packs"])) > 1e-2
