"""Jobs on the CPU: one step with experts on different ranks, against plain transformers, each sample by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import TokensAndSpans, last_words, write_samples
from tests.rounds import LONG, in_long_rounds
from tests.versions import IS_5

from .launcher import run_job
from .test_sharding import SIZES, TIED, Tensors, alone, difference, plain, tokens_and_learnt

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
ROUTER_WEIGHT = 0.3
EP: dict[str, Any] = {"expert_parallel": 2}


def gpt_oss(**fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "head_dim": 8,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "router_aux_loss_coef": 0.0,
    }
    return {"config": {"model_type": "gpt_oss", **SIZES, **own, **fields}, "seed": 3}


def llama4(**fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "head_dim": 8,
        "intermediate_size": 16,
        "intermediate_size_mlp": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 512,
        "interleave_moe_layer_step": 1,
    }
    return {"config": {"model_type": "llama4_text", **SIZES, **own, **fields}, "seed": 3}


def with_images() -> dict[str, Any]:
    """Llama 4 with its tower, which no text runs."""
    text = {name: value for name, value in llama4()["config"].items() if name != "model_type"}
    tower = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "patch_size": 7, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    config = {"model_type": "llama4", "text_config": text, "vision_config": tower, "image_token_index": 1}
    return {"config": config, "seed": 3}


ROUTED = gpt_oss(router_aux_loss_coef=ROUTER_WEIGHT)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
OF_EXPERTS = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
MIXTRAL = {
    "config": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "router_aux_loss_coef": 0.0},
    "seed": 3,
}
OF_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.0}
QWEN3_MOE = {"config": {"model_type": "qwen3_moe", **SIZES, **OF_MOE, "num_experts": 4, "head_dim": 8}, "seed": 3}
OF_GLM = {**OF_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OF_DEEPSEEK = {
    **OF_GLM, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
# Packs of one short sample: on some ranks no token goes to any of their experts.
SHORT: dict[str, dict[str, Any]] = {
    "gpt_oss": {"model": ROUTED, "train": {**EP, "gradient_checkpointing": True}},
    "llama4": {"model": llama4(), "train": EP},
    # With all of a block's experts in one parameter, and a plan, since transformers 5.
    **({"mixtral": {"model": MIXTRAL, "train": EP}} if IS_5 else {}),
}
SHORT_IN_LONG_ROUNDS: dict[str, dict[str, Any]] = {
    "all ranks": {"model": ROUTED, "train": {"expert_parallel": 4}},
    "again": {"model": ROUTED, "train": {"expert_parallel": 4, "gradient_checkpointing": True}},
    "copies": {"model": ROUTED, "train": {**EP, "shard_ranks": 2}},
    "padded": {"model": ROUTED, "train": {**EP, "pad_to": 24, "per_device_batch": 2, "global_batch": 8}},
    "older": {"model": ROUTED, "train": EP, "older_torch": True},  # whose FSDP2 makes no zeros
}
PACKED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"model": gpt_oss(), "train": EP},
    "llama4": {"model": llama4(), "train": {**EP, "gradient_checkpointing": True, "per_device_batch": 2}},
    "dense layers": {"model": llama4(interleave_moe_layer_step=2), "train": EP},
    "copies": {"model": llama4(), "train": {**EP, "shard_ranks": 2}},
    "images": {"model": with_images(), "train": EP},
    "tokens": {"model": gpt_oss(), "train": {**EP, "sequence_parallel": 2}},
    "more tokens": {"model": gpt_oss(num_key_value_heads=4), "train": {**EP, "sequence_parallel": 4}},
    "frozen": {"model": gpt_oss(), "train": {**EP, "frozen": ["*.embed_tokens.*", "*.layers.0.*"]}},
    "frozen experts": {"model": gpt_oss(), "train": {**EP, "frozen": ["*.experts.*"]}},
    "lora": {"model": {**gpt_oss(), "adapter": LORA}, "train": EP},
    "gathered": {"model": gpt_oss(), "train": {**EP, "fsdp": {"reshard_after_forward": False}, "global_batch": 8}},
    "unsharded": {"model": gpt_oss(), "train": {**EP, "fsdp": {"accumulate": "unsharded"}, "global_batch": 8}},
    "mixed": {"model": gpt_oss(), "train": {**EP, "bf16": True}},
    "mixed whole": {"model": gpt_oss(), "train": {"bf16": True}},
}
if IS_5:  # with a plan since then, and experts that all tokens share
    PACKED["qwen3_moe"] = {"model": QWEN3_MOE, "train": EP}
    for kind, fields in (
        ("deepseek_v3", OF_DEEPSEEK),
        ("glm4_moe", {**OF_GLM, "head_dim": 8}),
    ):
        PACKED[kind] = {"model": {"config": {"model_type": kind, **SIZES, **fields}, "seed": 3}, "train": EP}
REFUSED: dict[str, dict[str, Any]] = {
    "dense": {"model": TIED, "train": EP},
    **({} if IS_5 else {"mixtral": {"model": MIXTRAL, "train": EP}}),
    "experts": {"model": gpt_oss(num_local_experts=6), "train": {"expert_parallel": 4}},
    "adapter": {"model": {**gpt_oss(), "adapter": OF_EXPERTS}, "train": EP},
    "rows": {"model": gpt_oss(num_local_experts=2, hidden_size=36, intermediate_size=9), "train": EP},
}


def short_samples() -> list[TokensAndSpans]:
    rng = np.random.default_rng(3)
    return [(rng.integers(5, 131, n).astype(np.int32), np.array([[1, n]], np.int32)) for n in rng.integers(4, 7, 20)]


def run(folder: Path, samples: list[TokensAndSpans], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By case, what each of 4 ranks did."""
    write_samples(folder / "data", samples, shard_bytes=1 << 12)
    cases = {name: {**case, "on": [4]} for name, case in cases.items()}
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": cases}))
    done = run_job(4, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=400)
    assert done.returncode == 0, last_words(done.stderr)
    return {name: [torch.load(folder / f"{name}-4-{rank}.pt") for rank in range(4)] for name in cases}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {**SHORT, **(SHORT_IN_LONG_ROUNDS if LONG else {}), **REFUSED}
    packs_of_one = {name: {"packing_length": 7, **case} for name, case in cases.items()}
    return run(tmp_path_factory.mktemp("short"), short_samples(), packs_of_one)


def expected(kind: Any, packs: list[list[int]]) -> tuple[Tensors, float]:
    """Gradients by transformers' own losses of packs of one sample, with that of the router; and the loss."""
    model, samples = plain(kind), short_samples()
    ids = [torch.from_numpy(samples[i][0].astype(np.int64)) for (i,) in packs]
    num_tokens = sum(map(len, ids))
    total = 0.0
    for each in ids:
        routed = {"output_router_logits": True} if kind is ROUTED else {}
        out = model(input_ids=each[None], use_cache=False, **routed)
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], each[1:], reduction="sum")
        loss = loss / (num_tokens - len(packs))
        total += float(loss.detach())
        balance = ROUTER_WEIGHT * out.aux_loss * len(each) / num_tokens if kind is ROUTED else 0.0
        (loss + balance).backward()
    return {f"model.{name}": each.grad for name, each in model.named_parameters() if each.grad is not None}, total


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([each.float().norm() for each in gradients.values()]).norm())


def test_gradients_of_experts_on_different_ranks_are_those_of_one(short: dict[str, Any]) -> None:
    """With the loss and the norm that they are clipped by; where no token goes to any expert of a rank, too."""
    for name, case in (SHORT | (SHORT_IN_LONG_ROUNDS if LONG else {})).items():
        gradients, loss = expected(case["model"], short[name][0]["packs"])
        for made in short[name]:
            assert difference(made["gradients"], gradients) < 1e-5, name
            assert made["grad_norm"] == pytest.approx(norm_of(gradients), rel=1e-5)
            assert made["loss"] == pytest.approx(loss, rel=1e-5)


def test_ranks_read_packs_of_their_own_and_hold_parts_of_some_experts(short: dict[str, Any]) -> None:
    """Of 8 experts 4, which two ranks share; of 4 experts 2. What is no expert all four share."""
    for name, experts, num_own in (("gpt_oss", "mlp.experts", 2), ("llama4", "feed_forward.experts", 1)):
        assert len({tuple(map(tuple, made["packs"])) for made in short[name]}) == 1
        assert len(short[name][0]["packs"]) == 4
        for made in short[name]:
            assert made["held"][f"model.model.layers.0.{experts}.gate_up_proj"] == (num_own, 32, 32)
            assert made["held"][f"model.model.layers.0.{experts}.down_proj"] == (num_own, 16, 32)
            assert made["held"]["model.model.norm.weight"] == (8,)


def test_what_has_no_experts_to_split_is_refused_by_name_on_every_rank(short: dict[str, Any]) -> None:
    none = (
        "transformers has no plan for expert parallelism of {} (its models with a plan are gpt-oss, Llama 4 and, from "
        "5.0 on, most mixtures of experts): set "
    )
    shared = "train.expert_parallel to 1. Experts are then sharded over ranks like other weights"
    at = "model.layers.*" if IS_5 else "layers.*"
    messages = {
        "dense": none.format("Qwen2ForCausalLM") + shared,
        "experts": "train.expert_parallel 4 does not divide the 6 experts of GptOssForCausalLM: choose a divisor",
        "adapter": "GptOssForCausalLM lacks the parameters of its experts in transformers' plan (such as "
        f"{at}.mlp.experts.gate_up_proj; an adapter of experts has other parameters): set train.expert_parallel to 1",
        "rows": "2 ranks share the same 1 experts by train.expert_parallel, and divide neither these nor the 9 rows of "
        "down_proj: choose another degree, or other train.shard_ranks",
    }
    if not IS_5:
        messages["mixtral"] = none.format("MixtralForCausalLM") + f"{shared}, and train.tensor_parallel cuts them"
    assert messages.keys() == REFUSED.keys()
    assert {name: {made["error"] for made in short[name]} for name in messages} == {
        name: {message} for name, message in messages.items()
    }


@in_long_rounds
def test_gradients_of_packs_of_several_samples_are_those_of_the_samples_one_by_one(tmp_path: Path) -> None:
    results = run(tmp_path, tokens_and_learnt(), PACKED)
    mixed, whole = (results.pop(name)[0] for name in ("mixed", "mixed whole"))
    assert difference(mixed["gradients"], whole["gradients"]) < 0.02  # in bfloat16
    assert mixed["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    for name, ranks in results.items():
        everything = alone(plain(PACKED[name]["model"]), ranks[0]["packs"])
        gradients = {key: value for key, value in everything.items() if key in ranks[0]["gradients"]}
        assert len(gradients) >= 8
        for made in ranks:
            assert difference(made["gradients"], gradients) < 1e-5, name
            assert abs(made["grad_norm"] / norm_of(gradients) - 1) < 1e-5, name
